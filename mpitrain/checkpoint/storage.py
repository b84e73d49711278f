"""The tensors of a checkpoint: their bytes in files, and JSON that says where.

torch.distributed.checkpoint plans which rank writes and reads what, sharded tensors
included. Its own reader and writer pickle, and unpickling runs what a file says. Here
everything that a file says is checked before it is used.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
)
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from mpitrain.checkpoint.format import (
    CHUNK_BYTES,
    METADATA,
    NOT_THERE,
    TENSOR_FILE,
    TENSORS,
    BrokenCheckpoint,
    encode_json,
    open_file,
    read_json,
    write_durably,
    write_sums,
)
from mpitrain.checkpoint.layout import Checkpoint
from mpitrain.launch.current import heartbeat
from mpitrain.record.run_dir import sync

# For torch's planners: names and tensors stay as they are.
UNCHANGED = {"flatten_state_dict": False, "flatten_sharded_tensors": False}
ALIGNMENT = 64  # each tensor begins at a multiple of so many bytes

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not str(dtype).startswith("torch.q")
}
"""By the names in the files."""

# Of an index that makes no sense; the last two are of `torch.Size`.
NO_INDEX = KeyError, TypeError, ValueError, AttributeError, OverflowError, RuntimeError


class Stored(NamedTuple):
    """Where a chunk of a tensor is."""

    file: str  # name of the file
    at: int  # its first byte there
    digest: str  # SHA-256 of the file; empty where it was read


def as_json(
    metadata: Metadata, stored: Mapping[MetadataIndex, Stored]
) -> dict[str, Any]:
    """Return the planner's metadata for `TENSORS`."""
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
    """Return what `as_json` was called with."""
    tensors: dict[str, Any] = {}
    stored: dict[MetadataIndex, Stored] = {}
    size_of = functools.cache(lambda file: (path / file).stat().st_size)
    try:
        for name, of in found["tensors"].items():
            dtype, shape = DTYPES[of["dtype"]], _size(of["shape"])
            chunks = []
            for offsets, sizes, file, at in of["chunks"]:
                chunk = ChunkStorageMetadata(_size(offsets), _size(sizes))
                chunks.append(chunk)
                where = Stored(_file_name(file), _size([at])[0], "")
                stored[MetadataIndex(name, chunk.offsets)] = where
                end = where.at + chunk.sizes.numel() * dtype.itemsize
                if end > size_of(where.file):
                    raise ValueError(f"{name} is not in {file}")
            if sum(chunk.sizes.numel() for chunk in chunks) != shape.numel():
                raise ValueError(f"the chunks of {name} do not make it up")
            tensors[name] = TensorStorageMetadata(
                properties=TensorProperties(dtype=dtype), size=shape, chunks=chunks
            )
    except NOT_THERE as error:
        raise BrokenCheckpoint(path, f"{error.filename}: {error.strerror}") from None
    except NO_INDEX as error:
        raise BrokenCheckpoint(path, f"{TENSORS}: {error!r}") from None
    return Metadata(tensors, storage_data=stored)


def _file_name(name: str) -> str:
    if not TENSOR_FILE.fullmatch(name):
        raise ValueError(f"the file name {name!r}")
    return name


def _size(numbers: Sequence[int]) -> torch.Size:
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise ValueError(f"the shape {numbers!r}")
    return torch.Size(numbers)


class HostMemory:
    """Host memory for copies of tensors, reused; pinned where a GPU copies into it."""

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def of(self, num_bytes: int) -> Tensor:
        """Return uint8 `(num_bytes,)`, overwritten by the next call's user."""
        if len(self._bytes) < num_bytes:
            self._bytes = torch.empty(0, dtype=torch.uint8)  # free it first
            self._bytes = torch.empty(
                num_bytes, dtype=torch.uint8, pin_memory=self._pinned
            )
        return self._bytes[:num_bytes]


