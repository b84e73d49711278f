"""Start whole mpirun jobs as a user does, and look at what is left of them."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mpitrain.warm.process_state import READ_AT_IMPORT

ROOT = Path(__file__).parents[2]
KILL_AFTER_SECONDS = 10


@dataclass(frozen=True, kw_only=True)
class Mpi:
    """One MPI: its mpirun, and the library that mpi4py shall load."""

    name: str
    mpirun: Path
    libmpi: Path | None
    flags: tuple[str, ...]


MPIS = ("openmpi-5", "openmpi-4.1", "mpich")

under_each_mpi = pytest.mark.parametrize("mpi", MPIS, indirect=True)
"""For tests of what the launchers do differently: in CI, too, under each of them."""


ON_ONE_CORE = ("taskset", "-c", str(min(os.sched_getaffinity(0))))
"""Before a command whose ranks shall outnumber the cores: one imports for all then."""


slow = partial(pytest.param, marks=pytest.mark.slow)
"""A value of a test that only `make test-all` runs: others show nearly as much."""


def find(name: str) -> Mpi:
    """The MPI of our own environment, or one that `make test-jobs` put beside it."""
    here = Path(sys.prefix)
    if name == "openmpi-5":
        # MPIEXEC: a site's own MPI, that mpi4py finds by itself.
        mpirun = Path(os.environ.get("MPIEXEC", here / "bin" / "mpirun"))
        return Mpi(name=name, mpirun=mpirun, libmpi=None, flags=("--oversubscribe",))
    folder = ROOT / (".venv-ompi4" if name == "openmpi-4.1" else ".venv-mpich")
    library = "libmpi.so.40" if name == "openmpi-4.1" else "libmpi.so.12"
    return Mpi(
        name=name,
        mpirun=folder / "bin" / "mpirun",
        libmpi=folder / "lib" / library,
        # Open MPI 4.1 wants ssh or rsh even where it starts nothing elsewhere.
        flags=("--oversubscribe", "--mca", "plm", "isolated")
        if name == "openmpi-4.1"
        else (),
    )


class ForkServers:
    """Fork servers, one for each MPI, whose mpirun sets variables of its own."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._servers: dict[str, subprocess.Popen[str]] = {}

    def variables(self, mpi: Mpi, others: Iterable[str]) -> dict[str, str]:
        """Return what lets a job's ranks be forks; nothing where they cannot be."""
        if any(map(READ_AT_IMPORT.match, others)):
            return {}
        path = self._folder / f"fork-server-{mpi.name}"
        server = self._servers.get(mpi.name)
        if server is None or server.poll() is not None:
            if server is not None:  # it was idle for too long
                server.communicate()
            command = [str(mpi.mpirun), "-np", "1", *mpi.flags, sys.executable]
            server = subprocess.Popen(
                # It ends by itself where the tests were killed.
                [*command, "-m", "mpitrain", "serve", "--idle-minutes", "20"],
                env=environment(mpi, MPITRAIN_FORK_SERVER=str(path)),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                text=True,
                start_new_session=True,
            )
            assert server.stdout is not None
            assert "ready" in server.stdout.readline()
            self._servers[mpi.name] = server
        return {"MPITRAIN_FORK_SERVER": str(path)}

    def close(self) -> None:
        for server in self._servers.values():
            for number in (signal.SIGINT, signal.SIGKILL):
                with suppress(ProcessLookupError):
                    os.killpg(server.pid, number)
                with suppress(subprocess.TimeoutExpired):
                    server.communicate(timeout=30)
                    break


warm: ForkServers | None = None
"""Set in a file whose jobs begin as forks: see the fixture `warm_starts`."""


@dataclass(frozen=True, kw_only=True)
class Done:
    """A job that has ended."""

    status: int
    out: str
    err: str
    ended: float

    @property
    def ours(self) -> list[str]:
        """The lines in which one of our ranks says why the job ends."""
        return [
            line
            for line in (self.out + self.err).splitlines()
            if re.match(r"\[rank \d+/\d+ \S+\] ", line)
        ]


