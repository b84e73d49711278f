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
