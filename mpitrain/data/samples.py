"""What data sets have in common: indexes, readers, batches and their tensors."""

from __future__ import annotations

import abc
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from mpitrain.data.sharding import Indices
from mpitrain.errors import DataError
from mpitrain.torch_compat import tree_leaves, tree_map_only

MAX_BYTES = 1 << 30  # maximum size of one file, image or archive member, decompressed
PARTS = ("train", "val", "test")  # the parts of a data set; ``test`` may be missing

Array = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class FileIndex:
    """What rank zero finds out about a large data set, for all ranks."""

    arrays: Mapping[str, Array]
    """By name, such as ``"train_labels"``; numbers only. In shared memory, per node."""
    classes: tuple[str, ...]  # names of the classes, by label
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What else a reader must know; small, and JSON can carry it."""

    def digest(self) -> str:
        """Return a short text that differs if two indexes differ."""
        found = hashlib.sha256(
            repr((self.classes, sorted(self.facts.items()))).encode()
        )
        for name in sorted(self.arrays):
            array = np.ascontiguousarray(self.arrays[name])
            found.update(repr((name, array.dtype.str, array.shape)).encode())
            found.update(array.reshape(-1).view(np.uint8).data)
        return found.hexdigest()[:16]


class LoadedBatch(NamedTuple):
    """The samples of one batch, as read; a tuple, so that torch pins its tensors."""

    inputs: Any
    """Tensor `(N, ...)`, or dicts, lists and tuples of such; ``None`` if N is 0."""
    targets: Any  # tensor `(N, ...)`: labels int64 `(N,)` for classes
    indices: Indices
    """Their numbers, int64 `(N,)`: those requested, without the skipped ones."""
    skipped: tuple[str, ...] = ()
    """What was left out because it cannot be read, in words."""


class SampleReader(abc.ABC):
    """Reads single samples of one part of a large data set, in any process.

    Must be picklable, and open its files in the process that reads them, when it first
    reads. `index` is what the format's scan found, on any rank.
    """

    def __init__(
        self, data_dir: Path, index: FileIndex, part: str, image_size: int
    ) -> None:
        self.data_dir = data_dir
        self.part = part
        self.labels = index.arrays[f"{part}_labels"]
        self.image_size = image_size
        self.set_up(index)

    @abc.abstractmethod
    def set_up(self, index: FileIndex) -> None:
        """Take from the index what else `read` needs."""

    def __len__(self) -> int:
        return len(self.labels)

    @abc.abstractmethod
    def read(
        self, index: int, uniform: npt.NDArray[np.float64] | None
    ) -> tuple[Tensor, int]:
        """Return an image, uint8 `(C, image_size, image_size)`, and its label.

        `uniform` chooses a random crop, float64 `(4,)`; ``None``: the center crop.
        Raises `BadSample` if the sample cannot be read.
        """


def build_readers(
    reader: type[SampleReader], data_dir: Path, index: FileIndex, image_size: int
) -> dict[str, SampleReader]:
    """Return a reader of each part that the index has."""
    return {
        part: reader(data_dir, index, part, image_size)
        for part in PARTS
        if f"{part}_labels" in index.arrays
    }


class BadSample(DataError):
    """A sample that cannot be read: `where` is the file, and the place in it."""

    def __init__(self, where: str, reason: str) -> None:
        super().__init__(
            f"{where}: {reason}.\nMend or remove it, or leave such samples out and "
            "count them: --on-bad-sample skip"
        )
        self.where = where
        self.reason = reason

    def __reduce__(self) -> tuple[Any, ...]:  # through a worker's queue
        return type(self), (self.where, self.reason)


class BadRow(DataError):
    """A row of a batch that does not fit; `named` adds the number of the sample."""

    def __init__(self, row: int, found: str) -> None:
        super().__init__(f"a sample of {found}")
        self.row, self.found = row, found

    def named(self, indices: Indices) -> DataError:
        """Return the error with the number of the sample."""
        if self.row >= len(indices):
            return self
        return DataError(f"sample {indices[self.row]} of {self.found}")


def check_labels(labels: Array, num_images: int, num_classes: int, where: str) -> None:
    """Refuse labels that do not fit the number of images, or are out of range."""
    if len(labels) != num_images:
        raise DataError(
            f"{where}: found {len(labels)} labels, expected {num_images}: one for each "
            "image"
        )
    wrong = np.flatnonzero((labels < 0) | (labels >= num_classes))
    if len(wrong):
        raise DataError(
            f"{where}: label {labels[wrong[0]]} at sample {wrong[0]}; expected 0 to "
            f"{num_classes - 1}"
        )


def name_classes(
    labels: Array, names: Sequence[str] | None, where: str
) -> tuple[str, ...]:
    """Return the name of each class; without `names` the labels are the names."""
    found = np.unique(labels)
    num_classes = len(names) if names else len(found)
    if not np.array_equal(found, np.arange(num_classes)):
        raise DataError(
            f"{where}: found {len(found)} classes among the training samples, with "
            f"labels from {found[0]} to {found[-1]}. Expected each label from 0 to "
            f"{num_classes - 1} at least once"
        )
    return tuple(names or map(str, range(num_classes)))


def map_tensors(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Apply a function to every tensor of dicts, lists and tuples."""
    if isinstance(tree, Tensor):  # the common case: a pytree costs 10 us
        return function(tree)
    return tree_map_only(Tensor, function, tree)


def digest(tree: Any) -> str:
    """Return a short text that is equal if all tensors of two trees are equal."""
    found = hashlib.sha256()
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor):
            raw = leaf.cpu().reshape(-1).contiguous().view(torch.uint8)
            found.update(raw.numpy().tobytes())
    return found.hexdigest()[:16]


def to_device(tree: Any, device: str) -> Any:
    """Move every tensor to a device."""
    return map_tensors(lambda x: x.to(device, non_blocking=True), tree)


def to_dtype(tree: Any, dtype: torch.dtype) -> Any:
    """Convert every floating-point tensor."""
    return map_tensors(lambda x: x.to(dtype) if x.is_floating_point() else x, tree)


def kind_of(value: Any) -> str:
    """Describe a value.

    >>> kind_of((torch.zeros(2, 3), {"a": 1}))
    "tuple of float32 (2, 3), dict of 'a'"
    """
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    kind = type(value).__name__
    if isinstance(value, dict):
        return f"{kind} of {', '.join(map(repr, value))}"
    if isinstance(value, tuple | list):
        more = ", ..." * (len(value) > 3)
        return f"{kind} of {', '.join(map(kind_of, value[:3]))}{more}"
    return kind
