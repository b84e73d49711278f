"""What a job was given: its nodes, and the room on each."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class AllocatedNode:
    """One machine of an allocation or of a host file."""

    hostname: str
    """Its name as the scheduler or the file writes it."""
    slots: int
    """Room for how many processes: tasks (SLURM), mpiprocs (PBS), slots (mpirun)."""
    max_slots: int | None = None
    """Most processes when oversubscribed; only Open MPI's host files tell it."""
    gpus: int | None = None
    """Number of GPUs; ``None``: the scheduler does not tell, or there are none."""


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """What a scheduler gave to this job."""

    scheduler: str
    """``"slurm"`` or ``"pbs"``."""
    job_id: str
    """The job's id in the scheduler's own words."""
    nodes: tuple[AllocatedNode, ...]
    """In the scheduler's order; the first is where the job script runs."""
    cpus_per_slot: int | None = None
    """Cores for each process; ``None``: the scheduler does not tell."""
