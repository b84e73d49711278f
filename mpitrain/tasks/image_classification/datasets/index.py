"""What the formats of image files have in common: an index, a reader, labels."""

from __future__ import annotations

import abc
import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mpitrain.data.samples import PARTS, Array, SampleReader
from mpitrain.errors import DataError

MAX_BYTES = 1 << 30  # maximum size of one file, image or archive member, decompressed


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


class ImageReader(SampleReader):
    """Reads the images of one part; `index` is what the format's scan found.

    An input is an image, uint8 `(C, image_size, image_size)`, and a target its label;
    ``uniform`` chooses a random crop, ``None``: the center crop.
    """

    def __init__(
        self, data_dir: Path, index: FileIndex, part: str, image_size: int
    ) -> None:
        self.data_dir = data_dir
        self.part = part
        self.labels = index.arrays[f"{part}_labels"]
        self.image_size = image_size
        self.keeps_images = index.facts.get("size") == image_size  # no resize, no crop
        self.set_up(index)

    @abc.abstractmethod
    def set_up(self, index: FileIndex) -> None:
        """Take from the index what else `read` needs."""

    def __len__(self) -> int:
        return len(self.labels)


def build_readers(
    reader: type[ImageReader], data_dir: Path, index: FileIndex, image_size: int
) -> dict[str, ImageReader]:
    """Return a reader of each part that the index has."""
    return {
        part: reader(data_dir, index, part, image_size)
        for part in PARTS
        if f"{part}_labels" in index.arrays
    }


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
    if twice := [name for name, num in Counter(names or ()).items() if num > 1]:
        raise DataError(
            f"{where}: found the class {twice[0]!r} twice; expected one name for each"
        )
    found = np.unique(labels)
    num_classes = len(names) if names else len(found)
    if not np.array_equal(found, np.arange(num_classes)):
        raise DataError(
            f"{where}: found {len(found)} classes among the training samples, with "
            f"labels from {found[0]} to {found[-1]}. Expected each label from 0 to "
            f"{num_classes - 1} at least once"
        )
    return tuple(names or map(str, range(num_classes)))
