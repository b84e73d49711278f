"""What hosts may contradict each other in, on hosts that do."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from launcher import slow

from .hostfile import give_up, version_of
from .hosts import VirtualHosts

SCRIPT = """
import os, socket, sys, time
host = socket.gethostname()
{before}
import mpitrain
with mpitrain.init(device="cpu", timeout_seconds=60) as world:
    print("ready", world)
"""

LATE = """
real = time.time
if host == "node2":
    time.time = lambda: real() - {seconds}
"""


def start(
    hosts: VirtualHosts, folder: Path, before: str, *flags: str, slots: int = 2
) -> subprocess.CompletedProcess[str]:
    """Start a script on two hosts; mpirun runs on the first, a daemon on the other."""
    path = f"{folder}/.venv/bin:{hosts.environ['PATH']}"
    if "Open MPI" not in version_of(str(folder / ".venv/bin/mpirun")):
        give_up("these words are Open MPI's; the mpirun here is another")
    names = hosts.names[:2]
    (folder / "hosts").write_text("".join(f"{name} slots={slots}\n" for name in names))
    (folder / "script.py").write_text(SCRIPT.format(before=before))
    command = ["mpirun", "--prefix", f"{folder}/.venv", "--hostfile", "hosts"]
    command += ["-x", "PATH", "-x", "PYTHONPATH", *flags, "python", "script.py"]
    return hosts.run(
        names[0],
        command,
        cwd=folder,
        timeout_seconds=120,
        environ={"PATH": path, "PYTHONPATH": str(folder)},
    )


@pytest.mark.parametrize(
    ("seconds", "status", "words"),
    [
        (1000, 1, "TopologyError: the hosts' clocks are 1000 s apart: "),
        slow(100, 0, "the hosts' clocks are 100 s apart: "),
        slow(20, 0, None),
    ],
)
def test_a_host_whose_clock_is_minutes_behind_is_named(
    hosts: VirtualHosts, folder: Path, seconds: int, status: int, words: str | None
) -> None:
    """One machine has one clock: the ranks of one host read it wrong."""
    done = start(hosts, folder, LATE.format(seconds=seconds), slots=1)
    assert (done.returncode == 0) == (status == 0), done.stdout
    assert done.stdout.count("ready") == (0 if status else 2)
    assert done.stdout.count(" s apart") == (1 if words else 0), done.stdout
    if words:
        assert words in done.stdout
        assert " on node2 and " in done.stdout


def test_what_is_said_of_all_hosts_is_said_once(
    hosts: VirtualHosts, folder: Path
) -> None:
    """Fewer ranks on a node than on others, and a binding to one core."""
    has_cores = int(hosts.run("node1", ["nproc"]).stdout) > 1
    flags = ["--bind-to", "core"] if has_cores else []
    done = start(hosts, folder, "", "--map-by", "ppr:2:node", "-np", "3", *flags)
    assert done.returncode == 0, done.stdout
    words = "the nodes have different numbers of ranks: 2 on node1; 1 on node2"
    assert done.stdout.count(words) == 1, done.stdout
    assert done.stdout.count("each rank is bound to one core") == has_cores