class TensorWriter:
    """Writes one checkpoint: each rank its tensors, rank zero the rest.

    ``token`` distinguishes attempts, and is equal on all ranks.

    Attributes:
        unfinished: The folder until it is complete.
        num_written: Bytes that this rank has written so far.
    """

    def __init__(
        self,
        path: Path,
        *,
        token: str = "new",
        metadata: bytes = b"",
        memory: HostMemory | None = None,
    ) -> None:
        self.path = path
        self.unfinished = path.with_name(f".{path.name}.{token}")
        self.memory = memory or HostMemory(pinned=False)
        self.num_written = 0
        self._metadata = metadata
        self._file = ""
        self._items: list[tuple[WriteItem, int, int]] = []
        self._copy = self.memory.of(0)

    def copy_to_host(self, plan: SavePlan, planner: DefaultSavePlanner) -> None:
        """Copy this rank's tensors, which may change after that."""
        chunks = []
        end = 0
        for item in plan.items:
            chunk = planner.resolve_data(item)
            assert isinstance(chunk, Tensor)
            assert item.tensor_data is not None
            planned = item.tensor_data.chunk.sizes
            assert planned == chunk.shape, f"{item.index}: the plan is an old one"
            start = -(-end // ALIGNMENT) * ALIGNMENT
            end = start + chunk.numel() * chunk.element_size()
            chunks.append((item, chunk.detach(), start, end))
        self._file = plan.storage_data
        self._copy = self.memory.of(end)
        self._items = []
        is_elsewhere = False
        with torch.no_grad():
            for item, chunk, start, stop in chunks:
                place = self._copy[start:stop].view(chunk.dtype).view(chunk.shape)
                place.copy_(chunk, non_blocking=True)
                is_elsewhere |= chunk.device.type != "cpu"
                self._items.append((item, start, stop - start))
        if is_elsewhere:
            torch.accelerator.synchronize()

    def write(self) -> list[WriteResult]:
        """Write the copies to the disk; local."""
        self._make_folder()
        if not self._items:
            return []
        data = self._copy.numpy().data
        summed = hashlib.sha256()
        with (self.unfinished / self._file).open("wb", buffering=0) as file:
            start = 0
            while start < len(data):
                num = file.write(data[start : start + CHUNK_BYTES])
                summed.update(data[start : start + num])
                start += num
                self.num_written = start
            os.fsync(file.fileno())
        digest = summed.hexdigest()
        return [
            WriteResult(item.index, size, Stored(self._file, start, digest))
            for item, start, size in self._items
        ]

    def commit(self, index: Metadata, results: list[list[WriteResult]]) -> None:
        """Write the other files, and rename the folder; on rank zero, last."""
        self._make_folder()
        stored = {result.index: result.storage_data for of in results for result in of}
        sums = {where.file: where.digest for where in stored.values()}
        encoded = encode_json(as_json(index, stored))
        sums[TENSORS] = write_durably(self.unfinished / TENSORS, encoded)
        sums[METADATA] = write_durably(self.unfinished / METADATA, self._metadata)
        write_sums(self.unfinished, sums)
        try:
            self.unfinished.rename(self.path)
        except OSError:
            # A file server that is asked again, its answer being lost, has done it.
            if self.unfinished.exists() or not self.path.exists():
                raise
        with contextlib.suppress(OSError):  # it is complete
            sync(self.path.parent)

    def _make_folder(self) -> None:
        # The run folder stays: where it is gone its disk is not mounted.
        self.path.parent.mkdir(exist_ok=True)
        self.unfinished.mkdir(exist_ok=True)


def with_files(plans: list[SavePlan]) -> list[SavePlan]:
    """Give each rank's plan the name of its file."""
    return [
        dataclasses.replace(plan, storage_data=f"rank-{rank}.bin")
        for rank, plan in enumerate(plans)
    ]


def read_index(path: Path) -> Metadata:
    """Read which tensors a checkpoint has, and where."""
    return from_json(path, read_json(path, TENSORS))


class CheckpointReader:
    """Reads tensors and `metadata`, in the current format, of a checkpoint; local."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.metadata: dict[str, Any] = checkpoint.metadata()
        self._index = read_index(checkpoint.path)

    def tensor_metadata(self, prefix: str) -> dict[str, TensorStorageMetadata]:
        """Return shape and dtype of the tensors with a prefix, by the rest."""
        found = self._index.state_dict_metadata
        return {
            name.removeprefix(prefix): of
            for name, of in found.items()
            if name.startswith(prefix) and isinstance(of, TensorStorageMetadata)
        }

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Read into tensors by name, in place; of sharded ones this rank's shard."""
        path, index = self.checkpoint.path, self._index
        planner = DefaultLoadPlanner(**UNCHANGED)
        planner.set_up_planner(dict(tensors), index, is_coordinator=False)
        try:
            plan = planner.create_local_plan()
        except (RuntimeError, ValueError) as error:
            raise BrokenCheckpoint(path, str(error)) from None
        last: tuple[MetadataIndex, Tensor] | None = None
        places = index.storage_data
        for item in sorted(plan.items, key=lambda item: places[item.storage_index]):
            if last is None or last[0] != item.storage_index:
                last = item.storage_index, _read_chunk(path, index, item.storage_index)
            found = last[1]
            for dim, (start, length) in enumerate(
                zip(item.storage_offsets, item.lengths, strict=True)
            ):
                found = found.narrow(dim, start, length)
            planner.resolve_tensor(item).detach().copy_(found)


def _read_chunk(path: Path, index: Metadata, at: MetadataIndex) -> Tensor:
    of = index.state_dict_metadata[at.fqn]
    assert isinstance(of, TensorStorageMetadata)
    dtype = of.properties.dtype
    shape = next(chunk.sizes for chunk in of.chunks if chunk.offsets == at.offset)
    where: Stored = index.storage_data[at]
    num_bytes = shape.numel() * dtype.itemsize
    chunk = torch.empty(num_bytes, dtype=torch.uint8)
    view = chunk.numpy().data
    try:
        with open_file(path, where.file) as file:
            file.seek(where.at)
            got = 0
            while num := file.readinto(view[got : got + CHUNK_BYTES]):  # type: ignore[attr-defined]
                got += num
                heartbeat("reading a checkpoint")
    except OSError as error:
        raise BrokenCheckpoint(path, f"{where.file}: {error.strerror}") from None
    if got < num_bytes:
        raise BrokenCheckpoint(path, f"{where.file} is too short")
    return chunk.view(dtype).view(shape)
