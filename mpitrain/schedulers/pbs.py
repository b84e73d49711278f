"""What PBS tells a job of its nodes: the file that `PBS_NODEFILE` names.

    PBS_JOBID       17.head
    PBS_NODEFILE    /var/spool/pbs/aux/17.head, on the first node of the job only

The file has a line for each mpiproc, the host's name alone, often with its domain; a
line for each chunk where `mpiprocs` was not asked for. It tells no GPUs (PBS_GPUFILE is
Torque's).
Tried with OpenPBS 23.06.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from mpitrain.errors import LaunchError
from mpitrain.schedulers.allocation import Allocation


def allocation(environ: Mapping[str, str]) -> Allocation:
    """Read what PBS gave to this job.

    Args:
        environ: The environment of a process of the job, on its first node.

    Returns:
        The nodes, in the order in which the file first names them.

    Raises:
        LaunchError: There is no node file, or it cannot be read.
        UsageError: What stands in it is no host file.
    """
    file = environ.get("PBS_NODEFILE")
    if not file:
        raise LaunchError(
            f"job {environ['PBS_JOBID']} of PBS has no list of nodes: PBS_NODEFILE is "
            "not set here. Expected it in the job's script and in the shell of "
            "`qsub -I`."
        )
    from mpitrain.schedulers import hostfile

    try:
        text = Path(file).read_text()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise LaunchError(
            f"PBS_NODEFILE={file} cannot be read: {reason}. PBS writes it on the first "
            "node of a job only: expected to run there."
        ) from None
    return Allocation(
        scheduler="pbs",
        job_id=environ["PBS_JOBID"],
        nodes=hostfile.parse(text, f"PBS_NODEFILE={file}"),
    )