def environment(mpi: Mpi | None = None, **more: str) -> dict[str, str]:
    """The user's environment, without what an outer mpirun may have set.

    Nor TORCHINDUCTOR_CACHE_DIR, which torch.export sets in a process that tests share.
    """
    others = ("OMPI_", "PMIX", "PMI_", "PRTE_", "OMP_", "MPI4PY", "TORCHINDUCTOR")
    others += ("TORCH_HOME",)
    kept = {k: value for k, value in os.environ.items() if not k.startswith(others)}
    kept["PYTHONPATH"] = f"{Path(__file__).parent}:{ROOT}"
    if os.geteuid() == 0:
        kept["OMPI_ALLOW_RUN_AS_ROOT"] = kept["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
    if mpi is not None and mpi.libmpi is not None:
        kept["MPI4PY_LIBMPI"] = str(mpi.libmpi)
    if warm is not None and "MPITRAIN_FORK_SERVER" not in more:
        kept |= warm.variables(mpi or find(MPIS[0]), more)
    return {**kept, **more}


def mpirun(
    mpi: Mpi,
    num_ranks: int,
    *words: str,
    cwd: Path,
    timeout_seconds: int = 180,
    python: str | Path = sys.executable,
    **variables: str,
) -> Done:
    """Run ``mpirun -np N python WORDS`` to its end, or to the end of our patience."""
    started = time.time()
    done = subprocess.run(
        [
            *("timeout", "-k", str(KILL_AFTER_SECONDS), str(timeout_seconds)),
            *(str(mpi.mpirun), "-np", str(num_ranks), *mpi.flags),
            *(str(python), *words),
        ],
        cwd=cwd,
        env=environment(mpi, **variables),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    ended = time.time()
    # Not by the status: Open MPI's mpirun ends with 137, too, when a rank is killed.
    assert ended - started < timeout_seconds, (
        f"the job hung: killed after {timeout_seconds} s\n{done.stdout}{done.stderr}"
    )
    return Done(status=done.returncode, out=done.stdout, err=done.stderr, ended=ended)


def supervise(
    mpi: Mpi, folder: Path, options: Sequence[str], *words: str, num_ranks: int = 3
) -> Done:
    """Run ``supervise OPTIONS -- mpirun -np N python WORDS`` to its end."""
    done = subprocess.run(
        [
            *("timeout", "-k", "5", "170", sys.executable, "-m", "mpitrain"),
            *("supervise", *options, "--", str(mpi.mpirun), "-np", str(num_ranks)),
            *(*mpi.flags, sys.executable, *words),
        ],
        cwd=folder,
        env=environment(mpi),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode not in (124, 137), done.stdout + done.stderr
    ended = time.time()
    return Done(status=done.returncode, out=done.stdout, err=done.stderr, ended=ended)


def rows(run_dir: Path, event: str) -> list[dict[str, Any]]:
    """What a run has written down of each event of a kind, such as `epoch`."""
    lines = (run_dir / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["event"] == event]


def survivors(pids: list[int]) -> list[int]:
    """Those of some processes that still run (zombies do not)."""
    alive = []
    for pid in pids:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            continue
        if state != "Z":
            alive.append(pid)
    return alive


def wait_until_gone(pids: Iterable[int], seconds: float = 10) -> None:
    """Wait for the end of processes: mpirun may end before the ranks it has killed."""
    end = time.monotonic() + seconds
    while alive := survivors(list(pids)):
        assert time.monotonic() < end, f"{alive} still run"
        time.sleep(0.02)


def send_signal(pids: Iterable[int], number: int = signal.SIGKILL) -> None:
    """Send a signal to processes, of which some may have ended meanwhile."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def children_of(pid: int) -> list[int]:
    """The processes that one has started: beside a rank, its sidecar."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    found = []
    for task in tasks:
        # A thread may end between the listing and the reading.
        with suppress(OSError):
            found += [int(child) for child in task.read_text().split()]
    return found


def session_of(pid: int) -> list[int]:
    """The processes of the session that one leads."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        # Any process of the machine may end between the listing and the question.
        with suppress(ProcessLookupError):
            if os.getsid(int(entry.name)) == pid:
                found.append(int(entry.name))
    return found
