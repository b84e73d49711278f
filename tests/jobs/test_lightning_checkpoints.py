"""A training that Lightning has begun continues as the page says, as it would there."""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from launcher import Mpi, environment, mpirun

from mpitrain import cli

pytestmark = pytest.mark.usefixtures("warm_starts")

PAGE = Path(__file__).parents[2] / "docs/coming-from/lightning.md"

MINE = """\
import torch

def make_net():
    torch.manual_seed(3)
    return torch.nn.Sequential(
        torch.nn.Linear(8, 16), torch.nn.LayerNorm(16), torch.nn.Linear(16, 3)
    )

def some(num, seed):
    inputs = torch.randn(num, 8, generator=torch.Generator().manual_seed(seed))
    return torch.utils.data.TensorDataset(inputs, inputs[:, :3].argmax(1))

train, val = some(320, 1), some(100, 2)
"""

LIGHTNING = """\
import json, sys
import lightning, torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from mine import make_net, train, val

class Module(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net, self.losses = make_net(), []
    def training_step(self, batch, _):
        return F.cross_entropy(self.net(batch[0]), batch[1])
    def on_validation_epoch_start(self):
        self.sums = []
    def validation_step(self, batch, _):
        loss = F.cross_entropy(self.net(batch[0]), batch[1], reduction="sum")
        self.sums.append(float(loss))
    def on_validation_epoch_end(self):
        self.losses.append(sum(self.sums) / len(val))
    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2, betas=(0.9, 0.98))
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10)
        return [optimizer], [schedule]

def fit(epochs, ckpt_path=None):
    module = Module()
    trainer = lightning.Trainer(
        max_epochs=epochs, accelerator="cpu", devices=1, logger=False,
        enable_progress_bar=False, enable_model_summary=False,
        num_sanity_val_steps=0,
        callbacks=[ModelCheckpoint(dirpath=".", save_last=True, filename="best")],
    )
    loaders = [torch.utils.data.DataLoader(it, batch_size=64) for it in (train, val)]
    trainer.fit(module, *loaders, ckpt_path=ckpt_path)
    return module.losses

fit(4)
import shutil
shutil.copy("last.ckpt", "four.ckpt")
json.dump(fit(6, "four.ckpt"), open("losses.json", "w"))
shutil.copy("four.ckpt", "last.ckpt")
"""

COMPARED = """
class Losses(mpitrain.Callback):
    def __init__(self):
        self.found = []
    def on_stage_start(self, trainer):
        self.found.append(trainer.evaluate().values["loss"])
    def on_validation_end(self, trainer, epoch):
        self.found.append(epoch.values["loss"])
    def on_fit_end(self, trainer):
        if trainer.world.is_rank_zero:
            print("losses", self.found)
"""


def test_lightnings_training_goes_on_with_its_optimizer_and_schedule(
    openmpi: Mpi, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("lightning")
    blocks = [it.partition("```")[0] for it in PAGE.read_text().split("```python\n")]
    task, script = blocks[1].partition("data = ")[0], blocks[2]
    (tmp_path / "mine.py").write_text(task + MINE)
    (tmp_path / "begin.py").write_text(LIGHTNING)
    subprocess.run(
        [sys.executable, "begin.py"],
        cwd=tmp_path,
        env=environment(),
        check=True,
        capture_output=True,
        timeout=240,
    )
    expected = json.loads((tmp_path / "losses.json").read_text())
    # The same order as Lightning's loaders, which do not shuffle.
    call = "task=Continued(), callbacks=callbacks"
    assert script.count(call) == 1
    in_order = "sampler=lambda seed, epoch: range(len(train))"
    more = f"task=Continued(), {in_order}, callbacks=[*callbacks, Losses()]"
    script = script.replace(call, more)
    assert script.count("epochs=6") == 1
    script = script.replace("epochs=6", "epochs=2")  # of the six that are left
    head, _, rest = script.partition("config = ")
    (tmp_path / "go_on.py").write_text(f"{head}{COMPARED}\nconfig = {rest}")
    words = ("-m", "mpitrain", "run", "go_on.py")
    done = mpirun(openmpi, 2, *words, cwd=tmp_path, timeout_seconds=120)
    assert done.status == 0, done.err
    found = json.loads(done.out.partition("losses ")[2].partition("\n")[0])
    assert len(expected) == 2
    assert found[1:] == pytest.approx(expected, rel=1e-4)
    assert found[0] > found[-1] * 1.01  # before the first step, as Lightning left it
    monkeypatch.chdir(tmp_path)
    assert loss_of_export() == pytest.approx(found[-1], rel=1e-6)


def loss_of_export() -> float:
    """Export as the page says, and load it into the module's model."""
    (command,) = (
        it.strip() for it in PAGE.read_text().splitlines() if " export " in it
    )
    assert cli.main(command.removeprefix("python -m mpitrain ").split()) == 0
    mine = runpy.run_path("mine.py")
    net, (inputs, targets) = mine["make_net"](), mine["val"].tensors
    net.load_state_dict(torch.load("model.pt"))
    with torch.no_grad():
        return float(F.cross_entropy(net(inputs), targets))
