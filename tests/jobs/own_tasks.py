"""Trainings for --task, and what is none."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import mpitrain

DEFAULTS = mpitrain.TrainConfig(epochs=3, global_batch_size=8, lr=0.05)


def some(num: int, seed: int) -> TensorDataset:
    inputs = torch.randn(num, 4, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(inputs, inputs.sum(1))


def squared_errors(outputs: Tensor, targets: Tensor) -> Tensor:
    return (outputs[:, 0] - targets).square()


def build(
    config: mpitrain.TrainConfig = DEFAULTS,
    *,
    hidden_size: int = 8,
    activation: Literal["relu", "tanh"] = "relu",
    has_bias: bool = True,
    folder: Path | None = None,
    layer: Any = nn.Linear,
) -> mpitrain.Trainer:
    """A regression.

    Args:
        hidden_size: Of the network.
    """
    assert folder is None or isinstance(folder, Path)
    kind = {"relu": nn.ReLU, "tanh": nn.Tanh}[activation]
    model = nn.Sequential(
        layer(4, hidden_size, bias=has_bias), kind(), layer(hidden_size, 1)
    )
    return mpitrain.Trainer(
        model, some(50, 1), some(13, 2), config, loss=squared_errors
    )


class Smooth(mpitrain.Task):
    """A task for the model and the data of the command."""

    def __init__(self, smoothing: float = 0.0) -> None:
        super().__init__()
        self.smoothing = smoothing

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return nn.functional.cross_entropy(
            outputs, targets, reduction="none", label_smoothing=self.smoothing
        )


def with_other_config(config: mpitrain.TrainConfig = DEFAULTS) -> mpitrain.Trainer:
    return build(dataclasses.replace(config, lr=1.0))


def with_recorder(config: mpitrain.TrainConfig = DEFAULTS) -> mpitrain.Trainer:
    trainer = build(config)
    trainer.callbacks.append(mpitrain.Recorder("runs/own"))
    return trainer


def of_kinds(
    config: mpitrain.TrainConfig = DEFAULTS,
    width: Literal[4, 8] = 4,
    folder: Path = None,  # type: ignore[assignment]  # noqa: RUF013
    tag: str | None = None,
    sizes: tuple[int, ...] = (1,),
    paths: tuple[Path, ...] = (),
    rate: float | None = 0.5,
    *,
    is_deep: bool = False,
    text: str = "1e-3",
    scale: float = 1,
    masks: tuple[bool, ...] = (True,),
    maybe: bool | None = None,
) -> None:
    """Arguments of every kind."""


def on_one_rank(
    config: mpitrain.TrainConfig, world: mpitrain.World
) -> mpitrain.Trainer | mpitrain.Task:
    return Smooth() if world.rank else build(config)


def nothing_on_one_rank(
    config: mpitrain.TrainConfig, world: mpitrain.World
) -> mpitrain.Trainer | None:
    return build(config) if world.rank == 0 else None


class Logged(mpitrain.EpochLines):
    def on_epoch_end(self, *_: Any) -> None:
        print("an epoch of mine", flush=True)


def with_lines(config: mpitrain.TrainConfig = DEFAULTS) -> mpitrain.Trainer:
    trainer = build(config)
    trainer.callbacks.append(Logged())
    return trainer


def nothing(config: mpitrain.TrainConfig = DEFAULTS) -> int:
    return 1


def fails_on_one(
    config: mpitrain.TrainConfig, world: mpitrain.World
) -> mpitrain.Trainer:
    if world.rank == 1:
        raise ArithmeticError("a fault of mine")
    return build(config)


def takes_a_network(config: mpitrain.TrainConfig, network: nn.Module) -> None:
    """No flag can give that."""
