"""Which scheduler runs the job, SLURM, PBS or none, and what it says of the job.

Nothing here tells a rank who it is: that comes from MPI.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mpitrain.errors import UsageError
from mpitrain.schedulers import pbs, slurm
from mpitrain.schedulers.allocation import AllocatedNode, JobRecord

JOB_VARIABLES = {"slurm": "SLURM_JOB_ID", "pbs": "PBS_JOBID"}
MODULES = {"slurm": slurm, "pbs": pbs}


@dataclass(frozen=True, kw_only=True)
class Scheduler:
    """The scheduler of this process's job."""

    name: str  # ``"slurm"``, ``"pbs"`` or ``"none"``
    job_id: str | None = None  # the job's id as the scheduler writes it


def detect(environ: Mapping[str, str]) -> Scheduler:
    """Recognize the scheduler by the variable of its job id, not by programs on PATH.

    >>> detect({"PBS_JOBID": "17.head"})
    Scheduler(name='pbs', job_id='17.head')
    >>> detect({}).name
    'none'
    """
    for name, variable in JOB_VARIABLES.items():
        if environ.get(variable):
            return Scheduler(name=name, job_id=environ[variable])
    return Scheduler(name="none")


def read_allocation(environ: Mapping[str, str]) -> tuple[AllocatedNode, ...]:
    """Read this job's nodes, in the scheduler's order; its script runs on the first."""
    module = MODULES.get(detect(environ).name)
    if module is not None:
        nodes: tuple[AllocatedNode, ...] = module.read_allocation(environ)
        return nodes
    raise UsageError(
        "there is no allocation here: neither SLURM_JOB_ID nor PBS_JOBID is set. "
        "Run this inside a job (its script, or the shell of salloc or `qsub -I`), "
        "or name a host file of your own: --from FILE"
    )


def seconds_left(environ: Mapping[str, str]) -> float | None:
    """Ask the scheduler how long this job may still run; it has 30 s to answer."""
    scheduler = detect(environ)
    module = MODULES.get(scheduler.name)
    return module.seconds_left(scheduler.job_id or "") if module else None


def read_job(environ: Mapping[str, str]) -> JobRecord | None:
    """Ask the scheduler for the record of this job; it has 30 s to answer."""
    scheduler = detect(environ)
    module = MODULES.get(scheduler.name)
    return module.read_job(scheduler.job_id or "") if module else None


def lost_nodes(environ: Mapping[str, str], hostnames: Sequence[str]) -> dict[str, str]:
    """Ask the scheduler which nodes it has lost; return their states."""
    module = MODULES.get(detect(environ).name)
    return module.lost_nodes(hostnames) if module and hostnames else {}
