"""The tensors of a checkpoint: their bytes in files, and JSON that says where.

A tensor is stored in chunks: as a whole, or, where ranks have shards of it, one chunk
for each shard. torch.distributed.checkpoint does the same, but its own reader and
writer pickle, and unpickling runs what a file says; the import of its planners takes
0.5 s of CPU time on every rank (torch 2.14). Here everything that a file says is
checked before it is used.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

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
from mpitrain.files import sync
from mpitrain.launch.job import heartbeat
from mpitrain.torch_compat import local_shard

# Each chunk begins at a multiple of so many bytes: torch views bytes as elements only
# from a multiple of their size.
ALIGNMENT = 64

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in vars(torch).values()
    if isinstance(dtype, torch.dtype) and not str(dtype).startswith("torch.q")
}
"""By the names in the files."""

# Of an index that makes no sense; the last two are of `torch.Size`.
NO_INDEX = KeyError, TypeError, ValueError, AttributeError, OverflowError, RuntimeError


class Chunk(NamedTuple):
    """A part of a tensor that is stored at one place: a box."""

    name: str  # of the tensor
    offsets: tuple[int, ...]  # where it begins, in each dimension
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    def overlap(self, other: Chunk) -> Chunk:
        """Return what two chunks of a tensor have in common; a size may be 0."""
        dims = zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        both = [(max(a, c), min(a + b, c + d)) for a, b, c, d in dims]
        sizes = tuple(max(0, end - start) for start, end in both)
        return Chunk(self.name, tuple(start for start, _ in both), sizes)

    def view(self, data: Tensor, part: Chunk) -> Tensor:
        """Return a part of this chunk, whose elements are `data`."""
        for dim, size in enumerate(part.sizes):
            data = data.narrow(dim, part.offsets[dim] - self.offsets[dim], size)
        return data


def local_chunks(tensors: Mapping[str, Tensor]) -> Iterator[tuple[Chunk, Tensor]]:
    """Yield this rank's chunks and their elements, which are views of the tensors."""
    for name, tensor in tensors.items():
        if (found := local_shard(tensor)) is not None:
            local, shard = found
            yield Chunk(name, tuple(shard.offsets), tuple(shard.sizes)), local
        else:
            shape = tuple(tensor.shape)
            yield Chunk(name, (0,) * len(shape), shape), tensor


class Place(NamedTuple):
    """Where a chunk is."""

    file: str  # name of the file
    start: int  # its first byte there


@dataclass
class StoredTensor:
    """A tensor of a checkpoint."""

    dtype: torch.dtype
    shape: torch.Size  # of the whole
    places: dict[Chunk, Place] = field(default_factory=dict)


def as_json(index: Mapping[str, StoredTensor]) -> dict[str, Any]:
    """Return what `TENSORS` says of the tensors."""
    return {
        "tensors": {
            name: {
                "dtype": str(of.dtype).removeprefix("torch."),
                "shape": list(of.shape),
                "chunks": [
                    [list(chunk.offsets), list(chunk.sizes), *place]
                    for chunk, place in of.places.items()
                ],
            }
            for name, of in index.items()
        }
    }


def files_of(path: Path) -> dict[str, int]:
    """Return the files that the index of a checkpoint names, and how long they are."""
    sizes: dict[str, int] = {}
    for of in read_index(path, has_files=False).values():
        for chunk, place in of.places.items():
            end = place.start + chunk.numel * of.dtype.itemsize
            sizes[place.file] = max(end, sizes.get(place.file, 0))
    return sizes


