"""Our training loop beside the same loop written by hand in plain torch; one rank.

    .venv/bin/python benchmarks/loop.py
    .venv/bin/python benchmarks/loop.py --epochs 20 --batch-sizes 64 --threads 1

Both train the default network on the embedded digits: same first weights, order,
optimizer, learning rates; the losses must agree. "The same by hand" does what ours does
in a step: it keeps loss and norm of the gradient, and stops where either is no number.
"Bare" has nothing but what a training needs, and the loss. They take turns epoch by
epoch, in one process, and each ratio is of one epoch of ours and the one of theirs
beside it. Counted are the steps; and, as a second figure, the epochs with their
evaluation.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from record import about, spread, write
from torch import nn
from torch.nn.utils import get_total_norm

import mpitrain
from mpitrain.config import TrainConfig
from mpitrain.data.sharding import epoch_order
from mpitrain.models.build import build_model
from mpitrain.mpi.world import World
from mpitrain.tasks.image_classification.datasets.named import Data, digits
from mpitrain.tasks.stages import place_stages
from mpitrain.train.callbacks import Callback
from mpitrain.train.metrics import EpochMetrics, StepMetrics, TrainState
from mpitrain.train.plan import Plan

WARM_UP_EPOCHS = 3

SAME_JOB, BARE = "the same by hand", "bare"

SAME = 1e-6
"""Losses may differ by so much: sums of float32 in another order."""


@dataclass
class Times:
    """What one loop took."""

    steps: list[float] = field(default_factory=list)
    """Seconds of the steps of each epoch."""
    epochs: list[float] = field(default_factory=list)
    """Seconds of each epoch, with its evaluation."""
    losses: list[float] = field(default_factory=list)
    """Of every step, and of every evaluation."""


def main() -> None:
    """Measure all batch sizes, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[32, 64, 256])
    parser.add_argument("--epochs", type=int, default=100, help="that count, of each")
    parser.add_argument("--threads", type=int, help="default: as mpitrain has it")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    asked = parser.parse_args()
    sizes = " ".join(map(str, asked.batch_sizes))
    command = f"benchmarks/loop.py --batch-sizes {sizes} --epochs {asked.epochs}"
    if asked.threads:
        command += f" --threads {asked.threads}"
    report = about(command)
    with mpitrain.init(device="cpu") as world:
        if asked.threads:
            torch.set_num_threads(asked.threads)
        report["threads"] = torch.get_num_threads()
        report["rows"] = [
            row(batch_size, asked.epochs, world) for batch_size in asked.batch_sizes
        ]
    write(report, asked.json)


