"""A hundred and twenty-eight ranks on one machine: light ones, without torch."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from launcher import Mpi, mpirun

NUM_RANKS = 128

SCRIPT = """
import json, os, sys, time
from pathlib import Path
from mpitrain.launch import init
from mpitrain.config import LaunchConfig
from mpitrain.launch.job import start_job
from mpitrain.mpi.collectives import barrier

job = start_job(start_timeout_seconds=60)
with job.guard:
    config = LaunchConfig()
    world, *_ = init.prepare_without_torch(job, config, 60.0, os.environ)
    taken = job.comm.gather(job.start_seconds)
    if world.rank == 0:
        slowest = {name: max(s[name] for s in taken) for name in taken[0]}
        Path("stages.json").write_text(json.dumps(slowest))
    job.watchdog.start_timeout_seconds = 4.0
    with job.start_step("a late rank"):
        if world.rank == 41 and sys.argv[1] == "late":
            time.sleep(1000)
        barrier(job.comm)
"""


@pytest.mark.slow
@pytest.mark.parametrize("mpi", ["openmpi-5", "mpich"], indirect=True)
def test_many_ranks_meet_and_the_late_one_is_named(mpi: Mpi, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = mpirun(mpi, NUM_RANKS, "script.py", "late", cwd=tmp_path)
    assert done.status == 76, done.err
    (line,) = done.ours
    assert line.startswith(f"[rank 41/{NUM_RANKS} ")
    said = done.out + done.err
    assert "start: a late rank" in said.partition("did not arrive:")[2]
    assert "ranks 0-40,42-127 " in said.partition("waiting for them:")[2]
    stages = json.loads((tmp_path / "stages.json").read_text())
    print({name: round(seconds, 3) for name, seconds in stages.items()})
    names = ["starting MPI", "who is where", "network", "watchdog", "threads"]
    assert list(stages) == names


@pytest.mark.slow
def test_many_ranks_end_well(openmpi: Mpi, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = mpirun(openmpi, NUM_RANKS, "script.py", "in time", cwd=tmp_path)
    assert done.status == 0, done.err
    assert done.err == ""
