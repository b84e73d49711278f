"""SLURM: the nodes of a job, from its variables, and what its commands say.

    SLURM_JOB_ID            17
    SLURM_JOB_NODELIST      gpu[001-002,007],big1
    SLURM_TASKS_PER_NODE    4(x3),2              consecutive nodes of the same count
    SLURM_GPUS_ON_NODE      4                    on the node where the script runs
    SLURM_GPUS              16 or a100:16        where --gpus asked for a sum
    SLURM_GPUS_PER_NODE     4 or a100:4          where --gpus-per-node was asked for
    SLURM_GPUS_PER_TASK     1 or a100:1          where --gpus-per-task was asked for

Names and forms are of sbatch's manual, `OUTPUT ENVIRONMENT VARIABLES`.
Tried with SLURM 22.05.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime

from mpitrain.errors import LaunchError
from mpitrain.schedulers.allocation import AllocatedNode, JobRecord, lost_in, query

NODE_LIST = "SLURM_JOB_NODELIST"
TASKS = "SLURM_TASKS_PER_NODE"


def read_allocation(environ: Mapping[str, str]) -> tuple[AllocatedNode, ...]:
    """Read the nodes and slots in the job script or in the shell of salloc."""
    for name in (NODE_LIST, TASKS):
        if not environ.get(name):
            raise LaunchError(
                f"job {environ['SLURM_JOB_ID']} of SLURM does not tell its nodes: "
                f"{name} is not set here. Expected it in the job's script and in the "
                "shell of salloc."
            )
    names, tasks = expand_nodes(environ[NODE_LIST]), expand_tasks(environ[TASKS])
    if len(tasks) != len(names):
        raise LaunchError(
            f"{TASKS}={environ[TASKS]!r} counts {len(tasks)} node(s), but {NODE_LIST}="
            f"{environ[NODE_LIST]!r} names {len(names)}. Usual cause: a shell that "
            "srun opened, which sees its own step only; run it in the job's script or "
            "in the shell of salloc."
        )
    gpus = _gpus(environ, tasks)
    return tuple(
        AllocatedNode(hostname=name, slots=slots, gpus=on_node)
        for name, slots, on_node in zip(names, tasks, gpus, strict=True)
    )


def seconds_left(job_id: str) -> float | None:
    """Ask `squeue` how long a job may still run; ``None`` without a limit or answer."""
    return parse_time_left(_of_job(job_id, "%L"))


def parse_time_left(text: str) -> float | None:
    r"""Read the output of ``squeue -o %L``.

    >>> parse_time_left("1-02:00:03\n"), parse_time_left("9:58")
    (93603.0, 598.0)
    >>> parse_time_left("UNLIMITED")
    """
    found = re.fullmatch(r"(?:(?:(\d+)-)?(\d+):)?(\d+):(\d+)", text.strip())
    if found is None:
        return None
    days, hours, minutes, seconds = (int(text or 0) for text in found.groups())
    return float(((days * 24 + hours) * 60 + minutes) * 60 + seconds)


def read_job(job_id: str) -> JobRecord | None:
    """Ask `scontrol` for the record of a job; ``None`` without an answer."""
    text = query("scontrol", "-o", "show", "job", job_id)  # each task of an array
    line = re.search(rf"^JobId={job_id} .*", text, re.MULTILINE)
    found = dict(re.findall(r"(\w+)=(\S+)", line[0] if line else ""))
    try:
        queued = datetime.fromisoformat(found["SubmitTime"]).timestamp()
        started = datetime.fromisoformat(found["StartTime"]).timestamp()
        num_nodes, num_cores = int(found["NumNodes"]), int(found["NumCPUs"])
    except (KeyError, ValueError):
        return None
    return JobRecord(queued, started, num_nodes, num_cores)


def is_running(job_id: str) -> bool:
    """Ask `squeue` whether a job runs; one that is being cancelled does not."""
    return _of_job(job_id, "%T") == "RUNNING"


def _of_job(job_id: str, field: str) -> str:
    """Ask `squeue` for a field; of an array, or a het job, it may list all jobs."""
    text = query("squeue", "-h", "-j", job_id, "-o", f"%A {field}")
    line = re.search(rf"^{re.escape(job_id)} (.*)$", text, re.MULTILINE)
    return line[1].strip() if line else ""


def lost_nodes(hostnames: Sequence[str]) -> dict[str, str]:
    """Ask `sinfo` which nodes are lost; return their states."""
    words = ("sinfo", "-h", "-N", "-o", "%N state = %T", "-n", ",".join(hostnames))
    return lost_in(query(*words), hostnames)


def expand_nodes(text: str) -> list[str]:
    """Expand a node list, such as ``gpu[001-002,007]``, by `scontrol`."""
    words = ("scontrol", "show", "hostnames", text)
    printed = query(*words)
    if not re.fullmatch(r"([\w.@-]+\n)+", printed):  # an error, or no scontrol
        printed = query(*words, with_stderr=True)
        raise LaunchError(
            f"{NODE_LIST}={text!r}: `scontrol show hostnames` printed "
            f"{printed.strip()!r}; expected the names of hosts. Write them into a file "
            "and give it with --from."
        )
    return printed.split()


def expand_tasks(text: str) -> list[int]:
    """Expand ``SLURM_TASKS_PER_NODE`` to the number of tasks of each node.

    >>> expand_tasks("4(x2),3")
    [4, 4, 3]
    """
    counts: list[int] = []
    for item in text.split(","):
        found = re.fullmatch(r"([1-9]\d*)(?:\(x([1-9]\d*)\))?", item)
        if found is None:
            raise LaunchError(
                f"{TASKS}={text!r} is no list of task counts; expected one like 4(x2),3"
            )
        counts += [int(found[1])] * int(found[2] or 1)
    return counts


def _gpus(environ: Mapping[str, str], tasks: list[int]) -> list[int | None]:
    text = environ.get("SLURM_GPUS_ON_NODE") or "0"
    if not text.isdecimal():
        raise LaunchError(f"SLURM_GPUS_ON_NODE={text!r} is not a number")
    here = int(text)
    of_task = environ.get("SLURM_GPUS_PER_TASK", "").split(",")
    counts = (item.rpartition(":")[2] for item in of_task)
    per_task = sum(int(count) for count in counts if count.isdecimal())
    if here and per_task:
        return [num_tasks * per_task for num_tasks in tasks]
    # --gpus=5 is a sum that SLURM spreads over the nodes as it likes. --gres and
    # --gpus-per-node are the same on all.
    is_sum = "SLURM_GPUS" in environ and "SLURM_GPUS_PER_NODE" not in environ
    is_known = here > 0 and not (is_sum and len(tasks) > 1)
    return [here if is_known else None] * len(tasks)
