"""Folders of images: data_dir/train/CLASS/**/*.jpg, and the same under val, maybe test.

Classes and order are those of torchvision's ``ImageFolder``, except that hidden files
are left out and an empty class is refused. Names are bytes throughout: a file system
does not promise that they are text.
"""

from __future__ import annotations

import os
from collections import Counter
from pathlib import Path

import numpy as np
import numpy.typing as npt
from torch import Tensor

from mpitrain.data.images import EXTENSIONS, Uniform, decode
from mpitrain.data.samples import PARTS, Array, BadSample, Table
from mpitrain.errors import DataError

ENDINGS = frozenset(ending.encode() for ending in EXTENSIONS)
LAYOUT = "train/CLASS/NAME.jpg and val/CLASS/NAME.jpg"


class FolderReader:
    """Reads the images of one part.

    Args:
        folder: The part's folder.
        names: Paths from `folder` of all images, one after the other, uint8.
        ends: Where each ends in `names`, int64 `(N,)`.
        labels: int64 `(N,)`.
        image_size: Height and width of what is read, in pixels.
    """

    def __init__(
        self,
        folder: Path,
        names: npt.NDArray[np.uint8],
        ends: npt.NDArray[np.int64],
        labels: npt.NDArray[np.int64],
        image_size: int,
    ) -> None:
        self.folder = folder
        self.names = names
        self.ends = ends
        self.labels = labels
        self.image_size = image_size

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.labels)

    def path(self, index: int) -> Path:
        """Return the file of a sample."""
        start = int(self.ends[index - 1]) if index else 0
        name = self.names[start : int(self.ends[index])].tobytes()
        return self.folder / os.fsdecode(name)

    def where(self, index: int) -> str:
        """Return the path of a sample's file, in characters that can be printed."""
        return _printable(os.fsencode(self.path(index)))

    def read(self, index: int, uniform: Uniform | None) -> tuple[Tensor, int]:
        """Return an image uint8 `(3, image_size, image_size)` and its label.

        Raises:
            BadSample: Its file is gone, or no image.
        """
        try:
            data = self.path(index).read_bytes()
        except OSError as error:
            raise BadSample(self.where(index), str(error.strerror)) from error
        image = decode(data, self.image_size, uniform, self.where(index))
        return image, int(self.labels[index])


def scan(data_dir: Path) -> Table:
    """List the images of all parts.

    Returns:
        For each part its names, ends and labels, as `FolderReader` takes them.

    Raises:
        DataError: A folder is missing or empty, or parts differ in their classes.
    """
    if not data_dir.is_dir():
        raise DataError(
            f"{data_dir}: no such folder. Expected one with {LAYOUT}: --data-dir FOLDER"
        )
    arrays: dict[str, Array] = {}
    classes: list[bytes] = []
    for part in PARTS:
        folder = data_dir / part
        if not folder.is_dir():
            if part == "test":
                continue
            found = ", ".join(repr(os.fsdecode(name)) for name in _folders(data_dir))
            raise DataError(
                f"{data_dir}: no folder {part!r}. Expected {LAYOUT}; found "
                f"{found or 'no folders'}"
            )
        found_classes = _classes(folder)
        classes = classes or found_classes
        _compare(folder, found_classes, classes)
        arrays.update(_list_part(folder, part, classes))
    names = tuple(os.fsdecode(name) for name in classes)
    return Table(arrays=arrays, classes=names, facts={"channels": 3, "size": None})


def readers(data_dir: Path, table: Table, image_size: int) -> dict[str, FolderReader]:
    """Return a reader for each part.

    Args:
        data_dir: As given to `scan`.
        table: What `scan` returned, on any rank.
        image_size: Height and width of what is read, in pixels.
    """
    return {
        part: FolderReader(
            data_dir / part,
            table.arrays[f"{part}_names"],
            table.arrays[f"{part}_ends"],
            table.arrays[f"{part}_labels"],
            image_size,
        )
        for part in PARTS
        if f"{part}_labels" in table.arrays
    }


