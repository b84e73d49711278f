"""Writes checkpoints in the background.

The training waits only while its tensors are copied. Each rank writes its copy in a
thread; when all have written, rank zero completes the checkpoint, in a thread, too. The
caller carries each rank's `Progress` to all ranks, when it suits the training.
"""

from __future__ import annotations

import contextlib
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from mpitrain.checkpoint.format import encode_json
from mpitrain.checkpoint.layout import FOLDER, name_of, remove_old
from mpitrain.checkpoint.storage import (
    Chunk,
    HostMemory,
    Outline,
    StoredTensor,
    TensorWriter,
    Written,
    assign_writers,
    local_chunks,
    sizes_of,
)
from mpitrain.errors import DataError
from mpitrain.launch.job import heartbeat
from mpitrain.mpi.shared_arrays import Communicator
from mpitrain.mpi.world import World

FIRST_NAP_SECONDS, NAP_SECONDS = 0.001, 0.1
"""How often `finish` looks for the end of a write."""

ABANDON_SECONDS = 2.0  # how long a failure waits for a checkpoint's last files


@dataclass(frozen=True, kw_only=True)
class WriteResult:
    """The result of writing a checkpoint. Equal on all ranks, except `copy_seconds`."""

    step: int  # steps that are in it
    copy_seconds: float  # how long the training waited, on this rank
    write_seconds: float  # from its start to its end, on rank zero
    error: str = ""  # why it could not be written; empty if it was


class Progress(NamedTuple):
    """How far the threads of one rank are, or of all: the slowest one, and any failure.

    Threads are numbered, since an exchange between ranks may end after the next thread
    has begun: its result must not count for that.
    """

    num_ended: int
    failed: int  # the number of the last thread, if it has failed

    def to_maxima(self) -> tuple[int, int]:
        """Return numbers whose maxima over ranks are the progress of all."""
        return -self.num_ended, self.failed

    @classmethod
    def from_maxima(cls, numbers: Sequence[int]) -> Progress:
        """Return the progress of all ranks."""
        return cls(-numbers[0], numbers[1])


@dataclass(kw_only=True)
class _Thread:
    """One of the two threads of a write."""

    number: int
    has_ended: bool = False
    error: str = ""  # why it has failed
    ended_at: float = 0.0


@dataclass(kw_only=True)
class WritePlan:
    """What a rank writes of each checkpoint."""

    chunks: dict[Chunk, None]  # in this order; a set would have none


@dataclass(kw_only=True)
class Write:
    """A checkpoint whose tensors were copied: it waits, or is written."""

    writer: TensorWriter
    plan: WritePlan
    tensors: Mapping[str, StoredTensor]  # their places are not known yet
    step: int
    copy_seconds: float = 0.0
    copy_error: Exception | None = None
    began: float = 0.0
    written: Written = field(default_factory=Written)  # by this rank
    is_written: bool = False  # by all ranks


