"""Questions to a scheduler, by its own commands."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence

ANSWER_SECONDS = 30.0
"""How long a scheduler may take to answer."""

GONE = re.compile(r"invalid job id|unknown job id|has finished", re.IGNORECASE)
"""What `squeue` and `qstat` say of a job that is over, forgotten or not."""


GONE_STATUSES = (153, 35)
"""Those of `qstat` for a job that it does not know, and for one that has finished."""


def ask(command: Sequence[str]) -> subprocess.CompletedProcess[str] | None:
    """Run a command of the scheduler; ``None`` where it cannot be run, or is silent.

    Args:
        command: Its words.

    Returns:
        What it printed, on standard output and error together.
    """
    try:
        return subprocess.run(
            command,
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            timeout=ANSWER_SECONDS,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None


def is_alive(scheduler: str, job_id: str) -> bool | None:
    """Ask whether a job waits or runs.

    Args:
        scheduler: ``"slurm"`` or ``"pbs"``.
        job_id: In the scheduler's own words.

    Returns:
        Whether it does; ``None`` where nobody knows.
    """
    if scheduler == "slurm":
        told = ask(["squeue", "-h", "-j", job_id, "-o", "%T"])
    else:
        told = ask(["qstat", "-f", job_id])
    return None if told is None else of_answer(told.returncode, told.stdout)


def of_answer(status: int, text: str) -> bool | None:
    r"""Read what ``squeue -o %T`` or ``qstat -f`` says of one job.

    Args:
        status: The exit status.
        text: What was printed.

    >>> of_answer(0, "PENDING\n"), of_answer(0, "    job_state = Q\n")
    (True, True)
    >>> of_answer(0, ""), of_answer(153, "qstat: Unknown Job Id 17.head")
    (False, False)
    >>> of_answer(0, "    job_state = F\n")
    False
    >>> of_answer(1, "slurm_load_jobs error: Unable to contact slurm controller")
    """
    if status:
        is_gone = status in GONE_STATUSES or GONE.search(text)
        return False if is_gone else None
    state = re.search(r"^\s*job_state = (\w)", text, re.MULTILINE)
    if state is not None:
        return state[1] not in "CFX"  # completed (Torque), finished, expired
    return bool(text.strip())


def ompthreads_in(text: str) -> bool | None:
    r"""Read from what ``qstat -f`` says whether ``ompthreads`` is asked for.

    Args:
        text: What was printed; PBS breaks long lines.

    >>> ompthreads_in("    Resource_List.select = 1:ncpus=16:ompth\n\treads=4\n")
    True
    >>> ompthreads_in("    schedselect = 1:ncpus=16:mpiprocs=4\n"), ompthreads_in("")
    (False, None)
    """
    wanted = re.findall(
        r"^\s*(?:Resource_List\.select|schedselect) = (.*)",
        text.replace("\n\t", ""),
        re.MULTILINE,
    )
    return any("ompthreads=" in of_chunks for of_chunks in wanted) if wanted else None


LOST = re.compile(r"down|unknown|stale|unresolvable|\*", re.IGNORECASE)
"""In the state of a node that its scheduler does not hear of; SLURM's is ``*``."""


def lost_nodes(scheduler: str, hostnames: Sequence[str]) -> dict[str, str]:
    """Ask which of some nodes the scheduler has lost; return their states.

    Args:
        scheduler: ``"slurm"``, ``"pbs"`` or ``"none"``.
        hostnames: The nodes, in its words.
    """
    of_slurm = ("sinfo", "-h", "-N", "-o", "%N state = %T", "-n", ",".join(hostnames))
    commands = {"slurm": of_slurm, "pbs": ("pbsnodes", "-H", *hostnames)}
    command = commands.get(scheduler)
    told = ask(command) if command and hostnames else None
    return {} if told is None else lost_in(told.stdout, hostnames)


def lost_in(text: str, hostnames: Sequence[str]) -> dict[str, str]:
    r"""Read states from what ``sinfo`` or ``pbsnodes -H`` says of some nodes.

    >>> lost_in("a state = mixed\nb state = down*\n", ["a", "b"])
    {'b': 'down*'}
    >>> lost_in("b\n     Mom = b.x\n     state = state-unknown,down\n", ["b.x"])
    {'b.x': 'state-unknown,down'}
    """
    lost: dict[str, str] = {}
    for node in re.split(r"\n(?=\S)", text):
        state = re.search(r"\bstate = (\S+)", node)
        if state is not None and LOST.search(state[1]):
            lost |= dict.fromkeys(set(hostnames) & set(node.split()), state[1])
    return lost
