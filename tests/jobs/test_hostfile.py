"""The host files that we write are what each mpirun reads."""

from __future__ import annotations

import socket
import subprocess
import sys
from pathlib import Path

import pytest
from launcher import Mpi, environment


@pytest.mark.parametrize("dialect", ["its own", "pbs"])
def test_mpirun_fills_the_slots_of_the_file_that_a_job_wrote(
    mpi: Mpi, dialect: str, tmp_path: Path
) -> None:
    is_mpich = mpi.name == "mpich"
    if dialect == "its own":
        dialect = "mpich" if is_mpich else "openmpi"
    (tmp_path / "nodes").write_text(f"{socket.gethostname()}\n" * 3)
    job = {"PBS_JOBID": "17.head", "PBS_NODEFILE": f"{tmp_path}/nodes"}
    subprocess.run(
        [
            *(sys.executable, "-m", "mpitrain", "hostfile"),
            *("--format", dialect, "--output", "hosts"),
        ],
        cwd=tmp_path,
        env=environment(**job),
        check=True,
    )
    flags = [flag for flag in mpi.flags if flag != "--oversubscribe"]
    options = ["-f"] if is_mpich else [*flags, "--bind-to", "none", "--hostfile"]
    done = subprocess.run(
        ["timeout", "-k", "10", "60", str(mpi.mpirun), *options, "hosts", "hostname"],
        cwd=tmp_path,
        env=environment(mpi),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.split() == [socket.gethostname()] * 3


@pytest.mark.parametrize("spare", [False, True])
def test_a_host_that_does_not_answer_is_left_out(
    mpi: Mpi, spare: bool, tmp_path: Path
) -> None:
    here = socket.gethostname()
    others = "nosuchhost" if spare else f"nosuchhost\n{here}"
    (tmp_path / "nodes").write_text(f"{others}\n{here}\n")
    flags = [flag for flag in mpi.flags if flag != "--oversubscribe"]
    done = subprocess.run(
        [
            *(sys.executable, "-m", "mpitrain", "hostfile", "--from", "nodes"),
            *("--probe", "--probe-seconds", "45", "--nodes", "1"),
            *("--", str(mpi.mpirun), *flags),
        ],
        cwd=tmp_path,
        env=environment(mpi),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{here} slots={1 if spare else 2}\n"
    assert done.stderr.startswith("left out: nosuchhost: ")


def test_where_no_host_answers_nothing_is_written(mpi: Mpi, tmp_path: Path) -> None:
    (tmp_path / "nodes").write_text("nosuchhost\n")
    (tmp_path / "hosts").write_text("as before")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "mpitrain", "hostfile", "--from", "nodes"),
            *("--output", "hosts", "--probe", "--probe-seconds", "45"),
            *("--", str(mpi.mpirun)),
        ],
        cwd=tmp_path,
        env=environment(mpi),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    assert "no node answers as it should: nosuchhost: " in done.stderr
    assert (tmp_path / "hosts").read_text() == "as before"
