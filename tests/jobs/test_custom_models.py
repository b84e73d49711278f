"""Models as people have them: with parts unused, batch norm, state of other kinds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from custom import Normed
from launcher import Mpi, mpirun

from mpitrain.tasks.image_classification.datasets.named import InMemory, digits


@pytest.mark.slow
@pytest.mark.parametrize("flags", [("--dry-run",), ("--epochs", "2")])
def test_weights_that_take_no_part_do_not_spoil_the_others(
    openmpi: Mpi, flags: tuple[str, ...], tmp_path: Path
) -> None:
    losses = {}
    for size in (1, 2, 3):
        done = mpirun(
            openmpi,
            size,
            *("-m", "mpitrain", "--name", f"on-{size}", "--model", "custom:Partly"),
            *("--precision", "fp64", *flags),
            cwd=tmp_path,
        )
        assert done.status == 0, done.err
        assert "find_unused_parameters" not in done.out + done.err
        (run,) = (tmp_path / "runs").glob(f"on-{size}*")
        losses[size] = json.loads((run / "result.json").read_text())["val_loss"]
        state = torch.load(run / "model.pt", weights_only=True)
        assert state["_extra_state"] == {"version": 3}
        assert (tmp_path / f"notes-{size - 1}").read_text() == "written"
    assert losses[2] == pytest.approx(losses[1], rel=1e-9)
    assert losses[3] == pytest.approx(losses[1], rel=1e-9)


def test_what_is_evaluated_is_the_model_that_is_saved(
    openmpi: Mpi, tmp_path: Path
) -> None:
    done = mpirun(
        openmpi,
        2,
        *("-m", "mpitrain", "--name", "r", "--model", "custom:Normed"),
        *("--precision", "fp64", "--epochs", "2"),
        cwd=tmp_path,
    )
    assert done.status == 0, done.err
    assert "find_unused_parameters" not in done.out + done.err  # a warning of DDP's
    result = json.loads((tmp_path / "runs/r/result.json").read_text())
    model = Normed(num_classes=10, in_channels=1, image_size=8).double()
    model.load_state_dict(torch.load(tmp_path / "runs/r/model.pt", weights_only=True))
    model.eval()
    samples = digits().val
    assert isinstance(samples, InMemory)
    with torch.no_grad():
        scores = model(samples.inputs.double())
    loss = F.cross_entropy(scores, samples.targets).item()
    assert result["val_loss"] == pytest.approx(loss, rel=1e-9)
    correct = (scores.argmax(1) == samples.targets).sum().item()
    assert result["val_accuracy"] == correct / 360