def read_index(path: Path, *, has_files: bool = True) -> dict[str, StoredTensor]:
    """Read which tensors a checkpoint has, and where.

    ``has_files``: whether to check that the files are so long.
    """
    index: dict[str, StoredTensor] = {}
    size_of = functools.cache(lambda file: (path / file).stat().st_size)
    try:
        for name, of in read_json(path, TENSORS)["tensors"].items():
            stored = StoredTensor(DTYPES[of["dtype"]], _size(of["shape"]))
            for offsets, sizes, file, start in of["chunks"]:
                chunk = Chunk(name, _size(offsets), _size(sizes))
                if len({len(offsets), len(sizes), len(stored.shape)}) > 1:
                    raise ValueError(f"a chunk of {name} has other dimensions")
                if not TENSOR_FILE.fullmatch(file):
                    raise ValueError(f"the file name {file!r}")
                stored.places[chunk] = Place(file, _size([start])[0])
                end = start + chunk.numel * stored.dtype.itemsize
                if has_files and end > size_of(file):
                    raise ValueError(f"{name} is not in {file}")
            if sum(chunk.numel for chunk in stored.places) != stored.shape.numel():
                raise ValueError(f"the chunks of {name} do not make it up")
            index[name] = stored
    except NOT_THERE as error:
        raise BrokenCheckpoint(path, f"{error.filename}: {error.strerror}") from None
    except NO_INDEX as error:
        raise BrokenCheckpoint(path, f"{TENSORS}: {error!r}") from None
    return index


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


Outline = Sequence[tuple[Chunk, torch.dtype, Sequence[int]]]
"""The chunks of a rank, with the type and the shape of their tensors."""


@dataclass
class Written:
    """What one rank has written."""

    places: dict[Chunk, Place] = field(default_factory=dict)
    sums: dict[str, str] = field(default_factory=dict)  # SHA-256 by file


def sizes_of(outline: Outline) -> dict[Chunk, int]:
    """Return the bytes of each chunk of a rank."""
    return {chunk: chunk.numel * dtype.itemsize for chunk, dtype, _ in outline}


def assign_writers(by_rank: Sequence[Mapping[Chunk, int]]) -> list[set[Chunk]]:
    """Return which chunks each rank writes, each chunk once.

    `by_rank` has the bytes of the chunks of each rank. Of those that have a chunk the
    one writes it that has least to write so far.
    """
    ranks: dict[Chunk, list[int]] = {}
    for rank, chunks in enumerate(by_rank):
        for chunk in chunks:
            ranks.setdefault(chunk, []).append(rank)
    num_bytes = [0] * len(by_rank)
    assigned: list[set[Chunk]] = [set() for _ in by_rank]
    for chunk, having in ranks.items():
        writer = min(having, key=num_bytes.__getitem__)
        num_bytes[writer] += by_rank[writer][chunk] or 1  # empty ones take turns, too
        assigned[writer].add(chunk)
    return assigned


