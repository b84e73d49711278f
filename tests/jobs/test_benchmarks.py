"""The benchmarks run, at their smallest; figures are for a quiet machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from launcher import ROOT, Mpi, environment

BENCHMARKS = {
    "checkpoints.py": "--millions 2 --rounds 2 --json out.json",
    "in_memory.py": "--samples 120 --batch-sizes 64 --rounds 1 --json out.json",
    "jpeg.py": "--images 24 --image-size 64 --batch-size 8 --rounds 1 --json out.json",
    "loop.py": "--batch-sizes 64 --epochs 2 --json out.json",
    "recording.py": "--rounds 10 --json out.json",
    "scaling.py": "--ranks 1 2 --strategies ddp fsdp --rounds 1 --output out.json",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_benchmark_writes_its_figures(
    name: str, openmpi: Mpi, tmp_path: Path
) -> None:
    words = [sys.executable, str(ROOT / "benchmarks" / name), *BENCHMARKS[name].split()]
    mpirun = [str(openmpi.mpirun), *openmpi.flags]
    if name == "recording.py":
        words = [*mpirun, "-np", "2", *words]
    elif name == "scaling.py":
        words += ["--mpirun", " ".join(mpirun)]
    done = subprocess.run(
        words,
        cwd=tmp_path,
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert json.loads((tmp_path / "out.json").read_text())
