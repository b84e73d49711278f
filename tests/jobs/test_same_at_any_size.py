"""The number of ranks changes the speed of a training, never its results."""

from __future__ import annotations

import json
from itertools import chain
from pathlib import Path

import pytest
from launcher import Mpi, mpirun, rows

# In CI sizes are compared by tests/mpi/test_trainer.py and test_data_sets.py.
pytestmark = pytest.mark.slow

SIZES = (1, 2, 3, 4, 8)


def runs(mpi: Mpi, tmp_path: Path, *flags: str) -> dict[int, Path]:
    for size in SIZES:
        done = mpirun(
            mpi,
            size,
            *("-m", "mpitrain", "--name", f"on-{size}", *flags),
            cwd=tmp_path,
            NOTES=str(tmp_path),
        )
        assert done.status == 0, done.err
    return {size: tmp_path / "runs" / f"on-{size}" for size in SIZES}


def test_in_float64_every_epoch_agrees_to_1e_9(mpi: Mpi, tmp_path: Path) -> None:
    flags = ("--precision", "fp64", "--epochs", "2")
    folders = runs(mpi, tmp_path, *flags)
    alone = rows(folders[1], "epoch")
    assert len(alone) == 2
    for size, folder in folders.items():
        for one, other in zip(alone, rows(folder, "epoch"), strict=True):
            for loss in ("train_loss", "val_loss"):
                assert other[loss] == pytest.approx(one[loss], rel=1e-9), size
            for exact in ("val_accuracy", "train_samples", "val_samples", "step"):
                assert other[exact] == one[exact], size
    assert {row["train_samples"] for row in alone} == {1437}
    assert {row["val_samples"] for row in alone} == {360}


def test_in_float32_the_first_20_steps_and_the_accuracy_agree(
    openmpi: Mpi, tmp_path: Path
) -> None:
    folders = runs(openmpi, tmp_path)
    alone = [row["train_loss"] for row in rows(folders[1], "step")][:20]
    accuracy = rows(folders[1], "epoch")[-1]["val_accuracy"]
    for size, folder in folders.items():
        losses = [row["train_loss"] for row in rows(folder, "step")][:20]
        assert losses == pytest.approx(alone, rel=1e-4), size
        found = rows(folder, "epoch")[-1]["val_accuracy"]
        assert found == pytest.approx(accuracy, abs=0.01), size
        assert found >= 0.97, size


def test_every_step_sees_the_same_samples_and_each_once(
    openmpi: Mpi, tmp_path: Path
) -> None:
    steps: dict[int, list[list[int]]] = {}
    for size in SIZES:
        notes = tmp_path / str(size)
        notes.mkdir()
        done = mpirun(
            openmpi,
            size,
            *("-m", "mpitrain", "--name", f"on-{size}", "--epochs", "2"),
            *("--data", "custom:noted_digits", "--model", "custom:Marking"),
            cwd=tmp_path,
            NOTES=str(notes),
        )
        assert done.status == 0, done.err
        of_ranks = [read_steps(notes / f"train-{rank}.jsonl") for rank in range(size)]
        steps[size] = [
            sorted(chain(*of_rank)) for of_rank in zip(*of_ranks, strict=True)
        ]
        validated = sorted(
            json.loads(line)
            for file in notes.glob("val-*.jsonl")
            for line in file.read_text().splitlines()[2:]  # two first looks, again
        )
        assert validated == sorted(list(range(360)) * 2)
    for epoch in (steps[1][:23], steps[1][23:]):
        assert sorted(chain(*epoch)) == list(range(1437))
    assert steps[1][:23] != steps[1][23:]
    for size in SIZES:
        assert steps[size] == steps[1], size


def read_steps(file: Path) -> list[list[int]]:
    """The samples that one rank trained on, step by step."""
    found: list[list[int]] = [[]]
    for line in file.read_text().splitlines()[2:]:  # the first looks are at the shape
        word = json.loads(line)
        if word == "step":
            found.append([])
        else:
            found[-1].append(word)
    return found[:-1]


def test_accumulation_does_not_change_the_result(openmpi: Mpi, tmp_path: Path) -> None:
    flags = ("--precision", "fp64", "--epochs", "3")
    cases = {"1": (1, ()), "2x3": (2, ("--micro-batch-size", "11")), "3x22": (3, ())}
    losses = {}
    for name, (size, more) in cases.items():
        done = mpirun(
            openmpi,
            size,
            *("-m", "mpitrain", "--name", name, *flags, *more),
            cwd=tmp_path,
        )
        assert done.status == 0, done.err
        losses[name] = [
            (row["train_loss"], row["val_loss"])
            for row in rows(tmp_path / "runs" / name, "epoch")
        ]
    for name in cases:
        assert sum(losses[name], ()) == pytest.approx(sum(losses["1"], ()), rel=1e-9)


def test_fewer_samples_than_ranks_are_each_seen_once(
    openmpi: Mpi, tmp_path: Path
) -> None:
    losses = {}
    for size in (1, 4, 8):
        done = mpirun(
            openmpi,
            size,
            *("-m", "mpitrain", "--name", f"on-{size}", "--data", "custom:few"),
            *("--epochs", "2", "--global-batch-size", "4", "--precision", "fp64"),
            cwd=tmp_path,
        )
        assert done.status == 0, done.err
        found = rows(tmp_path / "runs" / f"on-{size}", "epoch")
        assert [(row["train_samples"], row["val_samples"]) for row in found] == [
            (5, 3),
            (5, 3),
        ]
        losses[size] = [row["train_loss"] for row in found]
    assert losses[4] == pytest.approx(losses[1], rel=1e-9)
    assert losses[8] == pytest.approx(losses[1], rel=1e-9)
