"""Folders of images: data_dir/train/CLASS/**/*.jpg, and the same under val, maybe test.

Classes and order are those of torchvision's ``ImageFolder``, except that hidden files
are left out and an empty class is refused.
"""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
from torch import Tensor

from mpitrain.data.samples import PARTS, Array, BadSample
from mpitrain.errors import DataError
from mpitrain.tasks.image_classification.datasets.images import (
    EXTENSIONS,
    Uniform,
    decode,
)
from mpitrain.tasks.image_classification.datasets.index import FileIndex, ImageReader

LAYOUT = "train/CLASS/NAME.jpg and val/CLASS/NAME.jpg"


class FolderReader(ImageReader):
    """Reads the images of one part."""

    def set_up(self, index: FileIndex) -> None:
        """Take the names of the files from the index."""
        self.names = index.arrays[f"{self.part}_names"]
        self.ends = index.arrays[f"{self.part}_ends"]

    def path(self, index: int) -> Path:
        """Return the file of a sample."""
        start = int(self.ends[index - 1]) if index else 0
        name = self.names[start : int(self.ends[index])].tobytes()
        return self.data_dir / self.part / os.fsdecode(name)

    def read(self, index: int, uniform: Uniform | None) -> tuple[Tensor, int]:
        """Return an image uint8 `(3, image_size, image_size)` and its label."""
        path = self.path(index)
        where = os.fsencode(path).decode("utf-8", "backslashreplace")  # can be printed
        try:
            data = path.read_bytes()
        except OSError as error:
            raise BadSample(where, str(error.strerror)) from error
        return decode(data, self.image_size, uniform, where), int(self.labels[index])


def scan(data_dir: Path) -> FileIndex:
    """List the images of all parts.

    ``PART_names`` holds the paths from the part's folder one after the other, uint8;
    ``PART_ends`` where each ends, int64 `(N,)`.
    """
    arrays: dict[str, Array] = {}
    classes: list[str] = []
    for part in PARTS:
        folder = data_dir / part
        if part == "test" and not folder.is_dir():
            continue
        found = _classes(folder)
        classes = classes or found
        # A test set may have some of the classes.
        if found != classes and (part != "test" or not set(found) <= set(classes)):
            odd = sorted(set(found) ^ set(classes))[0]
            what = "unknown" if odd in found else "no"
            raise DataError(
                f"{folder}: {what} class {odd!r}. Expected a folder for each of the "
                f"{len(classes)} classes of {data_dir}/train, and no other"
            )
        images = [images_below(folder / it) if it in found else [] for it in classes]
        start = len(os.fspath(folder)) + 1
        names = [os.fsencode(path[start:]) for paths in images for path in paths]
        arrays |= {
            f"{part}_names": np.frombuffer(b"".join(names), np.uint8),
            f"{part}_ends": np.cumsum([len(name) for name in names], dtype=np.int64),
            f"{part}_labels": np.repeat(np.arange(len(classes)), [*map(len, images)]),
        }
    facts = {"channels": 3, "size": None}
    return FileIndex(arrays=arrays, classes=tuple(classes), facts=facts)


def images_below(folder: Path) -> list[str]:
    """Return the images of a class, in the order of torchvision's ``ImageFolder``."""
    found: list[tuple[str, str]] = []
    seen = {folder.resolve()}
    others = ""

    def fail(error: OSError) -> None:
        raise DataError(f"{error.filename}: cannot be listed, {error.strerror}")

    for path, folders, names in os.walk(folder, onerror=fail, followlinks=True):
        for name in sorted(folders):
            real = Path(path, name).resolve()
            if name.startswith(".") or real in seen:  # a link to where we are or were
                folders.remove(name)
            seen.add(real)
        folders.sort()
        for name in names:
            extension = name.rpartition(".")[2].lower()
            if extension in EXTENSIONS and not name.startswith("."):
                found.append((path, name))
            else:
                others = name
    if not found:
        raise DataError(
            f"{folder}: no images; found {repr(others) if others else 'it empty'}, "
            f"expected {' '.join(f'.{name}' for name in sorted(EXTENSIONS))}. Fill the "
            "folder, or remove the class from all parts"
        )
    return [f"{path}/{name}" for path, name in sorted(found)]


def _classes(folder: Path) -> list[str]:
    try:
        with os.scandir(folder) as entries:
            visible = [entry for entry in entries if not entry.name.startswith(".")]
        # Of a link to itself the kind cannot be told.
        classes = sorted(entry.name for entry in visible if entry.is_dir())
    except OSError as error:
        raise DataError(
            f"{error.filename or folder}: cannot be listed, {error.strerror}. Expected "
            f"{LAYOUT} in --data-dir FOLDER"
        ) from None
    if not classes:
        found = repr(visible[0].name) if visible else "nothing"
        expected = (
            "test/CLASS/NAME.jpg, or no folder test, which is optional: rename it, "
            "such as to unlabeled"
            if folder.name == "test"
            else LAYOUT
        )
        raise DataError(
            f"{folder}: no folders of classes, found {found}. Expected {expected}"
        )
    return classes
