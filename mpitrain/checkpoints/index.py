"""Which tensor lies where: the planner's metadata as JSON, and back.

What stands in a file is not trusted: it names numbers, files of the checkpoint, and
types that we know, or it is refused.
"""

from __future__ import annotations

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

from mpitrain.checkpoints.layout import SHARE, TENSORS, BrokenCheckpoint

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
        BrokenCheckpoint: It makes no sense.
    """
    tensors: dict[str, Any] = {}
    stored: dict[MetadataIndex, Stored] = {}
    try:
        for name, of in found["tensors"].items():
            chunks = []
            for offsets, sizes, file, at in of["chunks"]:
                chunk = ChunkStorageMetadata(_size(offsets), _size(sizes))
                chunks.append(chunk)
                where = Stored(_share(file), int(at), "")
                stored[MetadataIndex(name, chunk.offsets)] = where
            tensors[name] = TensorStorageMetadata(
                properties=TensorProperties(dtype=DTYPES[of["dtype"]]),
                size=_size(of["shape"]),
                chunks=chunks,
            )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BrokenCheckpoint(path, f"{TENSORS}: {error!r}") from None
    return Metadata(tensors, storage_data=stored)


def _share(name: str) -> str:
    if not SHARE.fullmatch(name):
        raise ValueError(f"the file name {name!r}")
    return name


def _size(numbers: Sequence[int]) -> torch.Size:
    if not all(isinstance(number, int) and number >= 0 for number in numbers):
        raise ValueError(f"the shape {numbers!r}")
    return torch.Size(numbers)
