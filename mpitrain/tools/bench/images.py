"""The same random images in each format, to time how fast they are read."""

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
"""Width and height of the files over the image size: 504 x 378 for 224."""

PATCH = 32
"""Pixels of a patch of one colour before smoothing: JPEG takes it for a photograph."""

NUM_CLASSES = 4
SHARD_SIZE = 256
"""Images of a tar file."""


def jpegs(num: int, size: int) -> list[bytes]:
    """Return JPEG files of smooth colours and some noise; the same at each call."""
    random = np.random.Generator(np.random.PCG64(0))
    width, height = (max(1, round(size * scale)) for scale in SCALE)
    files = []
    for _ in range(num):
        shape = (height // PATCH + 2, width // PATCH + 2, 3)
        patches = Image.fromarray(random.integers(0, 256, shape, np.uint8))
        smooth = patches.resize((width, height), Image.Resampling.BICUBIC)
        noise = random.normal(0, 8, (height, width, 1))
        pixels = np.clip(np.asarray(smooth) + noise, 0, 255).astype(np.uint8)
        file = io.BytesIO()
        Image.fromarray(pixels).save(file, "JPEG", quality=90)
        files.append(file.getvalue())
    return files


def decoded(files: list[bytes], size: int) -> tuple[Tensor, Tensor]:
    """Return images uint8 ``(N, 3, size, size)`` and labels int64 ``(N,)``."""
    images = [decode(data, size, None, "an image") for data in files]
    return torch.stack(images), torch.arange(len(files)) % NUM_CLASSES


def write(data: str, data_dir: Path, files: list[bytes], size: int) -> None:
    """Write a data set as ``folder``, ``hdf5``, ``hdf5-pixels`` or ``shards``."""
    data_dir.mkdir()
    validation = (files * NUM_CLASSES)[:NUM_CLASSES]
    for part, images in (("train", files), ("val", validation)):
        if data == "folder":
            for index, image in enumerate(images):
                path = data_dir / part / f"class{index % NUM_CLASSES}/{index}.jpg"
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(image)
        elif data == "shards":
            (data_dir / part).mkdir()
            for start in range(0, len(images), SHARD_SIZE):
                _write_shard(data_dir / part / f"{start:08}.tar", images, start)
        else:
            is_decoded = data == "hdf5-pixels"
            _write_hdf5(data_dir / "set.h5", part, images, size if is_decoded else None)


def _write_shard(path: Path, files: list[bytes], start: int) -> None:
    with tarfile.open(path, "w") as tar:
        for index, image in enumerate(files[start : start + SHARD_SIZE], start):
            label = str(index % NUM_CLASSES).encode()
            for name, content in (
                (f"{index:08}.jpg", image),
                (f"{index:08}.cls", label),
            ):
                member = tarfile.TarInfo(name)
                member.size = len(content)
                tar.addfile(member, io.BytesIO(content))


def _write_hdf5(path: Path, part: str, files: list[bytes], size: int | None) -> None:
    """Append a part: decoded images of a size, or JPEG files."""
    h5py: Any = importlib.import_module("h5py")
    with h5py.File(path, "a") as file:
        file[f"{part}/labels"] = np.arange(len(files)) % NUM_CLASSES
        if size is not None:
            images, _ = decoded(files, size)
            file[f"{part}/images"] = images.permute(0, 2, 3, 1).numpy()
            return
        kind = h5py.vlen_dtype(np.uint8)
        encoded = file.create_dataset(f"{part}/images", (len(files),), kind)
        for index, data in enumerate(files):
            encoded[index] = np.frombuffer(data, np.uint8)