def row(batch_size: int, num_epochs: int, world: World) -> dict[str, Any]:
    """Compare the loops at one batch size."""
    data = digits()
    config = TrainConfig(
        epochs=num_epochs + WARM_UP_EPOCHS, global_batch_size=batch_size
    )
    times = {name: Times() for name in ("ours", SAME_JOB, BARE)}
    loops = {
        "ours": ours(data, config, world, times["ours"]),
        SAME_JOB: by_hand(data, config, times[SAME_JOB], is_bare=False),
        BARE: by_hand(data, config, times[BARE], is_bare=True),
    }
    names = list(loops)
    for epoch in range(1, config.epochs + 1):
        names.append(names.pop(0))  # who is first has another's leavings in the cache
        for name in names:
            loops[name](epoch)
    losses = zip(*(of.losses for of in times.values()), strict=True)
    apart = max(max(found) - min(found) for found in losses)
    assert apart < SAME, f"losses differ by {apart}"
    num_steps = -(-len(data.train.targets) // batch_size)
    found = {
        "batch_size": batch_size,
        "steps_per_epoch": num_steps,
        "microseconds_per_step": {
            name: 1e6 / num_steps * statistics.median(of.steps[WARM_UP_EPOCHS:])
            for name, of in times.items()
        },
        "losses_differ_by": apart,
    }
    per_step = found["microseconds_per_step"]
    print(f"batch {batch_size:4}: ours {per_step['ours']:7.0f} us a step", flush=True)
    for name in (SAME_JOB, BARE):
        ratio = {
            what: ratios(getattr(times["ours"], what), getattr(times[name], what))
            for what in ("steps", "epochs")
        }
        print(
            f"  to {name:16} {per_step[name]:7.0f}: ratio of steps "
            f"{shown(ratio['steps'])}, of epochs {shown(ratio['epochs'])}",
            flush=True,
        )
        found[f"ratio to {name}"] = ratio
    return found


def ratios(mine: list[float], theirs: list[float]) -> dict[str, float]:
    pairs = list(zip(mine, theirs, strict=True))[WARM_UP_EPOCHS:]
    return spread([a / b for a, b in pairs])


def shown(ratio: dict[str, Any]) -> str:
    low, high = ratio["quartiles"]
    return f"{ratio['median']:.3f} ({low:.3f} to {high:.3f})"


def net() -> nn.Module:
    return build_model("convnet", num_classes=10, in_channels=1, image_size=8, seed=1)


def ours(
    data: Data, config: TrainConfig, world: World, times: Times
) -> Callable[[int], None]:
    """Return what trains an epoch in our loop."""

    class Heard(Callback):
        def on_metrics(self, trainer: Any, steps: Sequence[StepMetrics]) -> None:
            times.losses += [step.loss for step in steps]

        def on_epoch_end(self, trainer: Any, epoch: EpochMetrics) -> None:
            times.steps.append(epoch.steps_seconds)
            times.epochs.append(epoch.epoch_seconds)
            times.losses.append(epoch.values["loss"])

    trainer = mpitrain.Trainer(
        net(),
        data.train,
        data.val,
        config,
        world=world,
        callbacks=[Heard()],
        find_unused_parameters=False,
    )
    return epochs_of(trainer)


def epochs_of(trainer: mpitrain.Trainer) -> Callable[[int], None]:
    """Return what trains an epoch of a trainer of one stage."""
    engine = trainer.set_up()
    (stage,) = engine.plan.stages
    engine.start_stage(stage)

    def train(_: int) -> None:
        trainer.train_epoch()
        trainer.validate()

    return train


def by_hand(
    data: Data, config: TrainConfig, times: Times, *, is_bare: bool
) -> Callable[[int], None]:
    """Return what trains an epoch in a loop written by hand."""
    inputs, targets = data.train.inputs, data.train.targets
    size = config.global_batch_size
    model = net()
    optimizer = torch.optim.SGD(
        model.parameters(),
        lr=config.peak_lr,
        momentum=config.momentum,
        weight_decay=config.weight_decay,
        nesterov=True,
        fused=True,
    )
    steps_per_epoch = -(-len(targets) // size)
    stages = place_stages(None, config)
    plan = Plan(num_samples=len(targets), config=config, stages=stages)
    weights = list(model.parameters())
    norms: list[float] = []

    def train(epoch: int) -> None:
        started = time.perf_counter()
        model.train()
        order = torch.from_numpy(epoch_order(len(targets), config.seed, epoch))
        state = TrainState(epoch=epoch)
        for number in range(steps_per_epoch):
            rate = plan.learning_rate(plan.stages[0], state, number)
            for group in optimizer.param_groups:
                group["lr"] = rate
            chosen = order[number * size : (number + 1) * size]
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs[chosen]), targets[chosen])
            loss.backward()
            if not is_bare:
                gradients = [weight.grad for weight in weights]
                norm = get_total_norm(gradients).item()
                if not (math.isfinite(norm) and math.isfinite(loss.item())):
                    raise ArithmeticError(f"step {number}: {norm}, {loss.item()}")
                norms.append(norm)
            optimizer.step()
            times.losses.append(loss.item())
        times.steps.append(time.perf_counter() - started)
        times.losses.append(evaluate(model, data))
        times.epochs.append(time.perf_counter() - started)

    return train


@torch.no_grad()
def evaluate(model: nn.Module, data: Data) -> float:
    """Judge by all of the validation set, 256 at once; with accuracy, as ours."""
    inputs, targets = data.val.inputs, data.val.targets
    model.eval()
    loss = correct = 0.0
    for start in range(0, len(targets), 256):
        chosen = slice(start, start + 256)
        outputs = model(inputs[chosen])
        loss += F.cross_entropy(outputs, targets[chosen], reduction="sum").item()
        correct += (outputs.argmax(dim=1) == targets[chosen]).sum().item()
    assert correct > 0
    return loss / len(targets)


if __name__ == "__main__":
    main()
