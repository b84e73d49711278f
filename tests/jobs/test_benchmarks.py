"""The benchmarks run, at their smallest; figures are for a quiet machine."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from launcher import ROOT, Mpi, environment, mpirun

TIMEOUT_SECONDS = 300


def run(tmp_path: Path, name: str, *words: str) -> tuple[str, dict[str, Any]]:
    """Run a benchmark; return what it prints, and its figures."""
    file = tmp_path / "figures.json"
    done = subprocess.run(
        [sys.executable, str(ROOT / "benchmarks" / name), *words, "--json", str(file)],
        cwd=tmp_path,
        env=environment(),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(file.read_text())
    told = {"date", "command", "cores", "versions", "load_before", "load_after"}
    assert told <= report.keys()
    assert report["command"] == f"benchmarks/{name} {' '.join(words)}"
    return done.stdout, report


def check(found: dict[str, Any]) -> None:
    low, high = found["range"]
    assert 0 < low <= found["quartiles"][0] <= found["median"]
    assert found["median"] <= found["quartiles"][1] <= high


@pytest.mark.slow
def test_the_loop_beside_one_by_hand(tmp_path: Path) -> None:
    out, report = run(tmp_path, "loop.py", "--batch-sizes", "64", "--epochs", "2")
    (row,) = report["rows"]
    assert (row["batch_size"], row["steps_per_epoch"]) == (64, 23)
    assert row["losses_differ_by"] < 1e-6
    for name in ("the same by hand", "bare"):
        ratio = row[f"ratio to {name}"]
        check(ratio["steps"])
        check(ratio["epochs"])
        assert f"ratio of steps {ratio['steps']['median']:.3f}" in out


@pytest.mark.slow
def test_the_in_memory_road_beside_torchvision(tmp_path: Path) -> None:
    words = ("--samples", "120", "--batch-sizes", "64", "--rounds", "1")
    out, report = run(tmp_path, "in_memory.py", *words)
    assert [row["images"] for row in report["rows"]] == [
        "as they are",
        "cropped and mirrored",
    ]
    for row in report["rows"]:
        assert list(row["samples_per_second"]) == [
            "ours",
            *(f"torchvision, {n} workers" for n in range(3)),
        ]
        check(row["ratio"])
        assert f"ratio {row['ratio']['median']:.1f}" in out


@pytest.mark.slow
def test_a_checkpoint_s_stall_beside_a_synchronous_one(tmp_path: Path) -> None:
    words = ("--millions", "2", "--rounds", "2")
    out, report = run(tmp_path, "checkpoints.py", *words)
    check(report["stall_seconds"])
    check(report["synchronous_seconds"])
    assert report["parameters"] == 2 << 20
    assert f"ratio {report['stall to synchronous']:.3f}" in out
    assert report["agreement_microseconds_per_step"] > 0


@pytest.mark.slow
def test_what_recording_costs(openmpi: Mpi, tmp_path: Path) -> None:
    script, file = ROOT / "benchmarks/recording.py", tmp_path / "figures.json"
    words = (str(script), "--rounds", "10", "--json", str(file))
    done = mpirun(openmpi, 2, *words, cwd=tmp_path)
    assert done.status == 0, done.out + done.err
    report = json.loads(file.read_text())
    assert report["world_size"] == 2
    check(report["ratio"])
    assert f"= {report['ratio']['median']:.4f} (quartiles" in done.out
