"""MNIST and Fashion-MNIST, from their IDX files.

The format is described on MNIST's page, http://yann.lecun.com/exdb/mnist/: two zero
bytes, the type (8: unsigned bytes), the number of dimensions, each dimension as a
big-endian 32-bit number, then the values.
"""

from __future__ import annotations

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np

from mpitrain.data.samples import MOST_BYTES, Array, Table
from mpitrain.data.tables import Part, advised, beginning, not_there, table
from mpitrain.errors import DataError

FOLDERS = {"mnist": "MNIST", "fashion-mnist": "FashionMNIST"}
"""Where torchvision keeps each set: ``<folder>/raw``."""

CLASSES = {
    "mnist": tuple("0123456789"),
    "fashion-mnist": (
        "T-shirt/top",
        "Trouser",
        "Pullover",
        "Dress",
        "Coat",
        "Sandal",
        "Shirt",
        "Sneaker",
        "Bag",
        "Ankle boot",
    ),
}
"""Names of the classes, as in torchvision."""

PREFIXES = ("train", "t10k")
FILES = tuple(
    f"{prefix}-{kind}"
    for prefix in PREFIXES
    for kind in ("images-idx3-ubyte", "labels-idx1-ubyte")
)
"""The files of a set, each as it is or with ``.gz``."""

UNSIGNED_BYTES = 8


def find(name: str, data_dir: Path) -> Path | None:
    """Return the folder that has all files of a set; ``None`` if there is none.

    Both sets name their files alike, so torchvision's folder, which names the set,
    comes before `data_dir` itself.

    Args:
        name: ``"mnist"`` or ``"fashion-mnist"``.
        data_dir: Where to look.
    """
    return next((p for p in _places(name, data_dir) if not _lacking(p)), None)


def lacking(name: str, data_dir: Path) -> list[Path]:
    """Return the files to fetch, where torchvision has them; none if `find` finds them.

    Args:
        name: ``"mnist"`` or ``"fashion-mnist"``.
        data_dir: Where to look.
    """
    if find(name, data_dir) is not None:
        return []
    place = _places(name, data_dir)[0]
    return [place / file for file in _lacking(place)]


def read(name: str, data_dir: Path) -> Table:
    """Read a set whole.

    Args:
        name: ``"mnist"`` or ``"fashion-mnist"``.
        data_dir: Folder with the files, or with torchvision's folder of them.

    Returns:
        ``train_inputs`` and ``val_inputs``, uint8 `(N, 1, H, W)`, of the size that the
        files say; ``train_labels`` and ``val_labels``, int64 `(N,)`.

    Raises:
        DataError: A file is missing or broken, or they do not fit together.
    """
    with advised(name, data_dir):
        folder = find(name, data_dir)
        if folder is None:
            places = {place: _lacking(place) for place in _places(name, data_dir)}
            raise not_there(name, data_dir, FILES, places)
        train, val = (_part(folder, prefix) for prefix in PREFIXES)
        return table(train, val, CLASSES[name])


def _places(name: str, data_dir: Path) -> tuple[Path, Path]:
    return data_dir / FOLDERS[name] / "raw", data_dir


def _lacking(place: Path) -> list[str]:
    return [file for file in FILES if _file(place, file) is None]


def _file(place: Path, file: str) -> Path | None:
    """Return a file, as it is or compressed; ``None`` if it is not there."""
    both = (place / file, place / f"{file}.gz")
    return next((path for path in both if path.is_file()), None)


def _part(folder: Path, prefix: str) -> Part:
    images = _file(folder, f"{prefix}-images-idx3-ubyte")
    labels = _file(folder, f"{prefix}-labels-idx1-ubyte")
    assert images is not None
    assert labels is not None
    inputs = array_of(images, 3)
    if inputs.size == 0 and len(inputs):
        height, width = inputs.shape[1:]
        raise DataError(f"{images}: its header says images of {height}x{width} pixels")
    return Part(
        inputs=inputs[:, np.newaxis],
        labels=array_of(labels, 1).astype(np.int64),
        inputs_from=str(images),
        labels_from=str(labels),
    )


def array_of(file: Path, num_dims: int) -> Array:
    """Read one IDX file of unsigned bytes.

    Args:
        file: As it is or compressed by gzip; its content tells.
        num_dims: Dimensions that it must have: 3 for images, 1 for labels.

    Returns:
        A uint8 array of the shape that the file says.

    Raises:
        DataError: It is no such file, or not whole.
    """
    raw, unpacked = _content(file, 100)
    magic = bytes([0, 0, UNSIGNED_BYTES, num_dims])
    if raw[:4] != magic:
        raise DataError(
            f"{file}: expected {magic.hex(' ')} first, as in an IDX file of "
            f"{num_dims} dimensions, {beginning(raw)}"
        )
    start = 4 + 4 * num_dims
    if len(raw) < start:
        raise DataError(
            f"{file}: found {len(raw)} bytes{unpacked}, in the middle of its header"
        )
    shape = struct.unpack(f">{num_dims}I", raw[4:start])
    expected = start + math.prod(shape)
    if expected > MOST_BYTES:
        raise DataError(
            f"{file}: its header says {expected} bytes, expected {MOST_BYTES} at most"
        )
    raw, unpacked = _content(file, expected + 1)
    if len(raw) != expected:
        wrong = "cut short" if len(raw) < expected else "too long"
        num = f"more than {expected}" if len(raw) > expected else len(raw)
        raise DataError(
            f"{file}: found {num} bytes{unpacked}, expected {expected} for the "
            f"shape {shape} in its header: it is {wrong}"
        )
    return np.frombuffer(raw, np.uint8, offset=start).reshape(shape).copy()


def _content(file: Path, most: int) -> tuple[bytes, str]:
    """Return a file's first bytes, and how to call them: unpacked if they were zipped.

    Args:
        file: Its name.
        most: How many; a small file may unpack to any number.
    """
    with file.open("rb") as plain:
        is_zipped = plain.read(2) == b"\x1f\x8b"
    try:
        with gzip.open(file) if is_zipped else file.open("rb") as stream:
            return stream.read(most), " unpacked" if is_zipped else ""
    except EOFError:
        raise DataError(
            f"{file}: found {file.stat().st_size} bytes, ends in the middle of its "
            "gzip stream"
        ) from None
    except (gzip.BadGzipFile, zlib.error) as error:
        raise DataError(f"{file}: its gzip stream is corrupt: {error}") from None
