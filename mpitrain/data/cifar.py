"""CIFAR-10 and CIFAR-100, from their "python version": a folder of pickles.

The format is described on https://www.cs.toronto.edu/~kriz/cifar.html.
"""

from __future__ import annotations

import gzip
import math
import tarfile
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from mpitrain.data import unpickling
from mpitrain.data.samples import MOST_BYTES, Table
from mpitrain.data.tables import (
    Part,
    advised,
    beginning,
    check_labels,
    not_there,
    table,
)
from mpitrain.errors import DataError

SHAPE = (3, 32, 32)
"""Channels, height and width of an image."""


@dataclass(frozen=True, kw_only=True)
class Layout:
    """The files of one set, and what is where in them."""

    archive: str
    folder: str
    train: tuple[str, ...]
    val: str
    meta: str
    """The file with the names of the classes."""
    labels_key: str
    names_key: str

    @property
    def files(self) -> tuple[str, ...]:
        """All files of the folder."""
        return (*self.train, self.val, self.meta)


LAYOUTS = {
    "cifar10": Layout(
        archive="cifar-10-python.tar.gz",
        folder="cifar-10-batches-py",
        train=tuple(f"data_batch_{number}" for number in range(1, 6)),
        val="test_batch",
        meta="batches.meta",
        labels_key="labels",
        names_key="label_names",
    ),
    "cifar100": Layout(
        archive="cifar-100-python.tar.gz",
        folder="cifar-100-python",
        train=("train",),
        val="test",
        meta="meta",
        labels_key="fine_labels",
        names_key="fine_label_names",
    ),
}


def find(name: str, data_dir: Path) -> Path | None:
    """Return the folder that has all files of a set, else its archive, else ``None``.

    Args:
        name: ``"cifar10"`` or ``"cifar100"``.
        data_dir: Where to look.
    """
    layout = LAYOUTS[name]
    for place in (data_dir / layout.folder, data_dir):
        if not _lacking(place, layout):
            return place
    archive = data_dir / layout.archive
    return archive if archive.is_file() else None


def lacking(name: str, data_dir: Path) -> list[Path]:
    """Return the files to fetch, where torchvision has them; none if `find` finds them.

    Args:
        name: ``"cifar10"`` or ``"cifar100"``.
        data_dir: Where to look.
    """
    if find(name, data_dir) is not None:
        return []
    place = data_dir / LAYOUTS[name].folder
    return [place / file for file in _lacking(place, LAYOUTS[name])]


def read(name: str, data_dir: Path) -> Table:
    """Read a set whole.

    Args:
        name: ``"cifar10"`` or ``"cifar100"``.
        data_dir: Folder with the set's folder, that folder itself, or the folder with
            the archive that holds it.

    Returns:
        ``train_inputs`` and ``val_inputs``, uint8 `(N, 3, 32, 32)`; ``train_labels``
        and ``val_labels``, int64 `(N,)`; for CIFAR-100 the 100 fine labels.

    Raises:
        DataError: A file is missing or broken, or they do not fit together.
    """
    layout = LAYOUTS[name]
    with advised(name, data_dir):
        source = find(name, data_dir)
        if source is None:
            folders = (data_dir / layout.folder, data_dir)
            places = {place: _lacking(place, layout) for place in folders}
            error = not_there(name, data_dir, layout.files, places)
            raise DataError(f"{error}; nor is {layout.archive} in {data_dir}")
        contents = _from_folder if source.is_dir() else _from_archive
        loaded = {
            file: (where, unpickling.load(raw, where))
            for file, where, raw in contents(source, layout)
        }
        classes = _names(*loaded[layout.meta], layout.names_key)

        def batch(file: str) -> Part:
            return _batch(*loaded[file], layout.labels_key, len(classes))

        batches = [batch(file) for file in layout.train]
        train = Part(
            inputs=np.concatenate([one.inputs for one in batches]),
            labels=np.concatenate([one.labels for one in batches]),
            inputs_from=str(source),
            labels_from=str(source),
        )
        return table(train, batch(layout.val), classes)


