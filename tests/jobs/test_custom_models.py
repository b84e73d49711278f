"""Models as people have them: with parts unused, batch norm, state of other kinds."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from launcher import Mpi, mpirun


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
