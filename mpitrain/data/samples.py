"""What data sets have in common: readers, batches and their tensors."""

from __future__ import annotations

import abc
import copy
import dataclasses
import functools
import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils import data as torchs

from mpitrain.data.sharding import Indices, StreamPlace
from mpitrain.errors import DataError
from mpitrain.torch_compat import tree_leaves, tree_map

PARTS = ("train", "val", "test")  # the parts of a data set; ``test`` may be missing

Array = npt.NDArray[Any]

WRAPPERS = (torchs.ConcatDataset, torchs.ChainDataset, torchs.StackDataset)

PLAIN = (str, bytes, int, float, np.generic)

_TOLD = "_mpitrain_epoch"  # attribute of a data set: the process, and the epoch


class LoadedBatch(NamedTuple):
    """The samples of one batch, as read; a tuple, so that torch pins its tensors."""

    inputs: Any
    """Tensor `(N, ...)`, or what `collate_fn` returned; ``None`` if N is 0."""
    targets: Any
    """Likewise; ``None`` if the batch is no pair: `inputs` are all of it."""
    indices: Indices
    """Their numbers, int64 `(N,)`: those requested, without the skipped ones."""
    skipped: tuple[str, ...] = ()
    """What was left out because it cannot be read, in words."""
    place: tuple[int, StreamPlace] | None = None
    """Of a stream that knows it: the shard of the first sample, and where it was."""


class SampleReader(abc.ABC):
    """Reads single samples of one part of a large data set, in any process.

    Must be picklable, and open its files in the process that reads them, when it first
    reads.
    """

    @abc.abstractmethod
    def __len__(self) -> int:
        """Return the number of samples."""

    @abc.abstractmethod
    def read(
        self, index: int, uniform: npt.NDArray[np.float64] | None
    ) -> tuple[Tensor, int]:
        """Return the input and the target of a sample.

        `uniform` chooses what of it is read, float64 `(4,)`; ``None``: nothing random.
        Raises `BadSample` if the sample cannot be read.
        """


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


def wrapped_sets(dataset: Any) -> list[Any]:
    """Return the data sets that one of torch's wrappers holds."""
    if isinstance(dataset, torchs.Subset):
        return [dataset.dataset]
    sets: Any = dataset.datasets if isinstance(dataset, WRAPPERS) else ()
    return list(sets.values() if isinstance(sets, dict) else sets)


def sets_with_epochs(dataset: Any) -> list[Any]:
    """Return the data set, if it has `set_epoch`, else those that it wraps and have."""
    if callable(getattr(dataset, "set_epoch", None)):
        return [dataset]
    return [it for inner in wrapped_sets(dataset) for it in sets_with_epochs(inner)]


def tell_epoch(sets: Iterable[Any], epoch: int) -> None:
    """Call `set_epoch` of sets that this process has told another epoch last."""
    for it in sets:
        # At the set itself, since a training and a validation may read the same one.
        attributes = getattr(it, "__dict__", {})
        if attributes.get(_TOLD) != (told := (os.getpid(), epoch)):
            it.set_epoch(epoch)
            attributes[_TOLD] = told