def _lacking(place: Path, layout: Layout) -> list[str]:
    return [file for file in layout.files if not (place / file).is_file()]


def _from_folder(folder: Path, layout: Layout) -> Iterator[tuple[str, str, bytes]]:
    """Yield each file's name, where it is, and its content."""
    for file in layout.files:
        if (folder / file).stat().st_size > MOST_BYTES:
            raise DataError(f"{folder / file}: has more than {MOST_BYTES} bytes")
        yield file, str(folder / file), (folder / file).read_bytes()


def _from_archive(archive: Path, layout: Layout) -> Iterator[tuple[str, str, bytes]]:
    """Yield each file's name, where it is, and its content, from the ``.tar.gz``."""
    wanted = {f"{layout.folder}/{file}": file for file in layout.files}
    try:
        with gzip.open(archive) as unzipped:

            def read(size: int) -> bytes:
                if unzipped.tell() > MOST_BYTES:
                    raise DataError(
                        f"{archive}: unpacks to more than {MOST_BYTES} bytes"
                    )
                return unzipped.read(size)

            stream: Any = SimpleNamespace(read=read)
            with tarfile.open(fileobj=stream, mode="r|") as tar:
                for member in tar:
                    content = tar.extractfile(member) if member.isfile() else None
                    if content is not None and member.name in wanted:
                        file = wanted.pop(member.name)
                        yield file, f"{archive}: {member.name}", content.read()
            while read(2**20):
                pass  # to its end, where its check sum is
    except gzip.BadGzipFile as error:
        with archive.open("rb") as plain:
            start = plain.read(100)
        if start.startswith(b"\x1f\x8b"):
            raise DataError(f"{archive}: is corrupt: {error}") from None
        raise DataError(f"{archive}: expected a .tar.gz, {beginning(start)}") from None
    except zlib.error as error:
        raise DataError(f"{archive}: is corrupt: {error}") from None
    except EOFError:
        raise DataError(
            f"{archive}: found {archive.stat().st_size} bytes, ends in the middle"
        ) from None
    except tarfile.TarError as error:
        raise DataError(
            f"{archive}: no tar archive in it, or cut short: {error}"
        ) from None
    if wanted:
        raise DataError(f"{archive}: has no {', '.join(wanted)}")


def _names(where: str, loaded: Mapping[str, Any], key: str) -> tuple[str, ...]:
    """Return the names of the classes."""
    names = _value(where, loaded, key)
    if not (isinstance(names, list) and all(isinstance(n, bytes | str) for n in names)):
        raise DataError(f"{where}: {key} is not a list of names: {names!r:.100}")
    return tuple(n.decode("latin1") if isinstance(n, bytes) else n for n in names)


def _batch(where: str, loaded: Mapping[str, Any], key: str, num_classes: int) -> Part:
    """Make the images and labels of one file."""
    labels = _value(where, loaded, key)
    data = _value(where, loaded, "data")
    inputs = unpickling.bytes_array(data, math.prod(SHAPE), where)
    if not (isinstance(labels, list) and all(type(label) is int for label in labels)):
        raise DataError(f"{where}: its {key} are not a list of whole numbers")
    try:
        found = np.array(labels, np.int64)
    except OverflowError:
        raise DataError(f"{where}: its {key} are out of all bounds") from None
    check_labels(found, len(inputs), num_classes, where)
    return Part(
        inputs=inputs.reshape(-1, *SHAPE),
        labels=found,
        inputs_from=where,
        labels_from=where,
    )


def _value(where: str, loaded: Mapping[str, Any], key: str) -> Any:
    if key not in loaded:
        raise DataError(f"{where}: has no {key!r}; it has {', '.join(loaded)}")
    return loaded[key]
