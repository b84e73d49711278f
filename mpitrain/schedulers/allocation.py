"""The nodes of a job and their slots, and what the scheduler's own commands print."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass

QUERY_SECONDS = 30.0  # how long a scheduler may take to answer


@dataclass(frozen=True, kw_only=True)
class AllocatedNode:
    """One machine of an allocation or of a host file."""

    hostname: str  # as the scheduler or the file writes it
    slots: int  # number of processes it has room for: tasks (SLURM), mpiprocs (PBS)
    gpus: int | None = None  # number of GPUs; ``None``: unknown, or none


def query(*command: str, timeout: float = QUERY_SECONDS) -> str:
    """Return what a command prints, errors included; empty if it cannot be run."""
    try:
        return subprocess.run(
            command,
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=timeout,
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
