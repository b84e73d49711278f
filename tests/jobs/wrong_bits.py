"""A training in which one rank computes wrongly, and a `check` on such a device.

    wrong_bits.py RUN_DIR KIND PLACE STEP [plain] [once] [two] [ema] [noise]
    wrong_bits.py check RANK

PLACE is a rank or a host; "two": micro-batches of a step, one for each of two ranks.
"""

from __future__ import annotations

import os
import random
import sys
import time
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

import mpitrain

EVERY = int(os.environ.get("VERIFY_EVERY", "4"))
EPOCHS = int(os.environ.get("EPOCHS", "3"))
STEP_SECONDS = float(os.environ.get("STEP_SECONDS", "0"))


def flip(tensor: Tensor) -> None:
    """Change one bit."""
    raw = tensor.detach().view(-1).view(torch.int32)
    raw[5] ^= 1 << 12


class Fault(mpitrain.Callback):
    """Flips a bit on one rank, from a step on or once."""

    def __init__(self, kind: str, place: str, step: int, flags: Sequence[str]) -> None:
        self.kind, self.place, self.step, self.flags = kind, place, step, flags
        self.num_flipped = 0

    def on_fit_start(self, trainer: mpitrain.Trainer) -> None:
        self.trainer = trainer
        model: Any = trainer.model
        model[0].register_forward_hook(self.activation)
        model[4].weight.register_hook(self.gradient)

    def is_due(self, kind: str) -> bool:
        step, world = self.trainer.state.step + 1, self.trainer.world
        assert world is not None
        is_here = self.place in (str(world.rank), world.hostname)
        is_due = kind == self.kind and is_here and step >= self.step
        self.num_flipped += is_due
        return is_due and not ("once" in self.flags and self.num_flipped > 1)

    def activation(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        del module, inputs
        if self.is_due("activation"):
            output = output.clone()
            flip(output)
        return output

    def gradient(self, gradient: Tensor) -> Tensor:
        if self.is_due("gradient"):
            gradient = gradient.clone()
            flip(gradient)
        return gradient

    def on_batch_start(self, trainer: mpitrain.Trainer, batch: Any) -> None:
        if "noise" in self.flags:  # random numbers of the micro-batch, on any rank
            batch.inputs = batch.inputs + torch.randn_like(batch.inputs)
        if self.is_due("batch"):
            flip(batch.inputs)

    def on_step_end(self, trainer: mpitrain.Trainer) -> None:
        time.sleep(STEP_SECONDS)
        if trainer.state.step + 1 != self.step:
            return
        model: Any = trainer.model
        if self.is_due("weight"):
            flip(model[4].weight)
        if self.is_due("state"):
            optimizer = trainer.engine.optimizer.optimizers[0].local
            flip(next(iter(optimizer.state.values()))["exp_avg"])
        if self.is_due("buffer"):
            flip(model[1].running_mean)


def train(
    run_dir: str,
    kind: str,
    place: str,
    step: str,
    *flags: str,
    every: int = EVERY,
    world: mpitrain.World | None = None,
) -> dict[str, Tensor]:
    """Train; return the weights, on rank zero."""
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(
        torch.randn(320, 10), torch.randint(3, (320,))
    )
    model = nn.Sequential(
        *(nn.Linear(10, 20), nn.BatchNorm1d(20), nn.ReLU(), nn.Dropout(0.2)),
        nn.Linear(20, 3),
    )
    config = mpitrain.TrainConfig(
        epochs=EPOCHS,
        global_batch_size=32,
        micro_batch_size=16 if "two" in flags else None,
        bitwise="plain" not in flags,
        optimizer="adamw",
        ema_decay=0.9 if "ema" in flags else None,
        verify_every=every,
    )
    fault = Fault(kind, place, int(step), flags)
    callbacks = mpitrain.default_callbacks(run_dir, config, progress="lines")
    trainer = mpitrain.Trainer(
        model, data, data, config, world=world, callbacks=[*callbacks, fault]
    )
    trainer.fit()
    return trainer.state_dict()


def check(rank: str) -> None:
    """Check, where one device has a wrong product now and then."""
    from mpitrain.cli import main
    from mpitrain.tools.check import compute

    compute.SECONDS = 2.0
    right, chance = nn.functional.linear, random.Random(0)

    def wrong(*of: Any) -> Tensor:
        found = right(*of)
        if chance.random() < 0.01:
            flip(found)
        return found

    if os.environ.get("OMPI_COMM_WORLD_RANK") == rank:
        nn.functional.linear = wrong
    sys.exit(main(["check", "--quick", "--compute", "--json", "--device", "cpu"]))


if __name__ == "__main__":
    if sys.argv[1] == "check":
        check(sys.argv[2])
    with mpitrain.init():
        train(*sys.argv[1:])
