"""Find the nodes of a job that a training can use, by starting a process on each.

One `mpirun` starts this module on all nodes, with the options that the training will
have. It computes on every GPU and prints how many there are. Open MPI starts nothing if
one node cannot be reached; then each node without an answer is tried by itself.
"""

from __future__ import annotations

import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

from mpitrain.mpi.launchers import DEFAULT, LAUNCHERS, TELL_VERSION, by_command
from mpitrain.schedulers import lost_nodes
from mpitrain.schedulers.allocation import AllocatedNode, query
from mpitrain.watchdog.process import end_with_parent

ANSWER = "mpitrain answers:"  # begins the line; launchers and modules print, too
MAX_PROBES = 32  # nodes that are tried at once; each takes an mpirun on this node
TERM_SECONDS = 5.0  # how long an mpirun may take to end its processes

# In a line that says why something did not start.
TELLING = re.compile(
    r"error|fail|could not|cannot|unable|no such|refused|timed out|not found|no route",
    re.IGNORECASE,
)


def check_nodes(
    nodes: Sequence[AllocatedNode],
    mpirun: Sequence[str],
    seconds: float,
    environ: Mapping[str, str],
) -> tuple[list[AllocatedNode], list[str]]:
    """Return the nodes that a training can use, and a reason for each of the others."""
    launcher = LAUNCHERS[launcher_of(mpirun)]
    launcher.check_hosts("--probe")
    num_gpus: dict[str, int] = {}
    reasons: dict[str, str] = {}

    def remaining() -> list[AllocatedNode]:
        left = [node for node in nodes if node.hostname not in num_gpus]
        lost = lost_nodes(environ, [node.hostname for node in left])
        reasons.update({name: f"its state is {state}" for name, state in lost.items()})
        return [node for node in left if node.hostname not in lost]

    def start(some: Sequence[AllocatedNode]) -> None:
        if some:
            names = [node.hostname for node in some]
            start_words = [*mpirun, *launcher.words_for(names)]
            answers, reason = _start(names, start_words, seconds / 2)
            num_gpus.update(answers)
            reasons.update({node.hostname: reason for node in some})

    # Each half gets half of the time. The first has read torch from a slow file system.
    start(remaining())
    with ThreadPoolExecutor(MAX_PROBES) as pool:
        list(pool.map(lambda node: start([node]), remaining()))
    return judge(nodes, num_gpus, reasons)


def launcher_of(words: Sequence[str]) -> str:
    """Return the name of the launcher that some words start, by its name, or answer."""
    may_ask = Path(words[0]).name in TELL_VERSION
    answer = query(words[0], "--version", with_stderr=True) if may_ask else ""
    return by_command(words[0], answer) or DEFAULT


def judge(
    nodes: Sequence[AllocatedNode],
    num_gpus: Mapping[str, int],
    reasons: Mapping[str, str],
) -> tuple[list[AllocatedNode], list[str]]:
    """Leave out nodes without an answer, and those with too few GPUs.

    A node should have as many GPUs as the scheduler says, else as many as the others.

    >>> a, b = (AllocatedNode(hostname=name, slots=4) for name in "ab")
    >>> judge([a, b], {"a": 4, "b": 3}, {})[1]
    ['b: 3 GPUs compute, expected 4']
    """
    most = max(num_gpus.values(), default=0)
    good, bad = [], []
    for node in nodes:
        found = num_gpus.get(node.hostname)
        expected = most if node.gpus is None else node.gpus
        if found is None:
            bad.append(f"{node.hostname}: {reasons.get(node.hostname, '')}")
        elif found < expected:
            bad.append(f"{node.hostname}: {found} GPUs compute, expected {expected}")
        else:
            good.append(node)
    return good, bad


def short_name(host: str) -> str:
    """Return a host's name without its domain, and an address as it is.

    >>> short_name("n1.example.org"), short_name("10.0.0.1"), short_name("me@10.0.0.1")
    ('n1', '10.0.0.1', 'me@10.0.0.1')
    """
    is_address = re.fullmatch(r"([^@]*@)?[\d.]+|.*:.*", host)
    return host if is_address else host.partition(".")[0]


def _start(
    names: Sequence[str], start: Sequence[str], seconds: float
) -> tuple[dict[str, int], str]:
    """Start one process on each host; return GPUs by host, and why others lack."""
    command = [*start, sys.executable, "-m", "mpitrain.tools.jobs.check_nodes"]
    # No pipe: what an mpirun leaves behind would hold it open.
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            ended = f"mpirun ended with {process.wait(seconds)}"
        except subprocess.TimeoutExpired:
            ended = f"no answer within {seconds:g} s"
        # Whether mpirun has ended or not: a pbs_tmrsh or an ssh of it may be left.
        end_session(process)
        output.seek(0)
        text = output.read()
    is_unique = len({*map(short_name, names)}) == len(names)

    def key(name: str) -> str:  # with a domain, or without
        return short_name(name) if is_unique else name

    found = {
        key(host): int(count)
        for host, count in re.findall(rf"{ANSWER} (\S+) (\d+) GPUs", text)
    }
    if len(names) == 1 and found and process.returncode == 0:
        return {names[0]: next(iter(found.values()))}, ""  # a host may have many names
    answers = {name: found[key(name)] for name in names if key(name) in found}
    reason = reason_in(text)
    return answers, f"{ended}: {reason}" if reason else ended


def reason_in(text: str) -> str:
    r"""Return the line of an mpirun's output that best says why it failed.

    >>> reason_in("----\nssh: Could not resolve hostname x\nSee the FAQ.\n----")
    'ssh: Could not resolve hostname x'
    >>> reason_in("[a:1] plm:ssh: Warning: setpgid failed\nssh: No route to host b")
    'ssh: No route to host b'
    """
    lines = [line.strip(" -*\0") for line in text.splitlines()]
    lines = [line for line in lines if line and "Warning: " not in line]
    telling = [line for line in lines if TELLING.search(line)]
    return (telling or lines or [""])[0]


def begin_without_term(parent: int) -> None:
    """Block TERM for what becomes mpirun, and end it with its parent; after a fork.

    Without the parent nobody would end it at TERM.
    """
    # TERM alone: mpirun forwards USR2, which this process blocks, too.
    signal.pthread_sigmask(signal.SIG_SETMASK, {signal.SIGTERM})
    # Not TERM, which it would never get.
    end_with_parent(parent, signal.SIGINT)


def end_session(
    process: subprocess.Popen[str] | subprocess.Popen[bytes],
    number: int = signal.SIGTERM,
) -> None:
    """End an mpirun and its session; Open MPI leaves each ssh in a group of its own."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)
    with suppress(subprocess.TimeoutExpired):
        process.wait(TERM_SECONDS)
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(ProcessLookupError, PermissionError):
            if os.getsid(int(entry.name)) == process.pid:
                os.kill(int(entry.name), signal.SIGKILL)
    process.wait()


def answer() -> None:
    """Compute on every GPU that torch finds; print this host and their number."""
    import torch

    num_gpus = torch.accelerator.device_count()
    for index in range(num_gpus):
        ones = torch.ones(64, device=index)
        assert (ones @ ones).item() == 64, f"GPU {index} cannot add up"
    print(f"{ANSWER} {socket.gethostname()} {num_gpus} GPUs", flush=True)


if __name__ == "__main__":
    answer()
