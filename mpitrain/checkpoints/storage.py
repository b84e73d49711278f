"""How torch.distributed.checkpoint reads and writes our files.

    dcp.save(tensors, storage_writer=Writer(path), planner=SavePlanner())
    dcp.load(tensors, storage_reader=Reader(path), planner=LoadPlanner())

Its own readers unpickle, which runs whatever a file says: the metadata, and all that is
no tensor. Here there are tensors alone, as their bytes, and JSON that says where.
"""

from __future__ import annotations

import dataclasses
import hashlib
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
)
from torch.distributed.checkpoint.metadata import (
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem, SavePlan, WriteItem
from torch.distributed.checkpoint.planner import LoadPlanner as AnyLoadPlanner
from torch.distributed.checkpoint.planner import SavePlanner as AnySavePlanner
from torch.distributed.checkpoint.storage import (
    StorageReader,
    StorageWriter,
    WriteResult,
)
from torch.futures import Future

from mpitrain.checkpoints.index import Stored, as_json, from_json
from mpitrain.checkpoints.layout import (
    CHUNK_BYTES,
    FACTS,
    TENSORS,
    BrokenCheckpoint,
    open_file,
    read_json,
    sync_folder,
    write_json,
    write_sums,
)

ALIGNMENT = 64
"""Each tensor begins at a multiple of so many bytes."""


class SavePlanner(DefaultSavePlanner):
    """Plans which rank writes what, of tensors by name."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)


class LoadPlanner(DefaultLoadPlanner):
    """Plans what is read into tensors by name; unpickles nothing."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        """Refuse: `Reader` knows tensors alone."""
        del value
        raise TypeError(f"{read_item.storage_index} is no tensor")


class HostMemory:
    """Memory for copies of tensors, kept from one checkpoint to the next.

    Args:
        pinned: Whether GPUs shall write into it by themselves.
    """

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._bytes = torch.empty(0, dtype=torch.uint8)

    def of(self, num_bytes: int) -> Tensor:
        """Return so much of it, uint8 `(num_bytes,)`; what was in it is lost."""
        if len(self._bytes) < num_bytes:
            self._bytes = torch.empty(0, dtype=torch.uint8)  # free it first
            self._bytes = torch.empty(
                num_bytes, dtype=torch.uint8, pin_memory=self._pinned
            )
        return self._bytes[:num_bytes]


class Writer(StorageWriter):
    """Writes one checkpoint: each rank its share, rank zero all else.

    Args:
        path: The folder that it shall be, when it is whole.
        token: Tells this try from others; equal on all ranks.
        facts: What rank zero writes down beside the tensors; JSON can carry it.
        memory: Where copies go.

    Attributes:
        memory: Where the copies are.
        num_written: Bytes that this rank has written so far.
    """

    def __init__(
        self,
        path: Path,
        *,
        token: str = "new",
        facts: Mapping[str, Any] | None = None,
        memory: HostMemory | None = None,
    ) -> None:
        super().__init__()
        self.path = path
        self.beside = path.with_name(f".{path.name}.{token}")
        self.num_written = 0
        self._facts = facts or {}
        self.memory = memory or HostMemory(pinned=False)
        self._file = ""
        self._items: list[tuple[WriteItem, int, int]] = []
        self._copy = self.memory.of(0)

    # --- in the order in which torch.distributed.checkpoint calls -----------------

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: a writer writes one checkpoint."""

    def set_up_storage_writer(
        self, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        """Do nothing."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Return it as it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Tell each rank the name of its file; on rank zero."""
        return with_files(plans)

    def write_data(
        self, plan: SavePlan, planner: AnySavePlanner
    ) -> Future[list[WriteResult]]:
        """Write this rank's share."""
        self.stage(plan, planner)
        done: Future[list[WriteResult]] = Future()
        done.set_result(self.write())
        return done

    def stage(self, plan: SavePlan, planner: AnySavePlanner) -> None:
        """Copy this rank's share; the tensors may change after that."""
        pieces = []
        end = 0
        for item in plan.items:
            piece = planner.resolve_data(item)
            assert isinstance(piece, Tensor)
            assert item.tensor_data is not None
            planned = item.tensor_data.chunk.sizes
            assert planned == piece.shape, f"{item.index}: the plan is an old one"
            start = -(-end // ALIGNMENT) * ALIGNMENT
            end = start + piece.numel() * piece.element_size()
            pieces.append((item, piece.detach(), start, end))
        self._file = plan.storage_data
        self._copy = self.memory.of(end)
        self._items = []
        is_elsewhere = False
        with torch.no_grad():
            for item, piece, start, stop in pieces:
                place = self._copy[start:stop].view(piece.dtype).view(piece.shape)
                place.copy_(piece, non_blocking=True)
                is_elsewhere |= piece.device.type != "cpu"
                self._items.append((item, start, stop - start))
        if is_elsewhere:
            torch.cuda.synchronize()

    def write(self) -> list[WriteResult]:
        """Write what was copied, to the disk; local.

        Raises:
            OSError: It could not be written.
        """
        self._make_folder()
        if not self._items:
            return []
        data = self._copy.numpy().data
        summed = hashlib.sha256()
        with (self.beside / self._file).open("wb", buffering=0) as file:
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

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write where all lies and what else there is, and give it its name.

        On rank zero, when all ranks have written.
        """
        self._make_folder()
        stored = {result.index: result.storage_data for of in results for result in of}
        sums = {where.file: where.digest for where in stored.values()}
        sums[TENSORS] = write_json(self.beside, TENSORS, as_json(metadata, stored))
        sums[FACTS] = write_json(self.beside, FACTS, self._facts)
        write_sums(self.beside, sums)
        try:
            self.beside.rename(self.path)
        except OSError:
            # A file server that is asked again, its answer being lost, has done it.
            if self.beside.exists() or not self.path.exists():
                raise
        sync_folder(self.path.parent)

    def _make_folder(self) -> None:
        """Make the folder that is written to, in a run folder that is there.

        Where that is gone its disk is: nothing must be written where it was mounted.
        """
        self.path.parent.mkdir(exist_ok=True)
        self.beside.mkdir(exist_ok=True)

    def storage_meta(self) -> StorageMeta | None:
        """Return nothing."""
        return None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Refuse: it is made for a folder."""
        del checkpoint_id
        return False


def with_files(plans: list[SavePlan]) -> list[SavePlan]:
    """Give every rank's plan the name of its file."""
    return [
        dataclasses.replace(plan, storage_data=f"rank-{rank}.bin")
        for rank, plan in enumerate(plans)
    ]


class Reader(StorageReader):
    """Reads one checkpoint, on any number of ranks.

    Args:
        path: Its folder; see `loading.check` for whether it is whole.
        progress: Told now and then while it reads.
    """

    def __init__(
        self, path: Path, progress: Callable[[], object] = lambda: None
    ) -> None:
        super().__init__()
        self.path = path
        self._progress = progress
        self._stored: Mapping[MetadataIndex, Stored] = {}
        self._shapes: dict[MetadataIndex, tuple[torch.dtype, torch.Size]] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Do nothing: a reader reads one checkpoint."""

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Read which tensors there are, and where.

        Raises:
            BrokenCheckpoint: What stands there makes no sense.
        """
        return from_json(self.path, read_json(self.path, TENSORS))

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *_: Any, **__: Any
    ) -> None:
        """Learn where all lies."""
        del is_coordinator
        self._stored = metadata.storage_data
        for name, of in metadata.state_dict_metadata.items():
            assert isinstance(of, TensorStorageMetadata)
            for chunk in of.chunks:
                index = MetadataIndex(name, chunk.offsets)
                self._shapes[index] = of.properties.dtype, chunk.sizes

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Let what lies side by side be read one after the other."""

        def place(item: ReadItem) -> tuple[str, int]:
            return self._stored[item.storage_index][:2]

        return dataclasses.replace(plan, items=sorted(plan.items, key=place))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Return them as they are."""
        return plans

    def read_data(self, plan: LoadPlan, planner: AnyLoadPlanner) -> Future[None]:
        """Read this rank's share into its tensors.

        Raises:
            BrokenCheckpoint: A file is too short.
        """
        last: tuple[MetadataIndex, Tensor] | None = None
        for item in plan.items:
            index = item.storage_index
            if last is None or last[0] != index:
                last = index, self._piece(index)
            found = last[1]
            for dim, (start, length) in enumerate(
                zip(item.storage_offsets, item.lengths, strict=True)
            ):
                found = found.narrow(dim, start, length)
            target = planner.resolve_tensor(item).detach()
            target.copy_(found)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _piece(self, index: MetadataIndex) -> Tensor:
        dtype, shape = self._shapes[index]
        where = self._stored[index]
        num_bytes = shape.numel() * dtype.itemsize
        piece = torch.empty(num_bytes, dtype=torch.uint8)
        view = piece.numpy().data
        try:
            with open_file(self.path, where.file) as file:
                file.seek(where.at)
                got = 0
                while num := file.readinto(view[got : got + CHUNK_BYTES]):  # type: ignore[attr-defined]
                    got += num
                    self._progress()
        except OSError as error:
            raise BrokenCheckpoint(
                self.path, f"{where.file}: {error.strerror}"
            ) from None
        if got < num_bytes:
            raise BrokenCheckpoint(self.path, f"{where.file} is too short")
        return piece.view(dtype).view(shape)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Refuse: it is made for a folder."""
        del checkpoint_id
        return False