def map_tensors(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """Apply a function to every tensor of dicts, lists, tuples and dataclasses."""
    if isinstance(tree, Tensor):  # the common case: a pytree costs 10 us
        return function(tree)

    def map_leaf(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return function(leaf)
        return _map_fields(functools.partial(map_tensors, function), leaf)

    return tree_map(map_leaf, tree)


def _map_fields(function: Callable[[Any], Any], leaf: Any) -> Any:
    if not dataclasses.is_dataclass(leaf) or isinstance(leaf, type):
        return leaf
    mapped = copy.copy(leaf)
    for each in dataclasses.fields(leaf):
        value = function(getattr(leaf, each.name))
        object.__setattr__(mapped, each.name, value)  # it may be frozen
    return mapped


CollateFn = Callable[[list[Any]], Any]
"""`DataLoader`'s ``collate_fn``: maps samples to a batch of any kind."""


def leaves_of(tree: Any) -> list[Any]:
    """Return what is in dicts, lists, tuples, dataclasses, and in objects with such.

    Of objects those with ``to_dict()``, as graphs have, and those that are mappings.
    """
    return [leaf for _, leaf in named_leaves(tree)]


def named_leaves(tree: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the same with their names, such as ``meta.path.0``."""
    parts: Iterable[tuple[Any, Any]]
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        fields = dataclasses.fields(tree)
        parts = [(each.name, getattr(tree, each.name)) for each in fields]
    elif isinstance(tree, Mapping):
        parts = tree.items()
    elif type(tree) in (list, tuple):
        parts = enumerate(tree)
    elif hasattr(tree, "to_dict"):
        yield from named_leaves(tree.to_dict(), name)
        return
    else:
        found = tree_leaves(tree)
        if len(found) == 1 and found[0] is tree:
            yield name, tree
            return
        parts = enumerate(found)  # of another class that torch knows
    for key, part in parts:
        yield from named_leaves(part, f"{name}.{key}".lstrip("."))


def digest(tree: Any) -> str:
    """Return a short text that is equal if all tensors of two trees are equal."""
    found = hashlib.sha256()
    tensors = [leaf for leaf in leaves_of(tree) if isinstance(leaf, Tensor)]
    for leaf in (part for tensor in tensors for part in dense_parts(tensor)):
        # As bytes: NumPy has no bfloat16.
        raw = leaf.cpu().reshape(-1).contiguous().view(torch.uint8)
        found.update(raw.numpy().tobytes())
    return found.hexdigest()[:16]


def sample_digest(sample: Any, *, is_path_whole: bool = False) -> str:
    """Return a text that is equal for equal samples; other objects do not count.

    Texts, numbers and arrays count as tensors do; of a path its last part, unless
    ``is_path_whole``, since the next job may have the files elsewhere. Streams have it
    in checkpoints.
    """
    plain: list[Any] = []
    for _, leaf in named_leaves(sample):
        if isinstance(leaf, PLAIN):
            plain.append(leaf if is_path_whole else without_folders(leaf))
        elif isinstance(leaf, np.ndarray):
            # All of it: repr() leaves out the middle of an array of over 1000 numbers.
            # Of objects tobytes() would be their addresses.
            values: Any = [it for _, it in plain_leaves(leaf)]
            if not is_path_whole and _has_texts(leaf):  # its dtype has their length
                plain.append((leaf.shape, [*map(without_folders, values)]))
            else:
                values = values if leaf.dtype.hasobject else leaf.tobytes()
                plain.append((leaf.dtype.str, leaf.shape, values))
    return digest([sample, _as_bytes(plain)])


def values_digest(sample: Any, texts: Iterable[str] = ()) -> str:
    """Return a text that is equal for equal tensors, arrays of numbers, and texts."""
    arrays = [
        (leaf.dtype.str, leaf.shape, leaf.tobytes())
        for leaf in leaves_of(sample)
        if isinstance(leaf, np.ndarray) and not _has_texts(leaf)
    ]
    return digest([sample, _as_bytes([arrays, *texts])])


def plain_leaves(sample: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield texts, numbers and the like with their names, also those of arrays."""
    for where, leaf in named_leaves(sample, name):
        if isinstance(leaf, PLAIN):
            yield where, leaf
        elif isinstance(leaf, np.ndarray) and _has_texts(leaf):
            yield from plain_leaves(leaf.tolist(), where)


def without_folders(value: Any) -> Any:
    """Return the last part of a text with slashes, else the value."""
    return value.rpartition("/")[2] if isinstance(value, str) else value


def _has_texts(array: Array) -> bool:
    return array.dtype.hasobject or array.dtype.kind == "U"


def _as_bytes(plain: list[Any]) -> Tensor:
    return torch.frombuffer(bytearray(repr(plain).encode()), dtype=torch.uint8)


def dense_parts(tensor: Tensor) -> list[Tensor]:
    """Return the tensors that a sparse or nested one consists of; of another itself."""
    if tensor.layout == torch.sparse_coo:
        tensor = tensor.coalesce()
        return [tensor.indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
        return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]
    if tensor.is_nested:
        return list(tensor.unbind())
    return [tensor.resolve_conj().resolve_neg()]  # of these no bytes can be viewed


def to_device(tree: Any, device: str) -> Any:
    """Move every tensor to a device, and every object that has a method ``to``."""

    def moves_itself(leaf: Any) -> bool:
        return callable(getattr(leaf, "to", None)) and not isinstance(leaf, type)

    def move(leaf: Any) -> Any:
        if isinstance(leaf, Tensor):
            return leaf.to(device, non_blocking=True)
        if moves_itself(leaf):
            return leaf.to(device)
        return _map_fields(lambda value: to_device(value, device), leaf)

    if isinstance(tree, Tensor):
        return move(tree)
    # `is_leaf`: a `PackedSequence` is a tuple, of which one part stays on the CPU.
    return tree_map(move, tree, is_leaf=moves_itself)


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
