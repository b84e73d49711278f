"""The job that runs in this process, for code that was not handed the job itself."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from mpitrain.launch.exit_guard import ExitGuard
from mpitrain.mpi.world import World


@dataclass
class _Current:
    guard: ExitGuard | None = None
    world: World | None = None


_current = _Current()


def set_current(guard: ExitGuard | None, world: World | None) -> None:
    """Say which job runs in this process; ``None`` when it is over."""
    _current.guard, _current.world = guard, world


def current_world() -> World | None:
    """Return the `World` of the job that runs in this process; ``None`` without one."""
    return _current.world


def heartbeat(phase: str) -> None:
    """Tell the watchdog that this rank is alive, and what it does next; local.

    Costs a microsecond. Without a job nothing happens.
    """
    guard = _current.guard
    if guard is not None and guard.watched is not None:
        guard.watched.progress(phase)


def on_job_end(action: Callable[[], object]) -> None:
    """Call `action` on this rank, in a thread, when the watchdog ends the job."""
    if _current.guard is not None:
        _current.guard.on_end.append(action)


def on_term() -> Callable[[Callable[[int, FrameType | None], object]], object] | None:
    """Return what registers a handler of SIGTERM beside the watchdog's, if it runs."""
    guard = _current.guard
    return guard.watched.on_sigterm if guard is not None and guard.watched else None


def age_seconds() -> float:
    """Return how long this process has lived, by a monotonic clock."""
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    except OSError:  # no Linux
        import psutil

        return time.time() - psutil.Process().create_time()
    began = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - began
