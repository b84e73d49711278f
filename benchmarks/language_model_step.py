"""Steps of a language model beside the same loop written by hand; one rank.

    .venv/bin/python benchmarks/language_model_step.py
    .venv/bin/python benchmarks/language_model_step.py --widths 32 256 --epochs 20

Both train the transformer of `examples/trainings/language_model.py` on the same crops:
samples are read one by one and collated, labels are ignored, the mean is by token,
gradients are clipped. By hand that is torch's DataLoader, with as many workers as ours.
The losses must agree. They take turns epoch by epoch, in one process, and each ratio is
of one epoch of ours and the one of theirs beside it.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from loop import WARM_UP_EPOCHS, epochs_of, ratios, shown
from record import about, write
from torch.utils.data import DataLoader

import mpitrain
from mpitrain.config import TrainConfig
from mpitrain.data.sharding import epoch_order
from mpitrain.tasks.stages import place_stages
from mpitrain.train.callbacks import Callback
from mpitrain.train.metrics import EpochMetrics, StepMetrics, TrainState
from mpitrain.train.plan import Plan

sys.path.insert(0, str(Path(__file__).parents[1] / "examples" / "trainings"))

from language_model import IGNORED, Crops, LanguageModel, Transformer

NUM_SAMPLES = 240  # the text has no more crops of its own
SAME = 1e-3
"""Losses may differ by so much: AdamW divides rounding errors by small numbers."""


def main() -> None:
    """Measure all widths, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--widths", type=int, nargs="+", default=[32, 128, 256])
    parser.add_argument("--epochs", type=int, default=20, help="that count, of each")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--num-workers", type=int, default=0, help="of each")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    asked = parser.parse_args()
    widths = " ".join(map(str, asked.widths))
    command = (
        f"benchmarks/language_model_step.py --widths {widths} --epochs {asked.epochs}"
    )
    command += f" --threads {asked.threads} --num-workers {asked.num_workers}"
    report = about(command)
    with mpitrain.init(device="cpu") as world:
        torch.set_num_threads(asked.threads)
        report["rows"] = [row(width, asked, world) for width in asked.widths]
    write(report, asked.json)


def row(width: int, asked: argparse.Namespace, world: mpitrain.World) -> dict[str, Any]:
    """Compare the loops at one width of the model."""
    config = TrainConfig(
        epochs=asked.epochs + WARM_UP_EPOCHS,
        num_workers=asked.num_workers,
        global_batch_size=8,
        optimizer="adamw",
        lr=1e-3,
        weight_decay=0.1,
        clip_grad_norm=1.0,
    )
    seconds: dict[str, list[float]] = {"ours": [], "by hand": []}
    losses: dict[str, list[float]] = {"ours": [], "by hand": []}
    loops = {
        "ours": ours(width, config, world, seconds["ours"], losses["ours"]),
        "by hand": by_hand(width, config, seconds["by hand"], losses["by hand"]),
    }
    names = list(loops)
    for epoch in range(1, config.epochs + 1):
        names.append(names.pop(0))
        for name in names:
            loops[name](epoch)
    apart = max(abs(a - b) for a, b in zip(*losses.values(), strict=True))
    assert apart < SAME, f"losses differ by {apart}"
    ratio = ratios(seconds["ours"], seconds["by hand"])
    num_steps = NUM_SAMPLES // config.global_batch_size
    per_step = {
        name: 1e6 / num_steps * statistics.median(of[WARM_UP_EPOCHS:])
        for name, of in seconds.items()
    }
    print(
        f"width {width:4}: ours {per_step['ours']:7.0f} us a step, by hand "
        f"{per_step['by hand']:7.0f}: {shown(ratio)}",
        flush=True,
    )
    return {"width": width, "microseconds_per_step": per_step, "ratio": ratio}


def ours(
    width: int,
    config: TrainConfig,
    world: mpitrain.World,
    seconds: list[float],
    losses: list[float],
) -> Callable[[int], None]:
    """Return what trains an epoch in our loop."""

    class Times(Callback):
        def on_metrics(self, trainer: Any, steps: Sequence[StepMetrics]) -> None:
            losses.extend(step.loss for step in steps)

        def on_epoch_end(self, trainer: Any, epoch: EpochMetrics) -> None:
            seconds.append(epoch.steps_seconds)

    torch.manual_seed(1)
    trainer = mpitrain.Trainer(
        Transformer(width),
        Crops(NUM_SAMPLES, seed=0, is_random=False),
        Crops(8, seed=0, is_random=False),
        config,
        world=world,
        task=LanguageModel(),
        callbacks=[Times()],
    )
    return epochs_of(trainer)


def by_hand(
    width: int, config: TrainConfig, seconds: list[float], losses: list[float]
) -> Callable[[int], None]:
    """Return what trains an epoch in a loop written by hand."""
    torch.manual_seed(1)
    model = Transformer(width)
    data = Crops(NUM_SAMPLES, seed=0, is_random=False)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=config.peak_lr,
        weight_decay=config.weight_decay,
        fused=True,
    )
    stages = place_stages(None, config)
    plan = Plan(num_samples=len(data), config=config, stages=stages)
    order: list[int] = []
    num_workers: Any = config.num_workers
    loader = DataLoader(
        data,
        config.global_batch_size,
        sampler=order,
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
    )

    def train(epoch: int) -> None:
        started = time.perf_counter()
        model.train()
        order[:] = epoch_order(len(data), config.seed, epoch).tolist()
        state = TrainState(epoch=epoch)
        for number, (inputs, labels) in enumerate(loader):
            rate = plan.learning_rate(plan.stages[0], state, number)
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.zero_grad()
            loss = F.cross_entropy(model(inputs).mT, labels, ignore_index=IGNORED)
            loss.backward()
            norm = torch.nn.utils.clip_grad_norm_(
                model.parameters(), config.clip_grad_norm or math.inf
            )
            if not (math.isfinite(norm) and math.isfinite(loss.item())):
                raise ArithmeticError(f"step {number}: {norm}, {loss.item()}")
            optimizer.step()
            losses.append(loss.item())
        seconds.append(time.perf_counter() - started)

    return train


if __name__ == "__main__":
    main()
