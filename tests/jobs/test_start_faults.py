"""The start cannot go wrong in silence: stages that hang, processes killed."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launcher import (
    MPIS,
    Done,
    Mpi,
    children_of,
    environment,
    mpirun,
    slow,
    survivors,
    wait_until_gone,
)

GONE_SECONDS = 10.0
LIMIT = 15  # seconds; an import of torch takes some on a busy machine

HEAD = """
import os, signal, sys, threading, time
from pathlib import Path
rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", "0")))
Path(f"pid-{rank}").write_text(str(os.getpid()))

def strike():
    if rank == 1:
        Path("time").write_text(str(time.time()))
        FAULT

import mpitrain.launch.job as job
import mpitrain.launch.init as stages
import mpitrain
"""

STAGES = {
    "before MPI starts": "begin = job.start_mpi\n"
    "job.start_mpi = lambda **words: (strike(), begin(**words))[1]\n",
    "in import torch": "begin = stages.import_torch\n"
    "stages.import_torch = lambda: (strike(), begin())[1]\n",
    "at the network": "begin = stages.select.find_rendezvous\n"
    "stages.select.find_rendezvous = lambda *w: (strike(), begin(*w))[1]\n",
    "at the store": "begin = stages.store.open_store\n"
    "stages.store.open_store = lambda *w: (strike(), begin(*w))[1]\n",
    "at the process group": "begin = stages.init_process_group\n"
    "stages.init_process_group = lambda *w: (strike(), begin(*w))[1]\n",
}

TAIL = """
with mpitrain.init(device="cpu", start_timeout_seconds=LIMIT) as world:
    import torch, torch.distributed as dist
    dist.barrier()
"""


def run(mpi: Mpi, stage: str, fault: str, limit: int, folder: Path) -> Done:
    tail = TAIL.replace("LIMIT", str(limit))
    script = HEAD.replace("FAULT", fault) + STAGES[stage] + tail
    (folder / "script.py").write_text(script)
    return mpirun(mpi, 2, "script.py", cwd=folder, timeout_seconds=60)


def check_gone(done: Done, folder: Path, seconds: float) -> None:
    pids = [int(file.read_text()) for file in folder.glob("pid-*")]
    assert done.ended - float((folder / "time").read_text()) < seconds
    wait_until_gone(pids)


@pytest.mark.parametrize(
    ("mpi", "stage"),
    [
        # After the imports the process group stands for what comes before it.
        *(("openmpi-5", stage) for stage in STAGES if stage != "at the store"),
        slow("openmpi-5", "at the store"),
        ("openmpi-4.1", "before MPI starts"),
        ("openmpi-4.1", "at the network"),
        ("mpich", "before MPI starts"),
        slow("mpich", "at the store"),
    ],
    indirect=["mpi"],
)
def test_a_rank_killed_in_the_start_ends_the_job(
    mpi: Mpi, stage: str, tmp_path: Path
) -> None:
    done = run(mpi, stage, "os.kill(os.getpid(), signal.SIGKILL)", 60, tmp_path)
    assert done.status != 0
    check_gone(done, tmp_path, GONE_SECONDS)
    (line,) = done.ours
    assert line.startswith("[rank 1/2 ")
    assert "died without an error message" in line
    assert "start: " in line


@pytest.mark.parametrize(
    "stage", ["before MPI starts", slow("at the network"), "at the process group"]
)
def test_a_stage_of_the_start_that_does_not_end_names_the_missing_rank(
    openmpi: Mpi, stage: str, tmp_path: Path
) -> None:
    done = run(openmpi, stage, "time.sleep(1000)", LIMIT, tmp_path)
    check_gone(done, tmp_path, LIMIT + 15)
    (line,) = done.ours
    assert "hang: " in line
    assert done.status == 76, done.err
    if stage == "before MPI starts":
        # Nothing joins the ranks yet: only what is seen on this host can be told.
        assert "start: starting MPI" in line
        assert "Processes started on this host: 2 of 2" in done.err
    elif stage == "at the network":
        assert "start: network" in line
    else:
        assert line.startswith("[rank 1/2 ")
        said = done.err.partition("did not arrive:")[2]
        assert re.search(r"^  rank 1 \S+: start: .*script.py:\d+ in strike", said, re.M)


def test_a_rank_that_is_never_started_is_told(openmpi: Mpi, tmp_path: Path) -> None:
    """Its Python never comes to us; the others wait in MPI_Init."""
    (tmp_path / "time").write_text(str(time.time()))
    wrapper = tmp_path / "wrapper.sh"
    wrapper.write_text(
        '#!/bin/sh\n[ "$OMPI_COMM_WORLD_RANK" = 1 ] && exec sleep 1000\nexec "$@"\n'
    )
    wrapper.chmod(0o755)
    done = subprocess.run(
        [
            *("timeout", "-k", "5", "60", str(openmpi.mpirun), "-np", "2"),
            *(*openmpi.flags, str(wrapper), sys.executable),
            *("-m", "mpitrain", "--start-timeout", "5", "--device", "cpu"),
        ],
        cwd=tmp_path,
        env=environment(openmpi),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 76, done.stderr
    assert "hang: start: starting MPI" in done.stderr
    assert time.time() - float((tmp_path / "time").read_text()) < LIMIT + 15


def command_of(pid: int) -> str:
    """The words of a process; empty where it has ended."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


@pytest.mark.parametrize(
    ("mpi", "signal_number"),
    [
        *((name, signal.SIGKILL) for name in MPIS),
        ("openmpi-5", signal.SIGTERM),
        slow("openmpi-4.1", signal.SIGTERM),
        ("mpich", signal.SIGTERM),
    ],
    indirect=["mpi"],
)
def test_ranks_whose_launcher_is_gone_end_themselves(
    mpi: Mpi, signal_number: int, tmp_path: Path
) -> None:
    tail = TAIL.replace("LIMIT", "60") + "    time.sleep(1000)\n"
    script = HEAD.replace("FAULT", "pass") + tail
    (tmp_path / "script.py").write_text(script)
    job = subprocess.Popen(
        [*(str(mpi.mpirun), "-np", "2", *mpi.flags), sys.executable, "script.py"],
        cwd=tmp_path,
        env=environment(mpi),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        end = time.monotonic() + 60
        pids, beside = list[int](), list[int]()
        while len(beside) < 2:
            assert time.monotonic() < end
            time.sleep(0.1)
            pids = [int(file.read_text() or 0) for file in tmp_path.glob("pid-*")]
            # Imports may start what they want, for a moment; these are the sidecars.
            children = [pid for rank in pids for pid in children_of(rank)]
            beside = [pid for pid in children if "sidecar" in command_of(pid)]
        time.sleep(1)
        assert len(survivors(pids)) == 2
        os.kill(job.pid, signal_number)
        struck = time.monotonic()
        while survivors(pids + beside):
            assert time.monotonic() - struck < GONE_SECONDS
            time.sleep(0.1)
    finally:
        job.kill()
        job.wait()
