"""A rank's progress: memory that the rank writes and its sidecar reads."""

from __future__ import annotations

import fcntl
import mmap
import os
import struct
import time
from enum import IntEnum
from typing import NamedTuple

from mpitrain.mpi.shared_memory import create_memory_file

_LAYOUT = struct.Struct("=ddqq96s")  # time, limit, step, state, phase
_PROGRESS, _STATE, _PHASE = map(struct.Struct, ("=ddq", "=q", "=96s"))
_STATE_OFFSET = _PROGRESS.size
_PHASE_OFFSET = _STATE_OFFSET + _STATE.size


class State(IntEnum):
    """What a rank says of itself."""

    RUNNING = 0
    LEFT = 1  # finished with status 0; waits for the others
    FAILING = 2  # reports why the job ends
    DONE = 3  # about to exit normally
    IDLE = 4  # sleeps while others work without it


class Position(NamedTuple):
    """Where a rank is."""

    state: State
    phase: str  # what it does, such as ``"training"`` or ``"start: import torch"``
    step: int  # optimizer steps that it has finished; -1 where there are none
    age_seconds: float  # since its last progress
    limit_seconds: float  # largest allowed age; 0 for no limit


class Heartbeat:
    """One rank's position, in a file in memory that two processes map.

    Writing takes about a microsecond, so a rank can write every step.
    """

    def __init__(self, descriptor: int) -> None:
        if os.fstat(descriptor).st_size == 0:
            os.ftruncate(descriptor, mmap.PAGESIZE)
        self._memory = mmap.mmap(descriptor, mmap.PAGESIZE)
        self._now = time.monotonic  # one clock for all processes of a machine

    def beat(self, phase: str, step: int = -1, limit_seconds: float = 0.0) -> None:
        """Record progress; `phase` is what comes next, and may take `limit_seconds`."""
        # Not the state, which another thread may be setting: FAILING would be lost. The
        # phase first: a new limit must not stand beside the phase before.
        _PHASE.pack_into(self._memory, _PHASE_OFFSET, phase.encode()[:96])
        _PROGRESS.pack_into(self._memory, 0, self._now(), limit_seconds, step)

    def set_state(self, state: State) -> None:
        """Record the rank's state; its position stays."""
        _STATE.pack_into(self._memory, _STATE_OFFSET, state)

    def read(self) -> Position:
        """Return where the rank is."""
        when, limit, step, state, text = _LAYOUT.unpack_from(self._memory, 0)
        return Position(
            state=State(state),
            phase=text.rstrip(b"\0").decode(errors="replace"),
            step=step,
            age_seconds=max(0.0, self._now() - when),
            limit_seconds=limit,
        )


def beat_seconds(world_size: int) -> float:
    """Return how often a sidecar reports: the coordinator reads some 4,000 a second."""
    return max(1.0, world_size / 4096)


def memory_file() -> int:
    """Create an empty file in memory and return its descriptor."""
    return above_standard(create_memory_file("mpitrain"))


def above_standard(descriptor: int) -> int:
    """Move a descriptor above 2, which it would take if those were closed."""
    moved = fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, 3)
    os.close(descriptor)
    return moved
