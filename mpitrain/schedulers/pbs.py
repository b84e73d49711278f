"""PBS: the nodes of a job, from its node file, and what `qstat` and `pbsnodes` say.

    PBS_JOBID       17.head
    PBS_NODEFILE    /var/spool/pbs/aux/17.head, on the first node of the job only

The file has a line for each mpiproc, the host's name alone, often with its domain; a
line for each chunk where `mpiprocs` was not asked for. It tells no GPUs (PBS_GPUFILE is
Torque's).
Tried with OpenPBS 23.06.
"""

from __future__ import annotations

import contextlib
import os
import re
import stat
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path

from mpitrain.errors import LaunchError, UsageError
from mpitrain.schedulers.allocation import AllocatedNode, JobRecord, lost_in, query

SKEW_SECONDS = 60.0  # how much the clocks of two nodes may differ


def read_allocation(environ: Mapping[str, str]) -> tuple[AllocatedNode, ...]:
    """Read the nodes and slots, on the job's first node."""
    file = environ.get("PBS_NODEFILE")
    if not file:
        raise LaunchError(
            f"job {environ['PBS_JOBID']} of PBS has no list of nodes: PBS_NODEFILE is "
            "not set here. Expected it in the job's script and in the shell of "
            "`qsub -I`."
        )
    try:
        slots = Counter(Path(file).read_text().split())  # in the file's order
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or error
        raise LaunchError(
            f"PBS_NODEFILE={file} cannot be read: {reason}. PBS writes it on the first "
            "node of a job only: expected to run there."
        ) from None
    if not slots:
        raise UsageError(f"PBS_NODEFILE={file} names no host; expected a name a line")
    return tuple(AllocatedNode(hostname=it, slots=n) for it, n in slots.items())


def seconds_left(job_id: str) -> float | None:
    """Ask `qstat` how long a job may still run; ``None`` without a limit or answer."""
    return parse_time_left(_record(job_id), time.time())


def parse_time_left(text: str, now: float) -> float | None:
    r"""Read the output of ``qstat -f``; `now` is in seconds since 1970.

    >>> now = datetime(2026, 11, 22, 5, 0).timestamp()
    >>> says = "Resource_List.walltime = 01:00:05\n stime = Sun Nov 22 04:50:00 2026"
    >>> parse_time_left(says, now)
    3005.0
    """
    limit = _seconds_of("Resource_List", text)
    if limit is None:
        return None
    used = _seconds_of("resources_used", text) or 0.0
    # An hour that comes twice, at the end of summer time, may be either of the two.
    starts = (_time_of("stime", text, fold) for fold in (0, 1))
    passed = [now - it for it in starts if it is not None and now - it >= -SKEW_SECONDS]
    # Without any it has just started. PBS renews what is used every few minutes only.
    return limit - min(passed, key=lambda it: abs(it - used), default=used)


def read_job(job_id: str) -> JobRecord | None:
    """Ask `qstat` for the record of a job; ``None`` without an answer."""
    text = _record(job_id)
    queued, started = _time_of("qtime", text), _time_of("stime", text)
    cores = re.search(r"Resource_List\.ncpus = (\d+)", text)
    places = re.search(r"exec_host = (\S+)", text)  # a/0*4+b/0*4
    if queued is None or started is None or cores is None or places is None:
        return None
    hosts = {it.partition("/")[0] for it in places[1].split("+")}
    return JobRecord(queued, started, len(hosts), int(cores[1]))


def _record(job_id: str) -> str:
    return query("qstat", "-f", job_id).replace("\n\t", "")  # it breaks long lines


def _time_of(name: str, text: str, fold: int = 0) -> float | None:
    found = re.search(rf"^\s*{name} = (.+)$", text, re.MULTILINE)
    try:
        when = datetime.strptime(found[1].strip(), "%a %b %d %H:%M:%S %Y")  # type: ignore[index]
    except (TypeError, ValueError):  # another language
        return None
    return when.replace(fold=fold).timestamp()


def _seconds_of(name: str, text: str) -> float | None:
    found = re.search(rf"{name}\.walltime = (\d+):(\d+):(\d+)", text)
    if found is None:
        return None
    hours, minutes, seconds = map(float, found.groups())
    return (hours * 60 + minutes) * 60 + seconds


def has_ended_job(output_begin: int) -> bool:
    """Whether PBS itself ends this job, since it lost a node, or since time is up.

    Only its message in the job's output tells that from qdel, which leaves none. What
    stands before `output_begin`, in bytes, is of earlier jobs with the same file.
    """
    # PBS writes it into the file of stderr; a terminal or a pipe cannot be read again.
    if not stat.S_ISREG(os.fstat(2).st_mode):
        return False
    with contextlib.suppress(OSError):
        ends = b"=>> PBS: job killed: node ", b"=>> PBS: job killed: walltime "
        with Path("/proc/self/fd/2").open("rb") as output:
            output.seek(output_begin)
            return any(line.startswith(ends) for line in output)
    return False


def asks_for_ompthreads(job_id: str) -> bool | None:
    """Ask `qstat` whether a job's chunks have ``ompthreads``; ``None``: no answer."""
    text = _record(job_id)
    # schedselect is the job's select with the defaults of its queue and server.
    chunks = re.findall(
        r"^\s*(?:Resource_List\.select|schedselect) = (.*)", text, re.MULTILINE
    )
    return any("ompthreads=" in chunk for chunk in chunks) if chunks else None


def lost_nodes(hostnames: Sequence[str]) -> dict[str, str]:
    """Ask `pbsnodes` which nodes are lost; return their states."""
    return lost_in(query("pbsnodes", "-H", *hostnames), hostnames)
