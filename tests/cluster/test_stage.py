"""`stage` on several hosts: by slow links, and who opens what."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from stage_environment import SHOW, make_environment

from .hosts import LOGIN, PREFIX, VirtualHosts
from .needs import which

MEGABITS = 100

START = """#!/bin/sh
# The hosts share a file system: each gets a folder of its own.
export HERE="$PWD/nodes/$(hostname)"
mkdir -p "$HERE"
exec "$@"
"""


@contextmanager
def slow_links(hosts: VirtualHosts, megabits: int = MEGABITS) -> Iterator[None]:
    """Limit what every host sends and receives."""
    limit = ["root", "tbf", "rate", f"{megabits}mbit", "burst", "128kb"]
    limit += ["latency", "100ms"]
    ends = [(PREFIX + name, "eth0") for name in hosts.names]
    ends += [(PREFIX + LOGIN, name) for name in hosts.names]
    with ExitStack() as stack:
        for space, device in ends:
            tc("-n", space, "qdisc", "add", "dev", device, *limit)
            stack.callback(tc, "-n", space, "qdisc", "del", "dev", device, "root")
        yield


def tc(*words: str) -> None:
    """Run the `tc` command."""
    subprocess.run([which("tc") or "tc", *words], check=True)


def stage(
    hosts: VirtualHosts, folder: Path, env: Path, *words: str, slots: int = 1
) -> subprocess.CompletedProcess[str]:
    """Start `stage` on all hosts, each with its own folder for the copy."""
    (folder / "start.sh").write_text(START)
    (folder / "show.py").write_text(SHOW)
    lines = [f"{name} slots={slots}\n" for name in hosts.names]
    (folder / "hosts").write_text("".join(lines))
    here = Path(sys.prefix)
    command = [f"{here}/bin/mpirun", "--prefix", str(here), "--hostfile", "hosts"]
    command += ["--bind-to", "none"]  # each host's first core is the same one
    for name in ("PATH", "MPI4PY_LIBMPI"):
        command += ["-x", name]
    command += ["sh", "start.sh", *words, f"{env}/bin/python", "-m", "mpitrain"]
    command += ["stage", "--to", "$HERE", "--", "python", "show.py"]
    variables = {
        "PATH": f"{env}/bin:{here}/bin:{hosts.environ['PATH']}",
        "MPI4PY_LIBMPI": str(here / "lib/libmpi.so.40"),
    }
    return hosts.run(
        hosts.names[0], command, cwd=folder, timeout_seconds=120, environ=variables
    )


def prefixes(output: str) -> set[str]:
    """Return the prefixes that the ranks have printed."""
    lines = [line for line in output.splitlines() if line.startswith("{")]
    return {json.loads(line)["prefix"] for line in lines}


@pytest.fixture
def env(tmp_path: Path) -> Path:
    return make_environment(tmp_path / "env", size=36 << 20, num_files=300)


def test_the_time_is_that_of_one_link(
    hosts: VirtualHosts, tmp_path: Path, env: Path
) -> None:
    with slow_links(hosts):
        done = stage(hosts, tmp_path, env, slots=2)
    assert done.returncode == 0, done.stdout
    copies = {f"{it}{env}" for it in tmp_path.glob("nodes/*/mpitrain-stage-*/*/")}
    assert len(copies) == 3
    assert prefixes(done.stdout) == copies
    said = re.search(r"staged: .* (\d+) MB, on 3 of 3 nodes in ([\d.]+) s", done.stdout)
    assert said is not None, done.stdout
    least = float(said[1]) * 8 / MEGABITS
    assert least < float(said[2]) < 1.5 * least, done.stdout
    # A host that has lost its copy receives it, and the others nothing.
    (lost,) = tmp_path.glob("nodes/node2/mpitrain-stage-*/*/")
    Path(f"{lost}{env}/pyvenv.cfg").unlink()
    done = stage(hosts, tmp_path, env)
    assert "on 3 of 3 nodes" in done.stdout, done.stdout
    assert "; 2 nodes had a copy already" in done.stdout, done.stdout
    assert prefixes(done.stdout) == copies


def test_only_rank_zero_opens_the_files(
    hosts: VirtualHosts, tmp_path: Path, env: Path
) -> None:
    strace = 'strace -f -qq -e trace=open,openat -o "trace.$(hostname)" "$@"'
    done = stage(hosts, tmp_path, env, "sh", "-c", strace, "sh")
    assert done.returncode == 0, done.stdout
    assert len(prefixes(done.stdout)) == 3
    # Where threads open at once, strace ends a line by "<unfinished ...>".
    success = re.compile(rf'"{env}/([^"\n]+)",(?!.* = -1 )')
    opened = {
        name: set(success.findall((tmp_path / f"trace.{name}").read_text()))
        for name in hosts.names
    }
    packages = next(env.glob("lib/python*/site-packages")).relative_to(env)
    assert f"{packages}/data/0/file0" in opened["node1"]
    assert f"{packages}/small_module.py" in opened["node1"]
    for name in hosts.names[1:]:
        assert [
            it for it in opened[name] if "/data/" in it or "small_module" in it
        ] == []
        # Before it can receive, a rank reads mpi4py.
        assert len([it for it in opened[name] if "/mpi4py/" in it]) < 40
