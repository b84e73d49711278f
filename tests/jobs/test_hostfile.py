"""The host files that we write are what each mpirun reads."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launcher import Mpi, environment, survivors


@pytest.mark.parametrize("file_format", ["its own", "pbs"])
def test_mpirun_fills_the_slots_of_the_file_that_a_job_wrote(
    mpi: Mpi, file_format: str, tmp_path: Path
) -> None:
    is_mpich = mpi.name == "mpich"
    if file_format == "its own":
        file_format = "mpich" if is_mpich else "openmpi"
    (tmp_path / "nodes").write_text(f"{socket.gethostname()}\n" * 3)
    job = {"PBS_JOBID": "17.head", "PBS_NODEFILE": f"{tmp_path}/nodes"}
    subprocess.run(
        [
            *(sys.executable, "-m", "mpitrain", "hostfile"),
            *("--format", file_format, "--output", "hosts"),
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


def test_a_host_that_does_not_answer_is_left_out(mpi: Mpi, tmp_path: Path) -> None:
    here = socket.gethostname()
    (tmp_path / "nodes").write_text(f"nosuchhost\n{here}\n{here}\n")
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
    assert done.stdout == f"{here} slots=2\n"
    assert done.stderr.startswith("left out: nosuchhost: ")


def test_a_host_that_hangs_costs_the_time_of_the_probe_and_leaves_nothing(
    openmpi: Mpi, tmp_path: Path
) -> None:
    here = socket.gethostname()
    (tmp_path / "nodes").write_text(f"hangs\n{here}\nlost\n")
    pids = tmp_path / "pids"
    agent = tmp_path / "agent"  # stands for an ssh to a node that is cut off
    agent.write_text(f"#!/bin/sh\necho $$ $1 >> {pids}\nexec sleep 600\n")
    agent.chmod(0o755)
    pbsnodes = tmp_path / "pbsnodes"
    pbsnodes.write_text("#!/bin/sh\nprintf 'lost\\n     state = down\\n'\n")
    pbsnodes.chmod(0o755)
    flags = [flag for flag in openmpi.flags if flag != "--oversubscribe"]
    began = time.monotonic()
    done = subprocess.run(
        [
            *(sys.executable, "-m", "mpitrain", "hostfile", "--from", "nodes"),
            *("--probe", "--probe-seconds", "30", "--", str(openmpi.mpirun), *flags),
        ],
        cwd=tmp_path,
        env=environment(
            openmpi,
            PATH=f"{tmp_path}:{os.environ['PATH']}",
            PBS_JOBID="7.head",
            PRTE_MCA_plm_ssh_agent=str(agent),
            OMPI_MCA_plm_rsh_agent=str(agent),
        ),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert time.monotonic() - began < 30 + 15
    assert done.stdout == f"{here} slots=1\n", done.stderr
    assert "left out: hangs: no answer within 15 s" in done.stderr
    assert "left out: lost: its state is down" in done.stderr
    asked = [line.split() for line in pids.read_text().splitlines()]
    assert {host for _, host in asked} == {"hangs"}
    assert survivors([int(pid) for pid, _ in asked]) == []


def test_where_no_host_answers_nothing_is_written(openmpi: Mpi, tmp_path: Path) -> None:
    (tmp_path / "nodes").write_text("nosuchhost\n")
    (tmp_path / "hosts").write_text("as before")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "mpitrain", "hostfile", "--from", "nodes"),
            *("--output", "hosts", "--probe", "--probe-seconds", "45"),
            *("--", str(openmpi.mpirun)),
        ],
        cwd=tmp_path,
        env=environment(openmpi),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 1
    assert "no node answers as it should: nosuchhost: " in done.stderr
    assert (tmp_path / "hosts").read_text() == "as before"
