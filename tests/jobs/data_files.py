"""Small files of every format that data sets come in, as their makers write them."""

from __future__ import annotations

import io
import struct
import tarfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

Members = Iterable[tuple[str, bytes]]
"""Name and content of what is in a tar file."""

PREFIXES = {"train": "train", "val": "t10k"}
"""What MNIST's files begin with."""


# --- one file -------------------------------------------------------------------------


def idx_bytes(array: np.ndarray) -> bytes:
    """The content of an IDX file of unsigned bytes."""
    header = struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape)
    return header + array.astype(np.uint8).tobytes()


def python2_pickle(value: Any) -> bytes:
    """Pickle a value as Python 2 with protocol 2 does, and numpy of those days."""
    return b"\x80\x02" + opcodes(value) + b"."


def opcodes(value: Any) -> bytes:
    """What makes one value, in a pickle of Python 2."""
    if isinstance(value, dict):
        items = b"".join(opcodes(k) + opcodes(v) for k, v in value.items())
        return b"}(" + items + b"u"
    if isinstance(value, list):
        return b"](" + b"".join(map(opcodes, value)) + b"e"
    if isinstance(value, str):  # its str is our bytes
        return b"T" + len(value).to_bytes(4, "little") + value.encode("latin1")
    if isinstance(value, int):
        return b"J" + value.to_bytes(4, "little", signed=True)
    assert isinstance(value, np.ndarray)
    is_fortran = not value.flags.c_contiguous
    raw = value.tobytes("A")
    shape = b"(" + b"".join(opcodes(size) for size in value.shape) + b"t"
    kind = value.dtype.str[1:]
    dtype = b"cnumpy\ndtype\n" + opcodes(kind) + b"K\0K\x01\x87R(K\x03"
    dtype += opcodes("|") + b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\0tb"
    empty = b"cnumpy.core.multiarray\n_reconstruct\ncnumpy\nndarray\nK\0\x85U\x01b\x87R"
    order = b"\x88" if is_fortran else b"\x89"
    raw = b"T" + len(raw).to_bytes(4, "little") + raw
    return empty + b"(K\x01" + shape + dtype + order + raw + b"tb"


def picture(pixels: np.ndarray | int, form: str = "PNG") -> bytes:
    """The content of an image file, of pixels `(H, W, 3)` or of one gray."""
    if isinstance(pixels, int):
        pixels = np.full((12, 10, 3), pixels, np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, form)
    return stream.getvalue()


