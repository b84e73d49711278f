"""The model comes out of a run on a machine without MPI, whatever ranks wrote it."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_files import idx_bytes
from export_jobs import export
from launcher import Mpi, mpirun

pytestmark = pytest.mark.xdist_group("export")  # a fixture that trains, once

FLAGS = ("--epochs", "2", "--ema-decay", "0.9", "--device", "cpu")


@pytest.fixture(scope="module")
def folder(openmpi: Mpi, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of 3 ranks that shared the weights."""
    made = tmp_path_factory.mktemp("export")
    words = ("-m", "mpitrain", "--name", "a", *FLAGS, "--strategy", "fsdp")
    done = mpirun(openmpi, 3, *words, cwd=made)
    assert done.status == 0, done.out + done.err
    return made


@pytest.mark.slow
def test_a_state_dict_is_the_model_that_was_judged(folder: Path) -> None:
    done = export(folder, "runs/a", "out.pt")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("out.pt: state_dict of 25,730 numbers in 8 tensors")
    found, expected = (
        torch.load(folder / name, weights_only=True)
        for name in ("out.pt", "runs/a/model.pt")
    )
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    plain = export(folder, "runs/a", "plain.pt", "--no-average", "--best")
    assert plain.returncode == 0
    weights = torch.load(folder / "plain.pt", weights_only=True)
    assert not torch.equal(weights[name], tensor)


def test_it_is_weights_for_another_training(folder: Path, openmpi: Mpi) -> None:
    assert export(folder, "runs/a", "w.safetensors", "--format", "safetensors")
    words = ("-m", "mpitrain", "--weights", "w.safetensors", "--dry-run")
    done = mpirun(openmpi, 1, *words, "--name", "b", cwd=folder)
    assert done.status == 0, done.out + done.err
    assert "weights from w.safetensors: 8 tensors" in done.out


@pytest.mark.parametrize("kind", ["torchscript", "exported-program"])
def test_a_program_computes_what_the_model_does(kind: str, folder: Path) -> None:
    done = export(folder, "runs/a", "program.pt2", "--format", kind)
    assert done.returncode == 0, done.stderr
    from mpitrain.models.build import build_model

    model = build_model("convnet", num_classes=10, in_channels=1, image_size=8, seed=1)
    model.load_state_dict(torch.load(folder / "runs/a/model.pt", weights_only=True))
    inputs = torch.rand(5, 1, 8, 8)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        if kind == "torchscript":
            program = torch.jit.load(folder / "program.pt2")
        else:
            program = torch.export.load(folder / "program.pt2").module()
        assert torch.allclose(program(inputs), model.eval()(inputs), atol=1e-6)


def test_a_broken_checkpoint_is_told_and_the_one_before_taken(folder: Path) -> None:
    newest = max((folder / "runs/a/checkpoints").glob("step-*"))
    file = newest / "rank-1.bin"
    whole = file.read_bytes()
    try:
        os.truncate(file, len(whole) - 1)
        done = export(folder, "runs/a", "older.pt")
        told = f"warning: checkpoint {newest} is broken: rank-1.bin"
        assert told in done.stdout
        assert done.returncode == (0 if len(list(newest.parent.iterdir())) > 1 else 2)
        done = export(folder, str(newest.relative_to(folder)), "none.pt")
        assert done.returncode == 1
        assert "rank-1.bin has other bytes" in done.stderr
        assert not (folder / "none.pt").exists()
    finally:
        file.write_bytes(whole)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("nowhere", "x.pt"), "nowhere is no checkpoint"),
        (("runs", "x.pt"), "runs is no checkpoint"),
        (("runs/a", "runs"), "runs cannot be written"),
        (("runs/a", "nowhere/x.pt"), "cannot be written"),
    ],
)
def test_what_cannot_be_done_is_told(
    words: tuple[str, ...], told: str, folder: Path
) -> None:
    done = export(folder, *words)
    assert done.returncode in (1, 2)
    assert told in done.stderr
    assert "Traceback" not in done.stderr


@pytest.fixture(scope="module")
def bright(openmpi: Mpi, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of IDX files whose mean is far from a half."""
    made = tmp_path_factory.mktemp("bright")
    raw = made / "MNIST/raw"
    raw.mkdir(parents=True)
    random = np.random.default_rng(0)
    for part, num in (("train", 400), ("t10k", 100)):
        labels = np.arange(num) % 10
        images = random.integers(200, 216, (num, 12, 12))
        for image, label in zip(images, labels, strict=True):
            image[label : label + 3] += 12
        for name, array in (("images-idx3", images), ("labels-idx1", labels)):
            (raw / f"{part}-{name}-ubyte").write_bytes(idx_bytes(array))
        np.savez(made / f"{part}.npz", images=images, labels=labels)
    words = ("--data", "mnist", "--data-dir", ".", "--epochs", "6", "--device", "cpu")
    done = mpirun(openmpi, 2, "-m", "mpitrain", "--name", "a", *words, cwd=made)
    assert done.status == 0, done.out + done.err
    return made


@pytest.mark.parametrize("kind", ["state_dict", "torchscript", "exported-program"])
def test_what_is_exported_gives_the_accuracy_of_the_run_in_plain_torch(
    kind: str, bright: Path
) -> None:
    words = ("--normalize",) if kind != "state_dict" else ()
    done = export(bright, "runs/a", "out", "--format", kind, *words)
    assert done.returncode == 0, done.stderr
    inputs = json.loads((bright / "runs/a/inputs.json").read_text())
    assert f"normalized by mean {inputs['mean']}, std {inputs['std']}" in done.stdout
    assert f"classes: {', '.join(inputs['classes'])}" in done.stdout
    with np.load(bright / "t10k.npz") as arrays:
        images = torch.from_numpy(arrays["images"])[:, None].float() / 255
        labels = torch.from_numpy(arrays["labels"])
    if kind == "state_dict":
        from mpitrain.models.build import build_model

        sizes: dict[str, Any] = {"num_classes": 10, "in_channels": 1, "image_size": 12}
        model = build_model("convnet", seed=1, **sizes)
        model.load_state_dict(torch.load(bright / "out", weights_only=True))
        (mean,), (std,) = inputs["mean"], inputs["std"]
        images = (images - mean) / std
    elif kind == "torchscript":
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            model = torch.jit.load(bright / "out")
    else:
        model = torch.export.load(bright / "out").module()
    with torch.no_grad():
        found = (model(images).argmax(1) == labels).double().mean().item()
    result = json.loads((bright / "runs/a/result.json").read_text())
    assert found == pytest.approx(result["val_accuracy"])
    assert found > 0.5


def test_a_normalization_has_no_place_among_weights(folder: Path, bright: Path) -> None:
    for place, kind in ((bright, "state_dict"), (folder, "torchscript")):
        done = export(place, "runs/a", "x", "--normalize", "--format", kind)
        assert done.returncode == 2
        assert "--normalize: found" in done.stderr
