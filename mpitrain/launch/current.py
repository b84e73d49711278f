"""The job that runs in this process, for code that was not handed the job itself."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from mpitrain.launch.job import Job
from mpitrain.mpi.world import World


def current_world() -> World | None:
    """Return the `World` of the job that runs in this process; ``None`` without one."""
    return Job.current.world if Job.current and Job.current.is_running else None


def heartbeat(phase: str) -> None:
    """Tell the watchdog that this rank is alive, and what it does next; local.

    Costs a microsecond. Without a job nothing happens.
    """
    if Job.current and Job.current.is_running:
        Job.current.watchdog.progress(phase)


def on_job_end(action: Callable[[], object]) -> None:
    """Call `action` on this rank, in a thread, when the watchdog ends the job."""
    if Job.current and Job.current.is_running:
        Job.current.on_end(action)


def on_term(handler: Callable[[int, FrameType | None], object]) -> None:
    """Register a handler of SIGTERM beside the watchdog's, if MPI was started here."""
    if Job.current:
        Job.current.watchdog.on_sigterm(handler)


def age_seconds() -> float:
    """Return how long this process has lived, by a monotonic clock."""
    fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    started = int(fields[19]) / os.sysconf("SC_CLK_TCK")
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started