def write_tar(path: Path, members: Members, form: int = tarfile.PAX_FORMAT) -> Path:
    """Write a tar file; names that end with ``/`` are folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", format=form) as tar:
        for name, data in members:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            member.type = tarfile.DIRTYPE if name.endswith("/") else tarfile.REGTYPE
            tar.addfile(member, io.BytesIO(data))
    return path


# --- whole sets -----------------------------------------------------------------------


def write_mnist(folder: Path, *, num_train: int = 27, num_val: int = 11) -> None:
    """Write four IDX files of gray images, 12 pixels wide."""
    random = np.random.default_rng(1)
    folder.mkdir(parents=True, exist_ok=True)
    for part, count in (("train", num_train), ("val", num_val)):
        arrays = {
            "images-idx3": random.integers(0, 256, (count, 12, 12)),
            "labels-idx1": np.arange(count) % 10,
        }
        for kind, array in arrays.items():
            name = f"{PREFIXES[part]}-{kind}-ubyte"
            (folder / name).write_bytes(idx_bytes(array))


def write_cifar10(folder: Path, per_file: int = 10) -> None:
    """Write the six pickles with images, and the one with names."""
    random = np.random.default_rng(2)
    files: dict[str, Any] = {
        file: _cifar(random, per_file, 10, "labels")
        for file in (*(f"data_batch_{i}" for i in range(1, 6)), "test_batch")
    }
    names = {"label_names": [f"class{i}" for i in range(10)]}
    _write_pickles(folder, files | {"batches.meta": names})


def write_cifar100(folder: Path, num_train: int = 101, num_val: int = 13) -> None:
    """Write the two pickles with images, and the one with names."""
    random = np.random.default_rng(3)
    files = {
        "train": _cifar(random, num_train, 100, "fine_labels"),
        "test": _cifar(random, num_val, 100, "fine_labels"),
        "meta": {"fine_label_names": [f"class{i}" for i in range(100)]},
    }
    _write_pickles(folder, files)


def _cifar(random: np.random.Generator, num: int, classes: int, key: str) -> Any:
    data = random.integers(0, 256, (num, 3072), dtype=np.uint8)
    return {"data": data, key: [i % classes for i in range(num)]}


def _write_pickles(folder: Path, files: Mapping[str, Any]) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / name).write_bytes(python2_pickle(value))


def write_folder(data_dir: Path, **counts: int) -> Path:
    """Write JPEG files of various sizes into folders of three classes.

    Args:
        data_dir: Gets a folder for each part.
        counts: How many images each part has; by default 20 to train, 7 to validate.
    """
    random = np.random.default_rng(4)
    for part, count in (counts or {"train": 20, "val": 7}).items():
        for number in range(count):
            name = f"{'abc'[number % 3]}/{number:02}.jpg"
            path = data_dir / part / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(picture(_pixels(random), "JPEG"))
    return data_dir


def _pixels(random: np.random.Generator) -> np.ndarray:
    """A photograph: coarse fields, so that JPEG keeps them."""
    coarse = random.integers(0, 256, (4, 5, 3), dtype=np.uint8)
    height, width = (int(size) for size in random.integers(18, 30, 2))
    return np.asarray(Image.fromarray(coarse).resize((width, height)))


def write_hdf5(path: Path, num_train: int = 20, num_val: int = 7) -> Path:
    """Write one file of colour images, 14 pixels wide, in compressed chunks."""
    import h5py

    random = np.random.default_rng(5)
    path.parent.mkdir(parents=True, exist_ok=True)
    with h5py.File(path, "w") as file:
        for part, count in (("train", num_train), ("val", num_val)):
            images = random.integers(0, 256, (count, 14, 14, 3), dtype=np.uint8)
            options = {"chunks": (1, 14, 14, 3), "compression": "gzip"}
            file.create_dataset(f"{part}/images", data=images, **options)
            file[f"{part}/labels"] = np.arange(count) % 3
    return path


def write_shards(
    data_dir: Path, train: Iterable[int] = (9, 0, 3, 8), val: Iterable[int] = (6, 1)
) -> Path:
    """Write tar files of so many samples each, in three classes."""
    random = np.random.default_rng(6)
    for part, sizes in (("train", train), ("val", val)):
        for shard, size in enumerate(sizes):
            members: list[tuple[str, bytes]] = []
            for number in range(size):
                key = f"{shard}{number:04}"
                members += [
                    (f"{key}.jpg", picture(_pixels(random), "JPEG")),
                    (f"{key}.cls", str(number % 3).encode()),
                ]
            write_tar(data_dir / part / f"{shard:03}.tar", members)
    return data_dir


def write_spoilt(folder: Path) -> None:
    """Write sets with two bad samples of 20 to train on, and one of 7 to validate."""
    photos = write_folder(folder / "photos")
    cut(photos / "train/b/10.jpg", num_bytes=300)
    (photos / "train/c/11.jpg").write_text("not an image")
    (photos / "val/a/03.jpg").write_bytes(b"")
    members = {"train": [], "val": []}
    for part, count, bad in (("train", 20, (10, 11)), ("val", 7, (3,))):
        for number in range(count):
            image = b"no image" if number in bad else picture(5 * number)
            label = str(number % 3).encode()
            members[part] += [(f"{number}.png", image), (f"{number}.cls", label)]
        write_tar(folder / f"shards/{part}/0.tar", members[part])
    import h5py

    with h5py.File(folder / "set.h5", "w") as file:
        kind = h5py.vlen_dtype("u1")
        for part, samples in members.items():
            images = file.create_dataset(f"{part}/images", (len(samples) // 2,), kind)
            for number, (_, data) in enumerate(samples[::2]):
                images[number] = list(data)
            file[f"{part}/labels"] = [int(label) for _, label in samples[1::2]]


def cut(path: Path, *, num_bytes: int) -> None:
    """Take bytes away at a file's end."""
    path.write_bytes(path.read_bytes()[:-num_bytes])