class TensorWriter:
    """Writes one checkpoint: each rank some chunks, rank zero the rest.

    ``token`` distinguishes attempts, and is equal on all ranks.

    Attributes:
        unfinished: The folder until it is complete.
        copied: What `copy_to_host` has copied, uint8 `(N,)`.
        spans: Where each chunk begins and ends in it.
        num_written: Bytes that this rank has written so far.
    """

    def __init__(
        self,
        path: Path,
        *,
        rank: int = 0,
        token: str = "new",
        metadata: bytes = b"",
        memory: HostMemory | None = None,
    ) -> None:
        self.path = path
        self.unfinished = path.with_name(f".{path.name}.{token}")
        self.memory = memory or HostMemory(pinned=False)
        self.num_written = 0
        self._metadata = metadata
        self._file = f"rank-{rank}.bin"
        self.spans: dict[Chunk, tuple[int, int]] = {}
        self.copied = self.memory.of(0)

    def copy_to_host(self, chunks: Iterable[tuple[Chunk, Tensor]]) -> None:
        """Copy chunks, which may change after that."""
        copies = []
        end = 0
        for chunk, data in chunks:
            assert data.shape == chunk.sizes, f"{chunk}: the plan is an old one"
            start = -(-end // ALIGNMENT) * ALIGNMENT
            end = start + data.numel() * data.element_size()
            copies.append((chunk, data.detach(), start, end))
        self.copied = self.memory.of(end)
        self.spans = {chunk: (start, stop) for chunk, _, start, stop in copies}
        with torch.no_grad():
            for _, data, start, stop in copies:
                place = self.copied[start:stop].view(data.dtype).view(data.shape)
                place.copy_(data, non_blocking=True)
        # One wait for all copies from a GPU, into memory that is pinned for them.
        if any(data.device.type != "cpu" for _, data, *_ in copies):
            torch.accelerator.synchronize()

    def write(self) -> Written:
        """Write the copies to the disk; local."""
        self._make_folder()
        if not self.spans:
            return Written()
        data = self.copied.numpy().data
        summed = hashlib.sha256()
        with (self.unfinished / self._file).open("wb", buffering=0) as file:
            start = 0
            while start < len(data):
                num = file.write(data[start : start + CHUNK_BYTES])
                summed.update(data[start : start + num])
                start += num
                self.num_written = start
            # Before `commit`, which says that it is there: by every rank for its file.
            os.fsync(file.fileno())
        places = {it: Place(self._file, at) for it, (at, _) in self.spans.items()}
        return Written(places, {self._file: summed.hexdigest()})

    def commit(
        self, tensors: Mapping[str, StoredTensor], written: Iterable[Written]
    ) -> None:
        """Write the other files, and rename the folder; on rank zero, last."""
        self._make_folder()
        sums: dict[str, str] = {}
        index = {name: StoredTensor(of.dtype, of.shape) for name, of in tensors.items()}
        for of_rank in written:
            sums |= of_rank.sums
            for chunk, place in of_rank.places.items():
                index[chunk.name].places[chunk] = place
        encoded = encode_json(as_json(index))
        sums[TENSORS] = write_durably(self.unfinished / TENSORS, encoded)
        sums[METADATA] = write_durably(self.unfinished / METADATA, self._metadata)
        write_sums(self.unfinished, sums)
        # All is on the disk: by its name the checkpoint begins to exist. What is cut
        # before has a dot before its name, and the next start removes it.
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


class CheckpointReader:
    """Reads tensors and `metadata`, in the current format, of a checkpoint; local."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self.checkpoint = checkpoint
        self.metadata: dict[str, Any] = checkpoint.metadata()
        self._index = read_index(checkpoint.path)

    def stored(self, prefix: str) -> dict[str, StoredTensor]:
        """Return the tensors whose names begin with a prefix, by the rest."""
        return {
            name.removeprefix(prefix): of
            for name, of in self._index.items()
            if name.startswith(prefix)
        }

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Read into tensors by name, in place; of sharded ones this rank's shard."""
        path = self.checkpoint.path
        parts: list[tuple[Place, Chunk, Chunk, Tensor]] = []
        for wanted, data in local_chunks(tensors):
            of = self._index.get(wanted.name)
            if of is None or of.shape != tensors[wanted.name].shape:
                found = "is missing" if of is None else f"is of shape {tuple(of.shape)}"
                raise BrokenCheckpoint(path, f"{wanted.name} {found}")
            for chunk, place in of.places.items():
                both = wanted.overlap(chunk)
                if both.numel:
                    parts.append((place, chunk, both, wanted.view(data, both)))
        # In the order of the files, and each chunk once: it is in memory as a whole.
        parts.sort(key=itemgetter(0))
        for (place, chunk), of_chunk in groupby(parts, key=itemgetter(0, 1)):
            data = _read_chunk(path, self._index[chunk.name].dtype, chunk, place)
            for *_, both, target in of_chunk:
                # A leaf that requires a gradient takes no copy.
                target.detach().copy_(chunk.view(data, both))


def _read_chunk(path: Path, dtype: torch.dtype, of: Chunk, place: Place) -> Tensor:
    num_bytes = of.numel * dtype.itemsize
    data = torch.empty(num_bytes, dtype=torch.uint8)
    view = data.numpy().data
    try:
        with open_file(path, place.file) as file:
            file.seek(place.start)
            got = 0
            while num := file.readinto(view[got : got + CHUNK_BYTES]):  # type: ignore[attr-defined]
                got += num
                heartbeat("reading a checkpoint")
    except OSError as error:
        raise BrokenCheckpoint(path, f"{place.file}: {error.strerror}") from None
    if got < num_bytes:
        raise BrokenCheckpoint(path, f"{place.file} is too short")
    return data.view(dtype).view(of.sizes)
