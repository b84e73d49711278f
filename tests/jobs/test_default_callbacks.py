"""A script with the callbacks of the command has what a run of the command has."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from launcher import ROOT, Mpi, mpirun

from mpitrain.cli import main

pytestmark = pytest.mark.usefixtures("warm_starts")

SCRIPT = """
import sys
sys.path.append({path!r})
import dataclasses
import mpitrain
import own_tasks
import torch

config = dataclasses.replace(
    own_tasks.DEFAULTS, log_every_steps=1,
    launch=mpitrain.LaunchConfig(device="cpu", hang_timeout=60),
)

class Mine(mpitrain.Callback):
    def on_step_end(self, trainer):
        if trainer.state.step == 3:
            trainer.log_images("mine/noise", torch.rand(2, 3, 4, 5))

torch.manual_seed(config.seed)
trainer = own_tasks.build(config)
trainer.callbacks = [
    *mpitrain.default_callbacks(
        "runs/script", config, log=["csv", "tensorboard"], profile=2, progress="lines",
        checkpoint_every_steps=3, fingerprint=5,
    ),
    Mine(),
]
trainer.fit()
"""


def files_of(run_dir: Path) -> set[str]:
    """Those of a run whose names do not depend on the time."""
    found = {str(it.relative_to(run_dir)) for it in run_dir.rglob("*") if it.is_file()}
    return {
        it
        for it in found
        if not it.startswith(("tensorboard/", "logs/", "checkpoints/"))
    }


def result_of(run_dir: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run_dir / "result.json").read_text())
    return found


def test_a_script_has_all_that_the_command_has(
    openmpi: Mpi,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT.format(path=str(ROOT / "tests/jobs")))
    done = mpirun(openmpi, 2, "script.py", cwd=tmp_path)
    assert done.status == 0, done.out + done.err
    assert "Trainer ignores" not in done.err
    assert "has no effect" not in done.err
    assert "Sequential: 50 samples to train, 13 to validate" in done.out
    flags = (
        "--task own_tasks:build --log csv tensorboard --log-every-steps 1 --profile 2"
    )
    flags += " --checkpoint-every-steps 3 --device cpu --name command --fingerprint 5"
    words = ("-m", "mpitrain", *flags.split(), "--progress", "lines")
    done = mpirun(openmpi, 2, *words, cwd=tmp_path)
    assert done.status == 0, done.out + done.err
    mine, its = tmp_path / "runs/script", tmp_path / "runs/command"
    assert files_of(mine) == files_of(its)
    assert result_of(mine).keys() == result_of(its).keys()
    columns = [(it / "metrics.csv").read_text().splitlines()[0] for it in (mine, its)]
    assert columns[0] == columns[1]
    states = [torch.load(it / "model.pt") for it in (mine, its)]
    for name, weight in states[0].items():
        assert torch.equal(weight, states[1][name])
    assert result_of(mine)["status"] == "finished"
    monkeypatch.chdir(tmp_path)
    for command in ("report", "watch --once", "export"):
        more = ["mine.pt"] * (command == "export")
        assert main([*command.split(), "runs/script", *more]) == 0
    capsys.readouterr()
    main(["diff", "runs/script", "runs/command"])
    assert "steps: the same" in capsys.readouterr().out
