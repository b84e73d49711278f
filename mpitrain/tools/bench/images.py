"""The same random images in every format, to time how fast each is read."""

from __future__ import annotations

import importlib
import io
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from mpitrain.data.images import decode

SCALE = 2.25, 1.6875
"""Width and height of the files over those of what is seen: 504 x 378 for 224."""

QUALITY = 90
"""Of the JPEG files."""

GRID = 32
"""Pixels of a file to each that was drawn: so they look like a photograph to JPEG."""

NUM_CLASSES = 4

NUM_VAL = NUM_CLASSES
"""Images of the part to validate by, which is not timed."""

SHARD_SIZE = 256
"""Images of a tar file."""


def jpegs(num: int, size: int) -> list[bytes]:
    """Draw images: soft patches of colour, and some noise.

    Args:
        num: How many.
        size: Height and width in pixels of what will be seen of them.

    Returns:
        JPEG files; the same each time.
    """
    random = np.random.Generator(np.random.PCG64(0))
    width, height = (max(1, round(size * scale)) for scale in SCALE)
    found = []
    for _ in range(num):
        patches = random.integers(
            0, 256, (height // GRID + 2, width // GRID + 2, 3), np.uint8
        )
        soft = Image.fromarray(patches).resize(
            (width, height), Image.Resampling.BICUBIC
        )
        noise = random.normal(0, 8, (height, width, 1))
        pixels = np.clip(np.asarray(soft) + noise, 0, 255).astype(np.uint8)
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "JPEG", quality=QUALITY)
        found.append(file.getvalue())
    return found


def decoded(files: list[bytes], size: int) -> tuple[Tensor, Tensor]:
    """Return images uint8 `(N, 3, size, size)` and labels int64 `(N,)`."""
    images = [decode(data, size, None, "an image") for data in files]
    return torch.stack(images), torch.tensor(_labels(len(files)))


def write(data: str, data_dir: Path, files: list[bytes], size: int) -> None:
    """Write a data set.

    Args:
        data: ``folder``, ``hdf5``, ``hdf5-pixels`` or ``shards``.
        data_dir: Where to.
        files: JPEG images, to train.
        size: Height and width in pixels of images that are stored decoded.
    """
    parts = {"train": files, "val": (files * NUM_VAL)[:NUM_VAL]}
    data_dir.mkdir()
    for part, images in parts.items():
        if data == "folder":
            _write_folder(data_dir / part, images)
        elif data == "shards":
            _write_shards(data_dir / part, images)
        else:
            _write_hdf5(data_dir / "set.h5", part, images, size, data == "hdf5-pixels")


def _labels(num: int) -> list[int]:
    return [index % NUM_CLASSES for index in range(num)]


def _write_folder(folder: Path, files: list[bytes]) -> None:
    for index, (data, label) in enumerate(zip(files, _labels(len(files)), strict=True)):
        path = folder / f"class{label}" / f"{index}.jpg"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def _write_shards(folder: Path, files: list[bytes]) -> None:
    folder.mkdir()
    for start in range(0, len(files), SHARD_SIZE):
        stop = min(start + SHARD_SIZE, len(files))
        with tarfile.open(folder / f"{start:08}.tar", "w") as tar:
            for index in range(start, stop):
                _add(tar, f"{index:08}.jpg", files[index])
                _add(tar, f"{index:08}.cls", str(index % NUM_CLASSES).encode())


def _add(tar: tarfile.TarFile, name: str, data: bytes) -> None:
    member = tarfile.TarInfo(name)
    member.size = len(data)
    tar.addfile(member, io.BytesIO(data))


def _write_hdf5(
    path: Path, part: str, files: list[bytes], size: int, is_decoded: bool
) -> None:
    h5py: Any = importlib.import_module("h5py")
    with h5py.File(path, "a") as file:
        file[f"{part}/labels"] = np.array(_labels(len(files)))
        if is_decoded:
            images, _ = decoded(files, size)
            file[f"{part}/images"] = images.permute(0, 2, 3, 1).numpy()
            return
        kind = h5py.vlen_dtype(np.uint8)
        encoded = file.create_dataset(f"{part}/images", (len(files),), kind)
        for index, data in enumerate(files):
            encoded[index] = np.frombuffer(data, np.uint8)
