"""When the job will be ended by its scheduler, as the scheduler says itself.

SLURM   squeue -h -j ID -o %L          9:58, 1-02:00:00 or UNLIMITED, by SLURM's clock
PBS     qstat -f ID                    Resource_List.walltime = 00:10:00
stime = Sun Nov 22 05:00:00 2026
"""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from datetime import datetime

from mpitrain.schedulers import detect
from mpitrain.schedulers.asking import ask


def seconds_left(environ: Mapping[str, str]) -> float | None:
    """Ask the scheduler how long this job may still run. Takes as long as it takes.

    Args:
        environ: The environment of a process of the job.

    Returns:
        Seconds from now; ``None`` where there is no scheduler, no limit, or no answer.
    """
    scheduler = detect(environ)
    job_id = scheduler.job_id or ""
    if scheduler.name == "slurm":
        return of_squeue(_asked("squeue", "-h", "-j", job_id, "-o", "%L"))
    if scheduler.name == "pbs":
        return of_qstat(_asked("qstat", "-f", job_id), time.time())
    return None


def of_squeue(answer: str) -> float | None:
    r"""Read what ``squeue -o %L`` says.

    Args:
        answer: In its words.

    >>> of_squeue("1-02:00:03\n"), of_squeue("9:58"), of_squeue("UNLIMITED")
    (93603.0, 598.0, None)
    """
    found = re.fullmatch(r"(?:(?:(\d+)-)?(\d+):)?(\d+):(\d+)", answer.strip())
    if found is None:
        return None
    days, hours, minutes, seconds = (int(text or 0) for text in found.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def of_qstat(answer: str, now: float) -> float | None:
    r"""Read what ``qstat -f`` says.

    Args:
        answer: In its words.
        now: The time, in seconds since 1970.

    >>> now = datetime(2026, 11, 22, 5, 0).timestamp()
    >>> says = "Resource_List.walltime = 01:00:00\n stime = Sun Nov 22 04:50:00 2026"
    >>> of_qstat(says, now)
    3000.0
    """
    limit = re.search(r"Resource_List\.walltime = (\d+):(\d+):(\d+)", answer)
    start = re.search(r"^\s*stime = (.+)$", answer, re.MULTILINE)
    if limit is None:
        return None
    hours, minutes, seconds = map(int, limit.groups())
    total = (hours * 60 + minutes) * 60 + seconds
    try:
        said = start[1].strip() if start else ""
        began = datetime.strptime(said, "%a %b %d %H:%M:%S %Y")
    except ValueError:
        used = re.search(r"resources_used\.walltime = (\d+):(\d+):(\d+)", answer)
        if used is None:
            return None
        hours, minutes, seconds = map(int, used.groups())
        return float(total - (hours * 60 + minutes) * 60 - seconds)
    return began.timestamp() + total - now


def _asked(*command: str) -> str:
    told = ask(command)
    return "" if told is None else told.stdout
