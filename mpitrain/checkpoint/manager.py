"""Writes checkpoints in the background.

The training waits only while its tensors are copied. Each rank writes its copy in a
thread; when all have written, rank zero completes the checkpoint, in a thread, too. The
caller carries numbers between the ranks (`report`, `update`).
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from mpitrain.checkpoint.format import encode_json
from mpitrain.checkpoint.layout import FOLDER, name_of, remove_old
from mpitrain.checkpoint.storage import (
    Chunk,
    HostMemory,
    StoredTensor,
    TensorWriter,
    Written,
    assign_writers,
    local_chunks,
)
from mpitrain.errors import DataError
from mpitrain.launch.job import heartbeat
from mpitrain.mpi.shared_arrays import Communicator
from mpitrain.mpi.world import World

FIRST_NAP_SECONDS, NAP_SECONDS = 0.001, 0.1
"""How often `finish` looks for the end of a write."""


@dataclass(frozen=True, kw_only=True)
class WriteResult:
    """The result of writing a checkpoint. Equal on all ranks, except `copy_seconds`."""

    step: int  # steps that are in it
    copy_seconds: float  # how long the training waited, on this rank
    write_seconds: float  # from its start to its end, on rank zero
    error: str = ""  # why it could not be written; empty if it was


@dataclass(kw_only=True)
class _Copy:
    """A checkpoint whose tensors were copied."""

    writer: TensorWriter
    tensors: Mapping[str, StoredTensor]  # their places are not known yet
    step: int
    copy_seconds: float = 0.0
    error: Exception | None = None  # why they could not be


class CheckpointManager:
    """Writes the checkpoints of one run, one after another.

    While one is written another one may wait, as a copy in host memory.
    Each takes two threads, one after the other: on every rank one writes its tensors;
    when those of all ranks have ended, rank zero's next one completes the checkpoint.

    ``before_rename`` is called in a thread on rank zero before a checkpoint is
    complete: it writes to the disk what the checkpoint refers to.
    """

    def __init__(
        self,
        run_dir: Path,
        world: World,
        ranks: Communicator,
        *,
        keep: int | None,
        before_rename: Callable[[], object] = lambda: None,
    ) -> None:
        self._run_dir = run_dir
        self._world = world
        self._ranks = ranks
        self._keep = keep
        self._before_rename = before_rename
        self._pinned = world.device != "cpu"
        self._memories = [HostMemory(pinned=self._pinned)]  # unused: at most two
        self._outline: object = None
        self._plan: set[Chunk] = set()  # that this rank writes
        self._tensors: dict[str, StoredTensor] = {}
        self._token = ranks.on_rank_zero(lambda: secrets.token_hex(4), "make a token")
        self._current: _Copy | None = None  # is written
        self._next: _Copy | None = None  # waits for that
        self._began = 0.0
        self._is_written = False  # by all ranks
        self._number = 0  # of the thread that was started last
        self._num_ended = 0  # the last one that has ended
        self._failed = 0  # the last one that has failed
        self._ended_at = 0.0
        self._error = ""
        self._written = Written()

    @property
    def is_busy(self) -> bool:
        """Whether a checkpoint is being written; equal on all ranks."""
        return self._current is not None

    def save(
        self,
        tensors: Mapping[str, Tensor],
        metadata: Mapping[str, Any],
        step: int,
        epoch: int,
    ) -> None:
        """Copy the tensors, and begin to write them.

        Collective over all ranks. While another checkpoint is written, the copy waits;
        it replaces one that waits. The tensors may change when this returns. One of the
        ranks that have a name writes its tensor. ``metadata`` is of use on rank zero;
        JSON can carry it. ``epoch`` was just evaluated; 0: within an epoch.
        """
        started = time.monotonic()
        encoded: list[bytes] = []  # now: callbacks may change what they returned
        self._ranks.on_rank_zero(
            lambda: encoded.append(encode_json(metadata)), "encode the metadata"
        )
        chunks = list(local_chunks(tensors))
        self._plan_for(tensors, chunks)
        path = self._run_dir / FOLDER / name_of(step, epoch)
        token = f"{self._token}-{self._number}"
        if self._next is not None:
            self._memories.append(self._next.writer.memory)
        elif not self._memories:
            self._memories.append(HostMemory(pinned=self._pinned))
        writer = TensorWriter(
            path,
            rank=self._world.rank,
            token=token,
            metadata=b"".join(encoded),
            memory=self._memories.pop(),
        )
        copy = _Copy(writer=writer, tensors=self._tensors, step=step)
        try:
            writer.copy_to_host(it for it in chunks if it[0] in self._plan)
        except (RuntimeError, MemoryError) as error:  # no memory for the copy
            copy.error = error
        self._next = copy
        if self._current is None:
            self._write_next(started)
        copy.copy_seconds = time.monotonic() - started

    def report(self) -> tuple[int, int]:
        """Return this rank's numbers for `update`; local."""
        ended = self._num_ended  # first: a thread notes its failure before its end
        return -ended, self._failed  # negative: the maximum is of the slowest rank

    def update(self, numbers: Sequence[int]) -> WriteResult | None:
        """Take the maximum over ranks of each number of `report`; collective.

        Returns the result of a checkpoint, once it is known.
        """
        if self._current is None or -numbers[0] < self._number:
            return None  # nothing to do, or a rank still writes
        if numbers[1] == self._number:
            return self._fail()
        if not self._is_written:
            self._is_written = True
            written = self._ranks.gather(self._written)
            self._start(lambda: self._complete(written))
            return None
        seconds = self._ranks.allgather(self._ended_at - self._began)[0]
        return self._ended(seconds)

    def finish(self, doing: str) -> WriteResult | None:
        """Wait until a checkpoint is written, and return its result, if there was one.

        Then one that waits is begun. Collective over all ranks. ``doing`` is for the
        watchdog.
        """
        outcome = None
        written, nap = -1, FIRST_NAP_SECONDS
        while outcome is None and self._current is not None:
            writer = self._current.writer
            # All sleep: a rank that waits in MPI takes a core.
            time.sleep(nap)
            nap = min(2 * nap, NAP_SECONDS)
            reports = self._ranks.allgather((*self.report(), writer.num_written))
            ended, failed, nums = zip(*reports, strict=True)
            if sum(nums) != written:
                written = sum(nums)
                heartbeat(doing)
            outcome = self.update([max(ended), max(failed)])
        return outcome

    def _plan_for(
        self, tensors: Mapping[str, Tensor], chunks: Sequence[tuple[Chunk, Tensor]]
    ) -> None:
        """Plan which rank writes which chunk; kept until the tensors are others."""
        outline = [
            (chunk, data.dtype, tensors[chunk.name].shape) for chunk, data in chunks
        ]
        if all(self._ranks.allgather(outline == self._outline)):
            return
        self._outline = outline
        by_rank = self._ranks.gather(outline)

        def assign() -> list[set[Chunk]]:
            self._tensors = {
                chunk.name: StoredTensor(dtype, shape)
                for of_rank in by_rank
                for chunk, dtype, shape in of_rank
            }
            return assign_writers(
                [
                    {chunk: chunk.numel * dtype.itemsize for chunk, dtype, _ in of_rank}
                    for of_rank in by_rank
                ]
            )

        assigned = self._ranks.on_rank_zero(assign, "plan a checkpoint")
        self._plan = assigned[self._world.rank]

    def _start(self, action: Callable[[], None]) -> None:
        self._number += 1
        number = self._number

        def run() -> None:
            try:
                action()
            except Exception as error:
                self._error = f"{type(error).__name__}: {error}"
                if isinstance(error, OSError):
                    where = f": {error.filename}" if error.filename else ""
                    self._error = f"{error.strerror or error}{where}"
                self._failed = number
            self._ended_at = time.monotonic()
            self._num_ended = number

        threading.Thread(target=run, name="checkpoint", daemon=True).start()

    def _write_next(self, began: float) -> None:
        self._current, self._next = self._next, None
        self._began, self._is_written = began, False
        if self._current is not None:
            self._start(self._write)

    def _ended(self, seconds: float, error: str = "") -> WriteResult:
        """Begin the one that waits, if there is one."""
        assert self._current is not None
        copy = self._current
        self._memories.append(copy.writer.memory)
        self._write_next(time.monotonic())
        return WriteResult(
            step=copy.step,
            copy_seconds=copy.copy_seconds,
            write_seconds=seconds,
            error=error,
        )

    def _write(self) -> None:
        assert self._current is not None
        if self._current.error is not None:
            raise self._current.error
        self._written = self._current.writer.write()

    def _complete(self, written: list[Written]) -> None:
        if not self._world.is_rank_zero:
            return  # a thread all the same: `update` compares the ranks' numbers
        assert self._current is not None
        self._before_rename()
        self._current.writer.commit(self._current.tensors, written)
        with contextlib.suppress(OSError, DataError):  # the new one is complete
            remove_old(self._run_dir, self._keep)

    def _fail(self) -> WriteResult:
        assert self._current is not None
        mine = self._error if self._failed == self._number else ""
        reasons = self._ranks.allgather(f"[{self._world}] {mine}" if mine else "")
        if self._world.is_rank_zero:
            doomed = self._current.writer.unfinished
            # In a thread: the disk may not answer.
            threading.Thread(
                target=shutil.rmtree, args=(doomed, True), daemon=True
            ).start()
        seconds = time.monotonic() - self._began
        return self._ended(seconds, next(filter(None, reasons)))
