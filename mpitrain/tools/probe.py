"""Which nodes of a job answer, before a training is started on them. Needs no MPI.

On each node `mpirun` itself starts one process, by the way that the training's will be
started, and that one computes on every GPU (`answer`).
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass

from mpitrain.schedulers.allocation import AllocatedNode
from mpitrain.tools.answer import SIGN

AT_ONCE = 32
"""Nodes that are asked at once: each costs an mpirun on this node."""

TERM_SECONDS = 5.0
"""How long an mpirun may take to take its processes with it."""


TELLING = re.compile(
    r"error|fail|could not|cannot|unable|no such|refused|timed out|not found",
    re.IGNORECASE,
)
"""What stands in a line that says why something did not start."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What a node said."""

    node: AllocatedNode
    """The node."""
    num_gpus: int | None = None
    """GPUs that compute there; ``None``: no answer."""
    why: str = ""
    """Why there is none."""


def sift(
    nodes: Sequence[AllocatedNode], mpirun: Sequence[str], seconds: float
) -> tuple[list[AllocatedNode], list[str]]:
    """Ask all nodes, and tell those that a training may use from the others.

    Args:
        nodes: Nodes of the job.
        mpirun: The words that start mpirun, without hosts and numbers.
        seconds: How long each may take.

    Returns:
        The nodes that may be used, in their order; why not, for each of the others.
    """

    def ask_patiently(node: AllocatedNode) -> Answer:
        first = ask(node, mpirun, seconds)
        if first.num_gpus is not None:
            return first
        # A file system that had to find torch first has found it now.
        second = ask(node, mpirun, seconds)
        return first if second.num_gpus is None else second

    with ThreadPoolExecutor(AT_ONCE) as pool:
        answers = list(pool.map(ask_patiently, nodes))
    return judge(answers)


def judge(answers: Sequence[Answer]) -> tuple[list[AllocatedNode], list[str]]:
    """Leave out nodes that said nothing, and those with fewer GPUs than they should.

    They should have as many as the scheduler tells; where it tells none, as the others.

    Args:
        answers: Of all nodes.

    Returns:
        As `sift` does.

    >>> a, b = (AllocatedNode(hostname=name, slots=4) for name in "ab")
    >>> judge([Answer(node=a, num_gpus=4), Answer(node=b, num_gpus=3)])[1]
    ['b: 3 GPUs compute, expected 4']
    """
    most = max((answer.num_gpus or 0 for answer in answers), default=0)
    good, bad = [], []
    for answer in answers:
        node = answer.node
        expected = most if node.gpus is None else node.gpus
        if answer.num_gpus is None:
            bad.append(f"{node.hostname}: {answer.why}")
        elif answer.num_gpus < expected:
            bad.append(
                f"{node.hostname}: {answer.num_gpus} GPUs compute, expected {expected}"
            )
        else:
            good.append(node)
    return good, bad


def ask(node: AllocatedNode, mpirun: Sequence[str], seconds: float) -> Answer:
    """Start one process on a node, and wait for what it says.

    Args:
        node: The node.
        mpirun: The words that start mpirun, without hosts and numbers.
        seconds: How long it may take.

    Raises:
        OSError: There is no such mpirun.
    """
    words = ["-np", "1", "--host", node.hostname]
    command = [*mpirun, *words, sys.executable, "-m", "mpitrain.tools.answer"]
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        started = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            started.wait(seconds)
        except subprocess.TimeoutExpired:
            _end(started)
            return Answer(node=node, why=f"no answer within {seconds:g} s")
        said.seek(0)
        text = said.read()
    found = re.search(rf"{SIGN} (\d+) GPUs", text)
    if started.returncode == 0 and found is not None:
        return Answer(node=node, num_gpus=int(found[1]))
    said_so = reason_in(text)
    why = f"mpirun ended with {started.returncode}" + (said_so and f": {said_so}")
    return Answer(node=node, why=why)


def reason_in(text: str) -> str:
    r"""Return the line by which an mpirun says best why it failed.

    Args:
        text: All that it printed.

    >>> reason_in("----\nssh: Could not resolve hostname x\nSee the FAQ.\n----")
    'ssh: Could not resolve hostname x'
    """
    lines = [line.strip(" -*\0") for line in text.splitlines()]
    lines = [line for line in lines if line]
    telling = [line for line in lines if TELLING.search(line)]
    return (telling or lines or [""])[0]


def _end(started: subprocess.Popen[bytes] | subprocess.Popen[str]) -> None:
    """End an mpirun with all that it has started here."""
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(started.pid, number)
        with suppress(subprocess.TimeoutExpired):
            started.wait(TERM_SECONDS)
            return
