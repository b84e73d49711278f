"""Which scheduler runs the job, PBS, SLURM or none, and what it gave.

Never asked who this rank is: that is MPI's to say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from mpitrain.schedulers import none, pbs, slurm
from mpitrain.schedulers.allocation import Allocation

JOB_VARIABLES = {"slurm": "SLURM_JOB_ID", "pbs": "PBS_JOBID"}
"""Scheduler, and the variable in which it tells a job its id."""

READERS = {"slurm": slurm.allocation, "pbs": pbs.allocation, "none": none.allocation}
"""Scheduler, and who reads what it gave."""


@dataclass(frozen=True, kw_only=True)
class Scheduler:
    """What runs the job that this process belongs to."""

    name: str
    """``"slurm"``, ``"pbs"`` or ``"none"``."""
    job_id: str | None = None
    """The job's id in the scheduler's own words."""


def detect(environ: Mapping[str, str]) -> Scheduler:
    """Tell the scheduler by the variable of its job id, never by a program on the PATH.

    >>> detect({"PBS_JOBID": "17.head"})
    Scheduler(name='pbs', job_id='17.head')
    >>> detect({}).name
    'none'
    """
    for name, variable in JOB_VARIABLES.items():
        if environ.get(variable):
            return Scheduler(name=name, job_id=environ[variable])
    return Scheduler(name="none")


def read_allocation(environ: Mapping[str, str]) -> Allocation:
    """Read what the scheduler gave to this job.

    Args:
        environ: The environment of the job's script.

    Returns:
        Its nodes and slots.

    Raises:
        LaunchError: The scheduler's own words are missing, or do not fit together.
        UsageError: There is no scheduler; the message says what to type.
    """
    return READERS[detect(environ).name](environ)
