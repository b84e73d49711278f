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
