"""``--profile`` leaves traces and a table of every rank that others can read."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from launcher import Mpi, mpirun

pytestmark = pytest.mark.usefixtures("warm_starts")


def test_each_rank_leaves_a_trace_of_its_steps(openmpi: Mpi, tmp_path: Path) -> None:
    words = ("-m", "mpitrain", "--name", "a", "--epochs", "1", "--profile", "4")
    done = mpirun(openmpi, 2, *words, cwd=tmp_path)
    assert done.status == 0, done.err
    assert not done.err.strip(), "somebody else speaks, too"
    folder = tmp_path / "runs" / "a" / "profile"
    for rank in range(2):
        with gzip.open(folder / f"rank-{rank}.json.gz", "rt") as file:
            trace = json.load(file)
        assert trace["distributedInfo"]["rank"] == rank
        names = [event.get("name", "") for event in trace["traceEvents"]]
        assert sum(name.startswith("Optimizer.step#") for name in names) == 4
        assert "Optimizer.step" in (folder / f"rank-{rank}.txt").read_text()
    assert "4 steps traced: runs/a/profile/rank-*.json.gz" in done.out


@pytest.mark.parametrize("num_steps", [5, pytest.param(4, marks=pytest.mark.slow)])
def test_a_training_that_is_too_short_says_so(
    openmpi: Mpi, tmp_path: Path, num_steps: int
) -> None:
    """Also one that ends where the first step would begin that is traced."""
    size = ("--global-batch-size", str(-(-1437 // num_steps)))  # of the digits
    words = ("-m", "mpitrain", "--name", "a", *size, "--epochs", "1", "--profile", "4")
    done = mpirun(openmpi, 2, *words, cwd=tmp_path)
    assert done.status == 0, done.err
    assert f"{num_steps} steps = 1 epoch" in done.out
    assert done.err.count("--profile 4: nothing is traced") == 1
    assert (tmp_path / "runs" / "a" / "model.pt").exists()
    assert not (tmp_path / "runs" / "a" / "profile").exists()
