"""Which nodes of a job answer, before a training is started on them. Needs no MPI.

One `mpirun` starts one process on each node, by the way that the training's will be
started, and that one computes on every GPU (`answer`). Open MPI starts none where it
cannot reach all; then each node that has not answered is asked alone.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from mpitrain.schedulers.allocation import AllocatedNode
from mpitrain.schedulers.asking import lost_nodes

SIGN = "mpitrain answers:"
"""Before the answer, on the line: launchers and modules print, too."""

AT_ONCE = 32
"""Nodes that are asked at once: each costs an mpirun on this node."""

TERM_SECONDS = 5.0
"""How long an mpirun may take to take its processes with it."""


TELLING = re.compile(
    r"error|fail|could not|cannot|unable|no such|refused|timed out|not found|no route",
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
    nodes: Sequence[AllocatedNode],
    mpirun: Sequence[str],
    seconds: float,
    scheduler: str,
) -> tuple[list[AllocatedNode], list[str]]:
    """Ask all nodes, and tell those that a training may use from the others.

    Args:
        nodes: Nodes of the job.
        mpirun: The words that start mpirun, without hosts and numbers.
        seconds: How long all of it may take, with up to `AT_ONCE` nodes that do not
            answer.
        scheduler: Who is asked first, and again later, which nodes it has lost.

    Returns:
        The nodes that may be used, in their order; why not, for each of the others.
    """
    answers = {node: Answer(node=node) for node in nodes}

    def silent() -> list[AllocatedNode]:
        left = [node for node in nodes if answers[node].num_gpus is None]
        lost = lost_nodes(scheduler, [node.hostname for node in left])
        for node in left:
            if state := lost.get(node.hostname):
                answers[node] = Answer(node=node, why=f"its state is {state}")
        return [node for node in left if node.hostname not in lost]

    # Half of the time for all at once: a file system that has to find torch first has
    # found it when nodes are asked one by one.
    if asked := silent():
        answers |= {it.node: it for it in ask(asked, mpirun, seconds / 2)}
    with ThreadPoolExecutor(AT_ONCE) as pool:
        alone = pool.map(lambda node: ask([node], mpirun, seconds / 2), silent())
        answers |= {answer.node: answer for (answer,) in alone}
    return judge(list(answers.values()))


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


def ask(
    nodes: Sequence[AllocatedNode], mpirun: Sequence[str], seconds: float
) -> list[Answer]:
    """Start one process on each node by one mpirun, and wait for what they say.

    Args:
        nodes: The nodes.
        mpirun: The words that start mpirun, without hosts and numbers.
        seconds: How long it may take.

    Raises:
        OSError: There is no such mpirun.
    """
    hosts = ",".join(node.hostname for node in nodes)
    words = ["-np", str(len(nodes)), "--host", hosts]
    command = [*mpirun, *words, sys.executable, "-m", "mpitrain.schedulers.probe"]
    with tempfile.TemporaryFile("w+", errors="replace") as said:
        started = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=said,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            status: int | None = started.wait(seconds)
        except subprocess.TimeoutExpired:
            status = None
        _end(started)
        said.seek(0)
        text = said.read()
    found = dict(re.findall(rf"{SIGN} (\S+) (\d+) GPUs", text))
    if len(nodes) == 1 and status == 0 and found:  # it may have several names
        found = {nodes[0].hostname: next(iter(found.values()))}
    if len({_short(node.hostname) for node in nodes}) == len(nodes):
        found = {_short(name): count for name, count in found.items()}
        found |= {n.hostname: found.get(_short(n.hostname)) for n in nodes}
    why = f"mpirun ended with {status}"
    if status is None:
        why = f"no answer within {seconds:g} s"
    if reason := reason_in(text):
        why += f": {reason}"
    return [
        Answer(node=node, num_gpus=int(count))
        if (count := found.get(node.hostname))
        else Answer(node=node, why=why)
        for node in nodes
    ]


def _short(hostname: str) -> str:
    return hostname.partition(".")[0]


def reason_in(text: str) -> str:
    r"""Return the line by which an mpirun says best why it failed.

    Args:
        text: All that it printed.

    >>> reason_in("----\nssh: Could not resolve hostname x\nSee the FAQ.\n----")
    'ssh: Could not resolve hostname x'
    >>> reason_in("[a:1] plm:ssh: Warning: setpgid failed\nssh: No route to host b")
    'ssh: No route to host b'
    """
    lines = [line.strip(" -*\0") for line in text.splitlines()]
    lines = [line for line in lines if line and "Warning: " not in line]
    telling = [line for line in lines if TELLING.search(line)]
    return (telling or lines or [""])[0]


def _end(started: subprocess.Popen[bytes] | subprocess.Popen[str]) -> None:
    """End an mpirun with all that it has started here: its session is its own.

    Open MPI puts each ssh into a process group of its own, and leaves those that hang.
    """
    with suppress(ProcessLookupError):
        os.killpg(started.pid, signal.SIGTERM)
    with suppress(subprocess.TimeoutExpired):
        started.wait(TERM_SECONDS)
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(ProcessLookupError, PermissionError):
            if os.getsid(int(entry.name)) == started.pid:
                os.kill(int(entry.name), signal.SIGKILL)
    started.wait()


def main() -> None:
    """Compute on every GPU that torch sees, and say where and how many there are."""
    import torch

    num_gpus = torch.cuda.device_count()
    for index in range(num_gpus):
        ones = torch.ones(64, device=f"cuda:{index}")
        assert (ones @ ones).item() == 64, f"cuda:{index} cannot add up"
    print(f"{SIGN} {socket.gethostname()} {num_gpus} GPUs", flush=True)


if __name__ == "__main__":
    main()
