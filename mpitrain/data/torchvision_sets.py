"""MNIST, Fashion-MNIST and CIFAR: found in torchvision's layout, read and fetched.

CIFAR's files are pickles, which can run code: torchvision unpickles only files whose
MD5 is the published one.
"""

from __future__ import annotations

import contextlib
import gzip
import hashlib
import http.client
import math
import shlex
import struct
import tempfile
import urllib.request
import zlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from mpitrain.data.samples import MAX_BYTES, Array, check_labels
from mpitrain.errors import DataError, UsageError
from mpitrain.flags import PROGRAM

CLASSES = {
    "mnist": "MNIST",
    "fashion-mnist": "FashionMNIST",
    "cifar10": "CIFAR10",
    "cifar100": "CIFAR100",
}
"""Names of torchvision's classes."""

NUM_CLASSES = {"mnist": 10, "fashion-mnist": 10, "cifar10": 10, "cifar100": 100}

IDX_FILES = (
    *("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    *("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
)
"""Images and labels to train, then to validate."""

CIFAR_FILES = {
    "cifar10": (
        "cifar-10-batches-py",
        (*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"),
    ),
    "cifar100": ("cifar-100-python", ("train", "test")),
}
"""Folder and files of each set."""

CLASS_NAMES = {
    "mnist": "0,1,2,3,4,5,6,7,8,9",
    "fashion-mnist": "T-shirt/top,Trouser,Pullover,Dress,Coat,Sandal,Shirt,Sneaker,Bag,"
    "Ankle boot",
}
"""By label; CIFAR's are in its files."""

Named = tuple[list[str], list[tuple[Array, Array]]]  # classes; inputs, labels

TIMEOUT_SECONDS = 30.0  # how long a server may be silent

SCHEMES = ("http://", "https://", "file:///")


def find(name: str, data_dir: Path) -> Path | None:
    """Return the folder with all files of a set; ``None``: not there.

    The names of files decide, not their content. Imports neither torch nor torchvision.
    """
    if name not in CIFAR_FILES:
        for folder in (data_dir / CLASSES[name] / "raw", data_dir):
            if all(_idx_file(folder, file).is_file() for file in IDX_FILES):
                return folder
        return None
    inner, files = CIFAR_FILES[name]
    for folder in (data_dir / inner, data_dir):
        if all((folder / file).is_file() for file in files):
            return folder
    return None


def read(name: str, data_dir: Path) -> dict[str, Array]:
    """Read a set whole; the published test images are the validation part.

    Returns:
        ``train_inputs`` and ``val_inputs``, uint8 `(N, C, H, W)`; ``train_labels`` and
        ``val_labels``, int64 `(N,)`; ``classes``, names in lines, uint8 `(N,)`.
    """
    place = find(name, data_dir)
    how = (
        f"\nTo fetch {name} where there is internet, such as on the login node: "
        f"{_fetch_command(name, data_dir)}"
    )
    if place is None:
        raise DataError(f"{name} is not in {data_dir}.{how}")
    arrays: dict[str, Array] = {}
    try:
        reads = _read_cifar if name in CIFAR_FILES else _read_mnist
        classes, parts = reads(name, place)
        arrays["classes"] = np.frombuffer("\n".join(classes).encode(), np.uint8)
        for part, (inputs, labels) in zip(("train", "val"), parts, strict=True):
            where = f"{place}, the {part} labels"
            check_labels(labels, len(inputs), NUM_CLASSES[name], where)
            arrays |= {f"{part}_inputs": inputs, f"{part}_labels": labels}
    except (DataError, OSError) as error:
        raise DataError(f"{error}.{how}") from None
    return arrays


def _fetch_command(name: str, data_dir: Path) -> str:
    return f"{PROGRAM} fetch {name} --data-dir {shlex.quote(str(data_dir))}"


def _idx_file(folder: Path, name: str) -> Path:
    path = folder / name
    return path if path.is_file() else folder / f"{name}.gz"


def _read_mnist(name: str, folder: Path) -> Named:
    paths = [_idx_file(folder, file) for file in IDX_FILES]
    arrays = [_read_idx(path, 3 - 2 * (i % 2)) for i, path in enumerate(paths)]
    if not all(array.size for array in arrays):
        raise DataError(f"{folder}: {name} has images or labels of no size")
    pairs = (arrays[:2], arrays[2:])
    return CLASS_NAMES[name].split(","), [
        (images[:, None], labels.astype(np.int64)) for images, labels in pairs
    ]


def _read_idx(path: Path, num_dims: int) -> Array:
    """Read a file of bytes in MNIST's IDX format: magic number, shape, values.

    torchvision reads the uncompressed ones only, and asserts where it should say why.
    """
    length = 4 + 4 * num_dims
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            header = file.read(length)
            if len(header) < length or header[:4] != bytes([0, 0, 8, num_dims]):
                raise DataError(
                    f"{path}: not an IDX file of {num_dims} dimensions, it begins with "
                    f"{header!r}"
                )
            shape = struct.unpack(f">{num_dims}I", header[4:])
            num_bytes = math.prod(shape)
            data = file.read(num_bytes + 1) if num_bytes <= MAX_BYTES else b""
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataError(f"{path}: truncated or broken, {error}") from None
    if len(data) != num_bytes:
        raise DataError(
            f"{path}: found {len(data)} bytes or more, expected {num_bytes} for the "
            f"shape {shape} in its header"
        )
    return np.frombuffer(data, np.uint8).reshape(shape).copy()


def _read_cifar(name: str, place: Path) -> Named:
    """Read by torchvision, after a check of MD5."""
    from torchvision import datasets  # type: ignore[import-untyped]

    kind = getattr(datasets, CLASSES[name])
    here = type(name, (kind,), {"base_folder": ""})
    try:
        train, val = here(place, train=True), here(place, train=False)
    except RuntimeError:
        raise DataError(
            f"{place}: files are missing, or their MD5 is not the published one; they "
            "are pickles, which can run code, so others are not read"
        ) from None
    return train.classes, [
        (part.data.transpose(0, 3, 1, 2), np.array(part.targets, np.int64))
        for part in (train, val)
    ]


def fetch(name: str, data_dir: Path, mirror: str | None) -> None:
    """Download what is missing of a set, or broken, into torchvision's layout.

    Files are checked in a folder beside their place and moved when they are whole.
    """
    if mirror is not None and not mirror.startswith(SCHEMES):
        raise UsageError(
            f"--mirror {mirror!r}: expected the address of a folder: "
            "http://HOST/FOLDER, https://HOST/FOLDER or file:///FOLDER"
        )
    if find(name, data_dir):
        with contextlib.suppress(DataError):
            read(name, data_dir)
            return
    from torchvision import datasets

    kind = getattr(datasets, CLASSES[name])
    if name in CIFAR_FILES:
        files, folder = [(kind.filename, kind.tgz_md5)], data_dir
        theirs = [kind.url.rpartition("/")[0]]
    else:
        files, folder = kind.resources, data_dir / CLASSES[name] / "raw"
        theirs = kind.mirrors
    mirrors = [mirror] if mirror else theirs
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, md5 in files:
            with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as beside:
                path = folder / file
                if not datasets.utils.check_integrity(path, md5):
                    path = Path(beside, file)
                    _download(name, data_dir, mirrors, path, md5)
                datasets.utils.extract_archive(path, beside)
                found = [path for path in Path(beside).rglob("*") if path.is_file()]
                for path in sorted(found, key=lambda path: path.suffix != ".gz"):
                    target = folder / path.relative_to(beside)
                    target.parent.mkdir(parents=True, exist_ok=True)
                    path.replace(target)
    except OSError as error:
        raise DataError(
            f"{error.filename or folder}: cannot be written: "
            f"{error.strerror or error}. Expected room for {name}; "
            "choose another --data-dir"
        ) from None


def _download(
    name: str, data_dir: Path, mirrors: Sequence[str], path: Path, md5: str
) -> None:
    tried = []
    for mirror in mirrors:
        url = f"{mirror.rstrip('/')}/{path.name}"
        request = urllib.request.Request(url, headers={"User-Agent": PROGRAM})
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_SECONDS) as source:
                data = source.read(MAX_BYTES)
        except (http.client.HTTPException, OSError) as error:
            tried.append(f"{url}: {error}")
            continue
        found = hashlib.md5(data, usedforsecurity=False).hexdigest()
        if found == md5:
            path.write_bytes(data)
            return
        tried.append(
            f"{url}: found another file: {len(data)} bytes, MD5 {found}, expected "
            f"{md5}; it begins with {data[:20]!r}"
        )
    where = "\n  ".join(tried)
    raise DataError(
        f"{name} could not be fetched. Tried\n  {where}\nFetch it where there is "
        f"internet, such as on the login node: {_fetch_command(name, data_dir)}\nOr "
        "say --mirror URL: the address (http, https, file) of a folder with "
        f"{path.name}"
    )