class CheckpointManager:
    """Writes the checkpoints of one run, one after another.

    While one is written another one may wait, as a copy in host memory.
    Each takes two threads, one after the other: on every rank one writes its tensors;
    when those of all ranks have ended, rank zero's next one completes the checkpoint.

    Attributes:
        refusal: Why nothing is written; empty if it is. Equal on all ranks.

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
        self.refusal = ""
        self._run_dir = run_dir
        self._world = world
        self._ranks = ranks
        self._keep = keep
        self._before_rename = before_rename
        self._commits, self._is_abandoned = threading.Lock(), False
        self._memories: list[HostMemory] = []  # unused; two are made at most
        self._outline: object = None
        self._num_saved = 0
        self._plan = WritePlan(chunks={})
        self._tensors: dict[str, StoredTensor] = {}
        # One for all ranks, which write into one folder; no two jobs have the same.
        self._token = ranks.on_rank_zero(lambda: secrets.token_hex(4), "make a token")
        self._current: Write | None = None
        self._next: Write | None = None  # waits for that
        self._thread = _Thread(number=0, has_ended=True)  # that was started last

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
        is_validated: bool = False,
    ) -> None:
        """Copy the tensors, and begin to write them.

        Collective over all ranks. While another checkpoint is written, the copy waits;
        it replaces one that waits. The tensors may change when this returns. One of the
        ranks that have a name writes its tensor. ``metadata`` is of use on rank zero;
        JSON can carry it. ``epoch`` was just evaluated; 0: within an epoch, perhaps
        after a validation.
        """
        started = time.monotonic()
        token = f"{self._token}-{self._num_saved}"
        self._num_saved += 1
        chunks = list(local_chunks(tensors))
        outline = [
            (chunk, data.dtype, tensors[chunk.name].shape) for chunk, data in chunks
        ]
        # Now: callbacks may change what they returned.
        encoded = b""
        if self._world.is_rank_zero:
            encoded = encode_json({"token": token, **metadata})
        # One exchange for both: there may be one each second.
        by_rank = self._ranks.allgather((outline == self._outline, encoded))
        encoded = by_rank[0][1]
        # Where one rank has other tensors all plan anew: the plan is one of all ranks.
        if not all(is_same for is_same, _ in by_rank):
            self._make_plan(outline)
        if self.refusal:
            return
        name = name_of(step, epoch, is_validated=is_validated)
        path = self._run_dir / FOLDER / name
        if self._next is not None:
            self._memories.append(self._next.writer.memory)
        elif not self._memories:
            self._memories.append(HostMemory(pinned=self._world.device != "cpu"))
        writer = TensorWriter(
            path,
            rank=self._world.rank,
            token=token,
            metadata=encoded,
            memory=self._memories.pop(),
        )
        plan, held = self._plan, dict(chunks)
        write = Write(writer=writer, plan=plan, tensors=self._tensors, step=step)
        try:
            writer.copy_to_host((it, held[it]) for it in plan.chunks)
        except (RuntimeError, MemoryError) as error:  # no memory for the copy
            # Raised by the thread, whose failure all ranks learn of; here this rank
            # alone would leave the training.
            write.copy_error = error
        self._next = write
        if self._current is None:
            self._write_next(started)
        write.copy_seconds = time.monotonic() - started

    def local_progress(self) -> Progress:
        """Return the progress of this rank; local."""
        thread = self._thread
        if not thread.has_ended:
            return Progress(thread.number - 1, 0)
        return Progress(thread.number, thread.number if thread.error else 0)

    def apply_progress(self, of_all: Progress) -> WriteResult | None:
        """Go on with a write, by the progress of all ranks; collective.

        Returns the result of a checkpoint, once it is known.
        """
        write, number = self._current, self._thread.number
        if write is None or of_all.num_ended < number:
            return None  # nothing to do, or a rank still writes
        if of_all.failed == number:
            return self._fail(write)
        if not write.is_written:
            write.is_written = True
            by_rank = self._gather(write.written)
            self._start(lambda: self._complete(write, by_rank))
            return None
        return self._ended(write, self._seconds(write))

    def finish(self, doing: str) -> WriteResult | None:
        """Wait until a checkpoint is written, and return its result, if there was one.

        Then one that waits is begun. Collective over all ranks. ``doing`` is for the
        watchdog.
        """
        result = None
        written, nap = -1, FIRST_NAP_SECONDS
        while result is None and self._current is not None:
            writer = self._current.writer
            # All sleep: a rank that waits in MPI takes a core.
            time.sleep(nap)
            nap = min(2 * nap, NAP_SECONDS)
            mine = (*self.local_progress().to_maxima(), writer.num_written)
            *progress, nums = zip(*self._ranks.allgather(mine), strict=True)
            # Not each time: a disk that takes no bytes any more is a hang.
            if sum(nums) != written:
                written = sum(nums)
                heartbeat(doing)
            of_all = Progress.from_maxima([*map(max, progress)])
            result = self.apply_progress(of_all)
        return result

    def abandon(self) -> None:
        """Let no checkpoint be completed from now on; local.

        Waits for one that is being completed, but not long: the disk may not answer.
        """
        self._is_abandoned = True
        if self._commits.acquire(timeout=ABANDON_SECONDS):
            self._commits.release()

    def _make_plan(self, outline: Outline) -> None:
        """Plan which rank writes which chunk; kept until the tensors are others."""
        self._outline = outline
        by_rank = self._ranks.gather(outline)

        def assign() -> tuple[Sequence[WritePlan], dict[str, StoredTensor]]:
            tensors = {
                chunk.name: StoredTensor(dtype, torch.Size(shape))
                for of_rank in by_rank
                for chunk, dtype, shape in of_rank
            }
            return self._assign(by_rank), tensors

        plans, self._tensors = self._ranks.on_rank_zero(assign, "plan a checkpoint")
        self._plan = plans[self._world.rank]

    def _assign(self, by_rank: Sequence[Outline]) -> Sequence[WritePlan]:
        """Return what each rank writes, on rank zero; each chunk once."""
        assigned = assign_writers([*map(sizes_of, by_rank)])
        return [WritePlan(chunks=dict.fromkeys(chunks)) for chunks in assigned]

    def _gather(self, written: Written) -> list[Written]:
        """Return what all ranks have written, where it is completed; collective."""
        return self._ranks.gather(written)

    def _seconds(self, write: Write) -> float:
        """Return how long a write took, on rank zero; collective."""
        return self._ranks.allgather(self._thread.ended_at - write.began)[0]

    def _start(self, action: Callable[[], None]) -> None:
        self._thread = thread = _Thread(number=self._thread.number + 1)

        def run() -> None:
            try:
                action()
            except Exception as error:  # of any kind: all ranks wait for its end
                thread.error = f"{type(error).__name__}: {error}"
                if isinstance(error, OSError) and error.strerror:
                    where = f": {error.filename}" if error.filename else ""
                    thread.error = f"{error.strerror}{where}"
            thread.ended_at = time.monotonic()
            thread.has_ended = True  # last: then the other fields are read

        # A daemon: a disk that does not answer keeps no process from its end.
        threading.Thread(target=run, name="checkpoint", daemon=True).start()

    def _write_next(self, began: float) -> None:
        write = self._current = self._next
        self._next = None
        if write is not None:
            write.began = began
            self._start(lambda: self._write(write))

    def _ended(self, write: Write, seconds: float, error: str = "") -> WriteResult:
        """Begin the one that waits, if there is one."""
        self._memories.append(write.writer.memory)
        self._write_next(time.monotonic())
        return WriteResult(
            step=write.step,
            copy_seconds=write.copy_seconds,
            write_seconds=seconds,
            error=error,
        )

    def _write(self, write: Write) -> None:
        if write.copy_error is not None:
            raise write.copy_error
        write.written = write.writer.write()

    def _complete(self, write: Write, by_rank: list[Written]) -> None:
        if not self._world.is_rank_zero:
            return  # a thread all the same: the ranks' progress is compared
        self._before_rename()
        with self._commits:  # `abandon` waits for a rename that has begun
            if self._is_abandoned:
                return
            write.writer.commit(write.tensors, by_rank)
        # Last: a cut at any moment leaves a complete checkpoint.
        with contextlib.suppress(OSError, DataError):  # the new one is complete
            remove_old(self._run_dir, self._keep)

    def _fail(self, write: Write) -> WriteResult:
        mine = self._thread.error
        reasons = self._ranks.allgather(f"[{self._world}] {mine}" if mine else "")
        if self._world.is_rank_zero:
            # In a thread: the disk may not answer.
            threading.Thread(
                target=shutil.rmtree, args=(write.writer.unfinished, True), daemon=True
            ).start()
        seconds = time.monotonic() - write.began
        return self._ended(write, seconds, next(filter(None, reasons)))
