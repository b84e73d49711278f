"""`benchmarks/scaling.py` as a user runs it: real trainings and figures."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from launcher import Mpi, environment

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "scaling.py"
SCALING = (sys.executable, str(SCRIPT))


def bench(mpi: Mpi, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["timeout", "-k", "5", "240", *SCALING, "--mpirun", str(mpi.mpirun), *words],
        cwd=folder,
        env=environment(mpi),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )


@pytest.mark.slow
def test_every_row_is_the_same_training(openmpi: Mpi, tmp_path: Path) -> None:
    own = ("--mpirun", f"{openmpi.mpirun} --oversubscribe", "--output", "out.json")
    size = ("--ranks", "1", "3", "--strategies", "ddp", "fsdp", "--rounds", "1")
    done = bench(openmpi, tmp_path, *own, *size, "--", "--precision", "fp64")
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "out.json").read_text())
    names = [(row["num_ranks"], row["strategy"]) for row in report["rows"]]
    assert names == [(1, "single"), (3, "ddp"), (3, "fsdp")]
    losses = [row["last_train_loss"] for row in report["rows"]]
    assert losses == pytest.approx([losses[0]] * 3, rel=1e-9)
    for row in report["rows"]:
        assert len(row["step_seconds"]) == len(row["samples_per_second"]) == 1
        assert all(0 <= share < 1 for share in row["communication_share"])
        expected = [row["global_batch_size"] / it for it in row["step_seconds"]]
        # The last step of an epoch is smaller.
        assert row["samples_per_second"] == pytest.approx(expected, rel=0.05)
    table = done.stdout.splitlines()
    assert len(table) == 2 + 3
    assert "| 1.00 |" in " ".join(table[2].split())
    assert [it.name for it in tmp_path.iterdir()] == ["out.json"]


def test_a_training_that_fails_is_shown(openmpi: Mpi, tmp_path: Path) -> None:
    words = ("--ranks", "1", "--", "--data", "folder", "--data-dir", "nowhere")
    done = bench(openmpi, tmp_path, *words)
    assert done.returncode == 1
    assert "nowhere" in done.stderr
    assert "ended with 1:" in done.stderr
