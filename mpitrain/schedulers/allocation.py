"""The nodes of a job, and the slots of each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class AllocatedNode:
    """One machine of an allocation or of a host file."""

    hostname: str
    """As the scheduler or the file writes it."""
    slots: int
    """Number of processes it has room for: tasks (SLURM), mpiprocs (PBS)."""
    gpus: int | None = None
    """Number of GPUs; ``None``: unknown, or none."""


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """What a scheduler gave this job."""

    scheduler: str
    """``"slurm"`` or ``"pbs"``."""
    job_id: str
    """The job's id as the scheduler writes it."""
    nodes: tuple[AllocatedNode, ...]
    """In the scheduler's order; the first is where the job script runs."""
    cpus_per_slot: int | None = None
    """Cores for each process; ``None``: unknown."""
