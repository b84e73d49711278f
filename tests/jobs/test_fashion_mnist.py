"""A data set that people use, whole: what the defaults reach on it."""

from __future__ import annotations

import json
from pathlib import Path

import fashion_mnist
import pytest
from launcher import Mpi, mpirun


@pytest.mark.slow
def test_five_epochs_of_the_default_network_reach_90_5_per_cent(
    openmpi: Mpi, tmp_path: Path
) -> None:
    fashion_mnist.published(tmp_path / "data/FashionMNIST/raw")
    flags = ("--data", "fashion-mnist", "--epochs", "5")
    flags += ("--global-batch-size", "256")
    done = mpirun(
        openmpi,
        2,
        *("-m", "mpitrain", "--name", "r", *flags),
        cwd=tmp_path,
        timeout_seconds=500,
    )
    assert done.status == 0, done.err
    assert "60000 samples to train, 10000 to validate, 10 classes" in done.out
    result = json.loads((tmp_path / "runs/r/result.json").read_text())
    assert result["val_accuracy"] >= 0.905
