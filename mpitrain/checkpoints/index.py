"""Which tensor lies where: the planner's metadata as JSON, and back.

What stands in a file is not trusted: it names numbers, files of the checkpoint, and
types that we know, or it is refused.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from mpitrain.checkpoints.layout import (
    NOT_THERE,
    SHARE,
    TENSORS,
    BrokenCheckpoint,
)

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not str(dtype).startswith("torch.q")
}
"""By the names that stand in the files."""


class Stored(NamedTuple):
    """Where a piece of a tensor lies."""

    file: str
    """The name of the file."""
    at: int
    """Its first byte there."""
    digest: str
    """SHA-256 of the whole file; empty where it was read."""


def as_json(
    metadata: Metadata, stored: Mapping[MetadataIndex, Stored]
) -> dict[str, Any]:
    """Write down which tensors there are, and where each piece lies."""
    tensors = {}
    for name, of in metadata.state_dict_metadata.items():
        assert isinstance(of, TensorStorageMetadata), f"{name} is no tensor"
        chunks = []
        for chunk in of.chunks:
            where = stored[MetadataIndex(name, chunk.offsets)]
            chunks.append([list(chunk.offsets), list(chunk.sizes), *where[:2]])
        dtype = str(of.properties.dtype).removeprefix("torch.")
        tensors[name] = {"dtype": dtype, "shape": list(of.size), "chunks": chunks}
    return {"tensors": tensors}


def from_json(path: Path, found: Mapping[str, Any]) -> Metadata:
    """Read what `as_json` has written.

    Args:
        path: The checkpoint's folder, for messages.
        found: The JSON object.

    Raises:
        BrokenCheckpoint: It makes no sense, or there are fewer bytes than it says.
    """
    tensors: dict[str, Any] = {}
    stored: dict[MetadataIndex, Stored] = {}
    sizes_of_files: dict[str, int] = {}
    num_bytes, is_wrong = 0, False
    try:
        for name, of in found["tensors"].items():
            chunks = []
            dtype, shape = DTYPES[of["dtype"]], _size(of["shape"])
            num_left = math.prod(shape)
            for offsets, sizes, file, at in of["chunks"]:
                chunk = ChunkStorageMetadata(_size(offsets), _size(sizes))
                chunks.append(chunk)
                where = Stored(_share(file), _size([at])[0], "")
                stored[MetadataIndex(name, chunk.offsets)] = where
                if file not in sizes_of_files:
                    sizes_of_files[file] = (path / file).stat().st_size
                num = math.prod(sizes)
                num_left -= num
                num_bytes += num * dtype.itemsize
                ends = map(operator.add, offsets, sizes)
                is_wrong |= (
                    where.at + num * dtype.itemsize > sizes_of_files[file]
                    or len(offsets) != len(shape)
                    or any(map(operator.gt, ends, shape))
                )
            is_wrong |= num_left != 0
            tensors[name] = TensorStorageMetadata(
                properties=TensorProperties(dtype=dtype), size=shape, chunks=chunks
            )
    except NOT_THERE as error:
        raise BrokenCheckpoint(path, f"{error.filename}: {error.strerror}") from None
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise BrokenCheckpoint(path, f"{TENSORS}: {error!r}") from None
    if is_wrong or num_bytes > sum(sizes_of_files.values()):
        raise BrokenCheckpoint(
            path,
            f"{TENSORS}: pieces that do not make up the tensors, or lie in no file",
        )
    return Metadata(tensors, storage_data=stored)


def _share(name: str) -> str:
    if not SHARE.fullmatch(name):
        raise ValueError(f"the file name {name!r}")
    return name


def _size(numbers: Sequence[int]) -> torch.Size:
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"the shape {numbers!r}")
    return torch.Size(numbers)