def _list_part(folder: Path, part: str, classes: list[bytes]) -> dict[str, Array]:
    """List the images of one part, by class."""
    blobs: list[bytes] = []
    lengths: list[Array] = []
    counts: list[int] = []
    others: Counter[str] = Counter()
    empty = ""
    for name in classes:
        rest: Counter[str] = Counter()
        files = _images(os.fsencode(folder / os.fsdecode(name)), rest)
        if not files:
            empty = empty or (
                f"{_printable(os.fsencode(folder) + b'/' + name)}: no images; "
                f"{_others(rest)}"
            )
        paths = [b"/".join((name, *inner)) for inner in files]
        blobs.append(b"".join(paths))
        lengths.append(np.array([len(path) for path in paths], np.int64))
        counts.append(len(paths))
        others += rest
    if not any(counts):
        raise DataError(
            f"{folder}: no images in its {len(classes)} classes; {_others(others)}"
        )
    if empty:
        raise DataError(
            f"{empty}. Fill the folder, or remove the class from all parts."
        )
    return {
        f"{part}_names": np.frombuffer(b"".join(blobs), np.uint8),
        f"{part}_ends": np.cumsum(np.concatenate(lengths), dtype=np.int64),
        f"{part}_labels": np.repeat(np.arange(len(classes), dtype=np.int64), counts),
    }


def images_below(folder: Path) -> list[Path]:
    """List the images of a class, in the order in which they are numbered."""
    found = _images(os.fsencode(folder), Counter())
    return [folder.joinpath(*map(os.fsdecode, inner)) for inner in found]


def _images(folder: bytes, others: Counter[str]) -> list[tuple[bytes, ...]]:
    """List the images in and below a folder, sorted as ``ImageFolder`` sorts them.

    Args:
        folder: Of a class.
        others: Counts, by ending, the files that are no images.

    Returns:
        Paths from `folder`, each as (folders, name) or, without folders, (name,).
    """
    found: list[tuple[bytes, bytes]] = []
    start = Path(os.fsdecode(folder)).stat()
    waiting = [(b"", frozenset({_identity(start)}))]
    while waiting:
        inner, above = waiting.pop()
        path = folder + b"/" + inner
        for entry in _entries(path):
            if entry.is_dir():
                below = b"/".join((inner, entry.name)) if inner else entry.name
                identity = _identity(entry.stat())
                if identity not in above:  # else a link to a folder that it is in
                    waiting.append((below, above | {identity}))
            elif _ending(entry.name) in ENDINGS:
                found.append((inner, entry.name))
            else:
                others[_printable(b"." + _ending(entry.name))] += 1
    found.sort()
    return [(inner, name) if inner else (name,) for inner, name in found]


def _identity(status: os.stat_result) -> tuple[int, int]:
    """Return what is the same for all names of one folder."""
    return status.st_dev, status.st_ino


def _classes(folder: Path) -> list[bytes]:
    """Return the sorted names of the folders of a part."""
    classes = _folders(folder)
    if not classes:
        files = Counter(
            _printable(b"." + _ending(entry.name))
            for entry in _entries(os.fsencode(folder))
        )
        raise DataError(
            f"{folder}: no folders of classes; {_others(files)}. Expected one for each "
            f"class: {folder}/CLASS/NAME.jpg"
        )
    return classes


def _compare(folder: Path, found: list[bytes], classes: list[bytes]) -> None:
    """Refuse a part whose classes are not those of train."""
    for what, names in (
        ("no", set(classes) - set(found)),
        ("unknown", set(found) - set(classes)),
    ):
        if names:
            shown = ", ".join(repr(os.fsdecode(name)) for name in sorted(names)[:5])
            more = f" and {len(names) - 5} more" if len(names) > 5 else ""
            raise DataError(
                f"{folder}: {what} class {shown}{more}. Expected a folder for each of "
                f"the {len(classes)} classes of {folder.parent}/train, and no other."
            )


def _folders(folder: Path) -> list[bytes]:
    """Return the sorted names of the folders in a folder."""
    entries = _entries(os.fsencode(folder))
    return sorted(entry.name for entry in entries if entry.is_dir())


def _entries(folder: bytes) -> list[os.DirEntry[bytes]]:
    """List a folder, without what is hidden."""
    try:
        with os.scandir(folder) as entries:
            return [entry for entry in entries if not entry.name.startswith(b".")]
    except OSError as error:
        raise DataError(
            f"{_printable(folder)}: cannot be listed, {error.strerror}"
        ) from error


def _ending(name: bytes) -> bytes:
    """Return what follows the last dot, in lower case; empty where there is none."""
    return name.rpartition(b".")[2].lower() if b"." in name else b""


def _others(others: Counter[str]) -> str:
    """Say which files were found instead of images."""
    found = ", ".join(f"{count} {ending}" for ending, count in others.most_common(5))
    known = " ".join(f".{ending}" for ending in sorted(EXTENSIONS))
    return f"found {found or 'it empty'}, expected {known}"


def _printable(name: bytes) -> str:
    r"""Return a path as text; bytes that are no UTF-8 as ``\xff``."""
    return name.decode("utf-8", "backslashreplace")
