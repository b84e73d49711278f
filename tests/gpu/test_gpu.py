"""What needs a GPU: ``make test-gpu``. Whole jobs, since CUDA starts but once."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from launcher import find, mpirun

NO_GPU = "torch sees no GPU here"

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason=NO_GPU)


def result(folder: Path, name: str) -> dict:
    return json.loads((folder / "runs" / name / "result.json").read_text())


def losses(folder: Path, name: str) -> list[float]:
    lines = (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()
    rows = [json.loads(line) for line in lines]
    return [row["train_loss"] for row in rows if row["event"] == "epoch"]


@pytest.mark.parametrize("num_ranks", [1, 8])
def test_ranks_on_one_gpu_train_as_on_the_cpu(num_ranks: int, tmp_path: Path) -> None:
    flags = ("--precision", "fp64", "--epochs", "3")
    for device in ("cpu", "cuda"):
        done = mpirun(
            find("openmpi-5"),
            num_ranks,
            *("-m", "mpitrain", "--name", device, "--device", device, *flags),
            cwd=tmp_path,
            CUDA_VISIBLE_DEVICES="0",
        )
        assert done.status == 0, done.err
    assert result(tmp_path, "cuda")["status"] == "finished"
    backend = "cpu:gloo,cuda:nccl" if num_ranks == 1 else "gloo"
    assert result(tmp_path, "cuda")["backend"] == backend
    assert losses(tmp_path, "cuda") == pytest.approx(losses(tmp_path, "cpu"), rel=1e-7)


def test_a_gpu_for_each_rank_uses_nccl(tmp_path: Path) -> None:
    num_gpus = torch.cuda.device_count()
    if num_gpus < 2:
        pytest.skip(f"{num_gpus} GPU here, two are needed: a matter of the GPU")
    done = mpirun(
        find("openmpi-5"),
        num_gpus,
        *("-m", "mpitrain", "--name", "r"),
        cwd=tmp_path,
    )
    assert done.status == 0, done.err
    assert result(tmp_path, "r")["backend"] == "cpu:gloo,cuda:nccl"


def test_the_gpus_of_this_machine_have_names_of_their_own() -> None:
    seen = subprocess.run(
        [
            sys.executable,
            "-c",
            "from mpitrain.launch.devices import visible_gpus; print(*visible_gpus())",
        ],
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    assert len(seen) == len(set(seen)) == torch.cuda.device_count()
