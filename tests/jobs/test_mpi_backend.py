"""The mpi4py backend as whole jobs: in any script, and where things go wrong."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest
from launcher import Mpi, mpirun, slow

PLAIN = """
import os
import torch, torch.distributed as dist

os.environ.setdefault("RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0"))
dist.init_process_group("mpi4py")
total = torch.ones(3)
dist.all_reduce(total)
print(f"rank {dist.get_rank()} by {dist.get_backend()}: {total.tolist()}")
dist.destroy_process_group()
"""

COMPARED = """
import os
import mpitrain, torch, torch.distributed as dist
from mpitrain.backend import shared_buffer

if ALONE:  # MPI carries bytes and compares nothing
    shared_buffer._machine_id = lambda: (str(os.getpid()),)
with mpitrain.init(device="cpu") as world:
    dist.all_reduce(torch.ones(4))
    dist.all_reduce(torch.ones(5 if world.rank == 0 else 4))
"""

BESIDE_GLOO = """
import mpitrain, torch, torch.distributed as dist

with mpitrain.init(device="cpu", backend="gloo") as world:
    ours = dist.new_group(backend="mpi4py")
    some = dist.new_group([1], backend="mpi4py")
    total = torch.ones(3)
    dist.all_reduce(total, group=ours)
    if world.rank == 1:
        dist.all_reduce(total, group=some)
    print(f"rank {world.rank}: {total.tolist()}")
"""

LEAVES = """
import sys, time
import mpitrain, torch, torch.distributed as dist

with mpitrain.init(device="cpu") as world:
    other = dist.new_group(backend="mpi4py")
    if world.rank == 1:
        time.sleep(100)
    works = [dist.all_reduce(torch.ones(3), async_op=True) for _ in range(3)]
    works.append(dist.isend(torch.ones(10_000_000), 1, group=other))
    try:
        if sys.argv[1] == "raise":
            raise ValueError("in the middle")
        sys.exit(3)
    finally:
        dist.destroy_process_group()
"""


def test_torch_finds_it_by_its_name(openmpi: Mpi, tmp_path: Path) -> None:
    """Without a word of ours in the script."""
    (tmp_path / "script.py").write_text(PLAIN)
    done = mpirun(
        openmpi,
        *(2, "script.py"),
        cwd=tmp_path,
        WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT="29519",
    )
    assert done.status == 0, done.err
    for rank in range(2):
        assert f"rank {rank} by mpi4py: [2.0, 2.0, 2.0]" in done.out


@pytest.mark.slow  # tests/mpi/test_group_failures.py has the message
def test_under_torchrun_it_says_that_mpi_knows_one_process(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(PLAIN)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    done = subprocess.run(
        [*command, "--nproc-per-node", "2", "script.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode != 0
    assert "was told of 2 ranks, MPI knows 1" in done.stderr


def test_it_stands_beside_gloo(openmpi: Mpi, tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(BESIDE_GLOO)
    done = mpirun(openmpi, 2, "script.py", cwd=tmp_path)
    assert done.status == 0, done.err
    for rank in range(2):
        assert f"rank {rank}: [2.0, 2.0, 2.0]" in done.out


@pytest.mark.parametrize("is_alone", [slow(False), True], ids=["shared", "alone"])
def test_torch_compares_what_ranks_do_where_it_is_told_to(
    openmpi: Mpi, tmp_path: Path, is_alone: bool
) -> None:
    (tmp_path / "script.py").write_text(COMPARED.replace("ALONE", str(is_alone)))
    debug = {"TORCH_DISTRIBUTED_DEBUG": "DETAIL"}
    done = mpirun(openmpi, 2, "script.py", cwd=tmp_path, **debug)
    assert done.status == 1, done.err
    assert "mismatch between collectives on ranks. Rank" in done.err
    assert "TensorShape=[5]" in done.err


@pytest.mark.parametrize(("way", "status"), [("raise", 1), slow("exit", 3)])
def test_a_rank_that_fails_does_not_wait_for_what_it_asked_for(
    mpi: Mpi, tmp_path: Path, way: str, status: int
) -> None:
    """Others will never come to its collectives, nor to its message."""
    (tmp_path / "script.py").write_text(LEAVES)
    started = time.monotonic()
    done = mpirun(mpi, 2, "script.py", way, cwd=tmp_path)
    assert done.status == status, done.err
    assert time.monotonic() - started < 40
    assert "[rank 0/2 " in done.err
