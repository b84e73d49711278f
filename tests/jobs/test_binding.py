"""The cores that ranks get, under each MPI, as it binds and as the user asked."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from launcher import Mpi, environment, slow, under_each_mpi

from mpitrain.launch import cpu

SHOW = """
import json, os, sys
import mpitrain
from mpitrain.launch.init import prepare_without_torch
from mpitrain.launch.job import start_job

def show(world, num_threads):
    masks = {len(os.sched_getaffinity(int(t))) for t in os.listdir("/proc/self/task")}
    print(json.dumps([sorted(masks), world.num_cores, num_threads]), flush=True)

if "torch" in sys.argv:
    with mpitrain.init(device="cpu") as world:
        import torch
        show(world, torch.get_num_threads())
else:  # the cores of a rank are its own before torch is imported
    job = start_job()
    with job.guard:
        config = mpitrain.config.LaunchConfig()
        world, *_ = prepare_without_torch(job, config, 60.0, os.environ)
        show(world, world.num_threads)
"""

MASK = frozenset(os.sched_getaffinity(0))
NUM_CORES = cpu.count_cores([MASK], cpu.cpu_quota())

pytestmark = pytest.mark.skipif(
    len(MASK) <= cpu.hardware_threads_per_core(), reason="this machine has one core"
)


def show(
    mpi: Mpi, *flags: str, before: tuple[str, ...] = (), torch: bool = False
) -> tuple:
    """Start one rank; the flags are mpirun's."""
    isolated = [f for f in mpi.flags if f != "--oversubscribe"]
    done = subprocess.run(
        [
            *("timeout", "-k", "10", "120", *before, str(mpi.mpirun), "-np", "1"),
            *(*isolated, *flags, sys.executable, "-c", SHOW, *["torch"] * torch),
        ],
        env=environment(mpi),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return (*json.loads(done.stdout), done.stderr)


@under_each_mpi
@pytest.mark.parametrize("flags", [(), slow(("--bind-to", "core"))])
def test_one_core_of_several_is_said_once(mpi: Mpi, flags: tuple[str, ...]) -> None:
    """Open MPI binds one or two ranks to a core each by default; MPICH nobody."""
    masks, num_cores, num_threads, said = show(
        mpi, *flags, torch=mpi.name == "openmpi-5"
    )
    is_bound = masks[0] < len(MASK)
    assert is_bound or not flags
    assert num_cores == num_threads == min(masks[0], NUM_CORES)
    assert said.count("each rank is bound to one core") == is_bound
    option = "-bind-to none" if mpi.name == "mpich" else "--bind-to none"
    assert (f"mpirun {option}" in said) == is_bound


@under_each_mpi
def test_no_binding_that_was_asked_for_stays(mpi: Mpi) -> None:
    masks, num_cores, _, said = show(mpi, "--bind-to", "none")
    assert (masks, num_cores) == ([len(MASK)], NUM_CORES)
    assert "bound" not in said


def test_cores_that_the_job_was_not_given_are_not_taken(mpi: Mpi) -> None:
    core = str(min(os.sched_getaffinity(0)))
    masks, num_cores, _, said = show(mpi, before=("taskset", "-c", core))
    assert (masks, num_cores) == ([1], 1)
    assert "bound" not in said


@pytest.mark.parametrize("asks", [True, slow(False)])
def test_threads_that_the_job_asked_pbs_for_are_kept_and_those_of_a_chunk_are_shared(
    asks: bool, openmpi: Mpi, tmp_path: Path
) -> None:
    nodefile = tmp_path / "nodefile"
    nodefile.write_text("localhost\nlocalhost\n")
    chunk = f"1:ncpus=8:mpiprocs=2{':ompthreads=8' * asks}"
    (tmp_path / "qstat").write_text(
        f"#!/bin/sh\necho ' Resource_List.select = {chunk}'\n"
    )
    (tmp_path / "qstat").chmod(0o755)
    number = 4 * NUM_CORES
    pbs = {"PBS_JOBID": "7.head", "NCPUS": str(number), "OMP_NUM_THREADS": str(number)}
    path = f"{tmp_path}:{os.environ['PATH']}"
    done = subprocess.run(
        [
            *("timeout", "-k", "10", "120", str(openmpi.mpirun), "-np", "2"),
            *("--oversubscribe", "--host", "localhost:2", sys.executable, "-c", SHOW),
        ],
        env=environment(openmpi, PBS_NODEFILE=str(nodefile), PATH=path, **pbs),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    threads = [json.loads(line)[2] for line in done.stdout.splitlines()]
    assert threads == [number if asks else max(1, NUM_CORES // 2)] * 2
    warning = f"OMP_NUM_THREADS={number}, set by PBS, is more"
    assert done.stderr.count(warning) == (not asks)
