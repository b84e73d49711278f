"""`sbatch slurm/demo.sh`, the script as it is."""

from __future__ import annotations

from pathlib import Path

from .runs import assert_finished
from .slurm import Slurm

TIMEOUT_SECONDS = 240


def test_sbatch_of_the_demo_script_trains_on_two_nodes(
    slurm: Slurm, folder: Path
) -> None:
    job = slurm.sbatch("slurm/demo.sh", cwd=folder, timeout_seconds=TIMEOUT_SECONDS)
    assert job.exit_code == "0:0", job.output
    assert_finished(folder, job.output, hosts=["node1", "node2"], world_size=8)


def test_words_after_the_script_of_sbatch_go_to_mpitrain(
    slurm: Slurm, folder: Path
) -> None:
    words = ["--nodes=1", "--ntasks-per-node=1", "slurm/demo.sh", "--help"]
    job = slurm.sbatch(*words, cwd=folder, timeout_seconds=TIMEOUT_SECONDS)
    assert job.exit_code == "0:0", job.output
    assert "--epochs" in job.output
