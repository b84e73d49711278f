"""The job that runs in this process, for code that was not handed the job itself."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from mpitrain.launch.exit_guard import ExitGuard
from mpitrain.mpi.world import World

_current: list[tuple[ExitGuard, World]] = []  # at most one


def set_current(guard: ExitGuard, world: World) -> None:
    """Set the job that runs in this process."""
    _current[:] = [(guard, world)]


def unset_current() -> None:
    """Say that the job in this process is over."""
    _current.clear()


def current_world() -> World | None:
    """Return the `World` of the job that runs in this process; ``None`` without one."""
    return _current[0][1] if _current else None


def heartbeat(phase: str) -> None:
    """Tell the watchdog that this rank is alive, and what it does next; local.

    Costs a microsecond. Without a job nothing happens.
    """
    if _current:
        _current[0][0].watched.progress(phase)


def on_job_end(action: Callable[[], object]) -> None:
    """Call `action` on this rank, in a thread, when the watchdog ends the job."""
    if _current:
        _current[0][0].on_end.append(action)


def on_term() -> Callable[[Callable[[int, FrameType | None], object]], object] | None:
    """Return what registers a handler of SIGTERM beside the watchdog's, if it runs."""
    return _current[0][0].watched.on_sigterm if _current else None


def age_seconds() -> float:
    """Return how long this process has lived, by a monotonic clock."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started
