"""The nodes of a job and their slots, and what the scheduler's own commands print."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

QUERY_SECONDS = 30.0  # how long a scheduler may take to answer

# In the state of a node that its scheduler has lost; SLURM adds "*".
LOST = re.compile(r"down|unknown|stale|unresolvable|\*", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class AllocatedNode:
    """One machine of an allocation or of a host file."""

    hostname: str  # as the scheduler or the file writes it
    slots: int  # number of processes it has room for: tasks (SLURM), mpiprocs (PBS)
    gpus: int | None = None  # number of GPUs; ``None``: unknown, or none


class JobRecord(NamedTuple):
    """What a scheduler has on record of a job that runs. Times: seconds since 1970."""

    queued: float
    started: float
    num_nodes: int
    num_cores: int  # on all nodes, idle ones included


def query(
    *command: str, timeout: float = QUERY_SECONDS, with_stderr: bool = False
) -> str:
    """Return what a command prints; empty if it cannot be run."""
    try:
        return subprocess.run(
            command,
            check=False,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT if with_stderr else subprocess.DEVNULL,
            text=True,
            errors="replace",
            timeout=timeout,
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""


def lost_in(text: str, hostnames: Sequence[str]) -> dict[str, str]:
    r"""Return the states of lost nodes from the output of ``sinfo`` or ``pbsnodes``.

    >>> lost_in("a state = mixed\nb state = down*\n", ["a", "b"])
    {'b': 'down*'}
    >>> lost_in("b\n     Mom = b.x\n     state = state-unknown,down\n", ["b.x"])
    {'b.x': 'state-unknown,down'}
    """
    lost: dict[str, str] = {}
    # pbsnodes writes a node's attributes into indented lines below its name.
    for node in re.split(r"\n(?=\S)", text):
        state = re.search(r"\bstate = (\S+)", node)
        if state is not None and LOST.search(state[1]):
            # By any of its words: pbsnodes has the longer form of a name as Mom.
            lost |= dict.fromkeys(set(hostnames) & set(node.split()), state[1])
    return lost
