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
from launcher import Mpi, mpirun, slow

from mpitrain.checkpoint.format import BrokenCheckpoint
from mpitrain.errors import DataError, UsageError
from mpitrain.tools.export import ExportConfig
from mpitrain.tools.export import export as write_model

pytestmark = [
    pytest.mark.xdist_group("export"),  # a fixture that trains, once
    pytest.mark.usefixtures("warm_starts"),
]

FLAGS = ("--epochs", "2", "--ema-decay", "0.9", "--device", "cpu")


@pytest.fixture(scope="module")
def folder(openmpi: Mpi, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a run of 3 ranks that shared the weights."""
    made = tmp_path_factory.mktemp("export")
    words = ("-m", "mpitrain", "--name", "a", *FLAGS, "--strategy", "fsdp")
    done = mpirun(openmpi, 3, *words, cwd=made)
    assert done.status == 0, done.out + done.err
    return made


def test_a_state_dict_is_the_model_that_was_judged(folder: Path) -> None:
    run, out, plain = folder / "runs/a", folder / "out.pt", folder / "plain.pt"
    said = write_model(ExportConfig(run=run, output=out))
    assert said.startswith(f"{out}: state_dict of 25,730 numbers in 8 tensors")
    found, expected = (
        torch.load(file, weights_only=True) for file in (out, run / "model.pt")
    )
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name
    write_model(ExportConfig(run=run, output=plain, average=False, best=True))
    weights = torch.load(plain, weights_only=True)
    assert not torch.equal(weights[name], tensor)


def test_it_is_weights_for_another_training(folder: Path, openmpi: Mpi) -> None:
    file = folder / "w.safetensors"
    write_model(ExportConfig(run=folder / "runs/a", output=file, format="safetensors"))
    words = ("-m", "mpitrain", "--weights", "w.safetensors", "--dry-run")
    done = mpirun(openmpi, 1, *words, "--name", "b", cwd=folder)
    assert done.status == 0, done.out + done.err
    assert "weights from w.safetensors: 8 tensors" in done.out


@pytest.mark.parametrize("kind", ["torchscript", slow("exported-program")])
def test_a_program_computes_what_the_model_does(kind: str, folder: Path) -> None:
    file = folder / "program.pt2"
    write_model(ExportConfig(run=folder / "runs/a", output=file, format=kind))  # type: ignore[arg-type]
    from mpitrain.models.build import build_model

    model = build_model("convnet", num_classes=10, in_channels=1, image_size=8, seed=1)
    model.load_state_dict(torch.load(folder / "runs/a/model.pt", weights_only=True))
    inputs = torch.rand(5, 1, 8, 8)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        if kind == "torchscript":
            program = torch.jit.load(file)
        else:
            program = torch.export.load(file).module()
        assert torch.allclose(program(inputs), model.eval()(inputs), atol=1e-6)


def test_a_broken_checkpoint_is_told_and_the_one_before_taken(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)
    *older, newest = sorted(Path("runs/a/checkpoints").glob("step-*"))
    file = newest / "rank-1.bin"
    whole = file.read_bytes()
    try:
        os.truncate(file, len(whole) - 1)
        config = ExportConfig(run=Path("runs/a"), output=Path("older.pt"))
        assert str(older[-1]) in write_model(config)
        told = f"warning: checkpoint {newest.absolute()} is broken: rank-1.bin"
        assert told in capsys.readouterr().out
        with pytest.raises(BrokenCheckpoint, match=r"rank-1.bin has other bytes"):
            write_model(ExportConfig(run=newest, output=Path("none.pt")))
        assert not Path("none.pt").exists()
    finally:
        file.write_bytes(whole)


@pytest.mark.parametrize(
    ("run", "output", "told"),
    [
        ("nowhere", "x.pt", "nowhere is no checkpoint"),
        ("runs", "x.pt", "runs is no checkpoint"),
        ("runs/a", "runs", "runs cannot be written"),
        ("runs/a", "nowhere/x.pt", "cannot be written"),
    ],
)
def test_what_cannot_be_done_is_told(
    run: str, output: str, told: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(folder)
    with pytest.raises((UsageError, DataError), match=told):
        write_model(ExportConfig(run=Path(run), output=Path(output)))


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
        config = ExportConfig(
            run=place / "runs/a", output=place / "x", normalize=True, format=kind
        )
        with pytest.raises(UsageError, match="--normalize: found"):
            write_model(config)
