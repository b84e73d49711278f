"""The TERM of a scheduler: it reaches a script of `run` once, wherever its rank is."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launcher import Mpi, children_of, environment, send_signal, session_of, slow
from run_scripts import write
from test_warm import EACH_IMPORTS, fork_server, server_pid, server_variables

SAVES_AT_TERM = """
import os, signal, sys, time
from pathlib import Path

came = []
signal.signal(signal.SIGTERM, lambda *_: came.append(1))
print("ready", "warm" if "MPITRAIN_PROXY" in os.environ else "cold", flush=True)
end = time.monotonic() + 20
while not came and time.monotonic() < end:
    time.sleep(0.05)
time.sleep(2)  # a second one would come now
Path("saved").write_text(str(len(came)))
sys.exit(75)
"""
PROGRAM = ("--no-python", sys.executable)
SLURM, PBS, NONE = {"SLURM_JOB_ID": "7"}, {"PBS_JOBID": "7.head"}, {}


def tree_of(pid: int) -> list[int]:
    """A process, and all below it."""
    return [pid, *(below for child in children_of(pid) for below in tree_of(child))]


def signal_job(job: dict[str, str], *roots: int) -> None:
    """Send TERM as a scheduler does: SLURM to all of a job, PBS to a session.

    Without one `supervise` alone gets USR1, as before a time limit.
    """
    if job == NONE:
        send_signal([roots[0]], signal.SIGUSR1)
    elif job == SLURM:
        for root in roots:
            send_signal(tree_of(root), signal.SIGTERM)
            time.sleep(0.5)  # two at once would be one
    else:
        send_signal(session_of(roots[0]), signal.SIGTERM)


def count_of_terms(
    mpi: Mpi, folder: Path, job: dict[str, str], *words: str, server: int | None = None
) -> str:
    """End a job under `supervise` by TERM; return how often its script has got it."""
    variables = EACH_IMPORTS if server is None else server_variables(folder)
    (folder / "saved").unlink(missing_ok=True)
    with subprocess.Popen(
        [
            *(sys.executable, "-m", "mpitrain", "supervise", "--"),
            *(str(mpi.mpirun), "-np", "1", *mpi.flags, sys.executable),
            *("-m", "mpitrain", "run", "--device", "cpu", *words),
        ],
        cwd=folder,
        env=environment(mpi, **job, **variables),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as started:
        assert started.stdout is not None
        line = next((line for line in started.stdout if "ready" in line), "")
        assert line.split() == ["ready", "cold" if server is None else "warm"]
        roots = [started.pid] if server is None else [started.pid, server]
        signal_job(job, *roots)
        output = started.stdout.read()
    assert started.returncode == 75, output
    return (folder / "saved").read_text()


@pytest.mark.parametrize("mpi", ["openmpi-5", slow("mpich")], indirect=True)
def test_a_fork_in_another_session_than_its_proxy_gets_it_once(
    mpi: Mpi, tmp_path: Path
) -> None:
    """SLURM has signalled it, too; PBS has not."""
    script = write(tmp_path, SAVES_AT_TERM)
    # That of SLURM ends the server, too; a server is of its own job alone.
    for job, kinds in ((PBS, ((), PROGRAM)), (SLURM, ((),))):
        with fork_server(mpi, tmp_path, **job):
            server = server_pid(tmp_path)
            for it in kinds:
                found = count_of_terms(mpi, tmp_path, job, *it, script, server=server)
                assert found == "1", (job, it)


@pytest.mark.parametrize("mpi", ["mpich"], indirect=True)
@pytest.mark.parametrize(
    ("job", "words"),
    [(SLURM, ()), (PBS, PROGRAM), slow(NONE, ()), slow(SLURM, PROGRAM)],
)
def test_under_mpich_it_reaches_each_rank_once(
    mpi: Mpi, job: dict[str, str], words: tuple[str, ...], tmp_path: Path
) -> None:
    """Hydra starts each rank in a session of its own, with the signals it blocks."""
    script = write(tmp_path, SAVES_AT_TERM)
    assert count_of_terms(mpi, tmp_path, job, *words, script) == "1"
