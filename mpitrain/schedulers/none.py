"""No scheduler: nobody gave nodes, so that a host file must name them."""

from __future__ import annotations

from collections.abc import Mapping

from mpitrain.errors import UsageError
from mpitrain.schedulers.allocation import Allocation


def allocation(environ: Mapping[str, str]) -> Allocation:
    """Say that there is no allocation to read.

    Args:
        environ: The environment of a process outside every job.

    Raises:
        UsageError: Always.
    """
    del environ
    raise UsageError(
        "there is no allocation here: neither SLURM_JOB_ID nor PBS_JOBID is set. "
        "Run this inside a job (its script, or the shell of salloc or `qsub -I`), "
        "or name a host file of your own: --from FILE"
    )
