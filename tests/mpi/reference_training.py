"""Trainings by the trainer, and the same written out by hand on one process."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from mpitrain.config import TrainConfig
from mpitrain.data.sharding import epoch_order
from mpitrain.mpi.world import World
from mpitrain.tasks.image_classification.datasets.named import InMemory, digits
from mpitrain.train.callbacks import Callback, StopRequested
from mpitrain.train.metrics import EpochMetrics, StepMetrics, Throughput
from mpitrain.train.trainer import Trainer

NUM_SAMPLES, BATCH_SIZE, EPOCHS = 75, 16, 2  # the last of five steps is short


class Net(nn.Module):
    """Two blocks of two layers, and a head."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(7)
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Linear(64, 64), nn.Tanh()) for _ in range(2))
        )
        self.head = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.blocks(images.flatten(1)))


def some(num: int, part: str = "train") -> TensorDataset:
    samples = getattr(digits(), part)
    assert isinstance(samples, InMemory)
    return TensorDataset(samples.inputs[:num], samples.targets[:num])


class History(Callback):
    """Keeps the metrics of a training."""

    def __init__(self) -> None:
        self.epochs: list[EpochMetrics] = []
        self.steps: list[StepMetrics] = []
        self.throughputs: list[Throughput] = []

    def on_metrics(self, trainer: Any, steps: Sequence[StepMetrics]) -> None:
        self.steps += steps

    def on_throughput(self, trainer: Any, throughput: Throughput) -> None:
        self.throughputs.append(throughput)

    def on_epoch_end(self, trainer: Any, epoch: EpochMetrics) -> None:
        self.epochs.append(epoch)

    @property
    def losses(self) -> list[float]:
        steps = [step.loss for step in self.steps]
        return steps + [epoch.values["loss"] for epoch in self.epochs]


class Stops(Callback):
    """Stops a training after a step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, trainer: Any) -> None:
        if trainer.state.step == self.step:
            raise StopRequested("a test")


def config_of(**settings: Any) -> TrainConfig:
    plain: dict[str, Any] = {
        "precision": "fp64",
        "epochs": EPOCHS,
        "global_batch_size": BATCH_SIZE,
        "lr": 0.05,
    }
    return TrainConfig(**plain | settings)


def trained(
    world: World, *, data: Any = None, model: nn.Module | None = None, **settings: Any
) -> tuple[list[float], dict[str, Tensor]]:
    """Losses of all steps and validations, and the final weights."""
    history = History()
    trainer = Trainer(
        Net() if model is None else model,
        data or some(NUM_SAMPLES),
        some(29, "val"),
        config_of(**settings),
        world=world,
    )
    trainer.callbacks.append(history)
    trainer.fit()
    state = trainer.engine.full_state_dict()
    return history.losses, state


def by_hand(
    prepare: Callable[[Tensor, Tensor, int, int], Any] | None = None,
    after_step: Callable[[nn.Module], None] | None = None,
    *,
    num: int = NUM_SAMPLES,
    smoothing: float = 0.0,
    longest: float | None = None,
    order: Callable[[int], Any] = lambda epoch: epoch_order(NUM_SAMPLES, 1, epoch),
) -> tuple[list[float], nn.Module]:
    """The same training, written out."""
    model = Net().double()
    inputs, targets = (it[:num] for it in some(num).tensors)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-4
    )
    steps, validations = [], []
    total, warmup, done = EPOCHS * 5, 5, 0
    for epoch in range(1, EPOCHS + 1):
        for step, start in enumerate(range(0, num, BATCH_SIZE)):
            chosen = torch.from_numpy(order(epoch)[start : start + BATCH_SIZE])
            x, y = inputs[chosen].double(), targets[chosen]
            rate = (
                0.05 * (done + 1) / warmup
                if done < warmup
                else 0.025 * (1 + np.cos(np.pi * (done - warmup) / (total - warmup)))
            )
            optimizer.param_groups[0]["lr"] = rate
            if prepare is None:
                loss = F.cross_entropy(model(x), y, label_smoothing=smoothing)
            else:
                loss = prepare(x, y, epoch, step)(model)
            optimizer.zero_grad()
            loss.backward()
            if longest is not None:
                nn.utils.clip_grad_norm_(model.parameters(), longest)
            optimizer.step()
            if after_step is not None:
                after_step(model)
            steps.append(loss.item())
            done += 1
        with torch.no_grad():
            x, y = some(29, "val").tensors
            validations.append(F.cross_entropy(model(x.double()), y).item())
    return steps + validations, model


def same(found: tuple[list[float], dict[str, Tensor]], hand: Any) -> None:
    losses, state = found
    assert losses == pytest.approx(hand[0], rel=1e-9)
    if torch.distributed.get_rank() == 0:  # the others need not have the whole
        for name, value in hand[1].state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-12)
