"""Optimizers by name, and the learning rate of every step."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from mpitrain.train.config import WARMUP_EPOCHS, LearningConfig

BY_NAME: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD,
    "adam": torch.optim.Adam,
    "adamw": torch.optim.AdamW,
    "nadam": torch.optim.NAdam,
    "radam": torch.optim.RAdam,
    "rmsprop": torch.optim.RMSprop,
    "adagrad": torch.optim.Adagrad,
    "adamax": torch.optim.Adamax,
    "adadelta": torch.optim.Adadelta,
}

FUSED = ("sgd", "adam", "adamw", "adagrad")
"""Those that update all weights in one pass, on the CPU, too; not those that FSDP
shards (torch 2.15: "aten._fused_sgd_.default does not have a sharding strategy")."""


def build_optimizer(
    weights: Iterable[nn.Parameter],
    config: LearningConfig,
    *,
    lr: float,
    shard: bool = False,
) -> torch.optim.Optimizer:
    """Build the optimizer of the weights that train.

    Args:
        weights: A model's; those that need no gradient are left out.
        config: Which, and its settings.
        lr: The learning rate that it begins with.
        shard: Whether each rank keeps a share of its state; then collective over the
            default group.
    """
    trained = [weight for weight in weights if weight.requires_grad]
    kind = BY_NAME[config.optimizer]
    options: dict[str, Any] = {"lr": lr, "weight_decay": config.weight_decay}
    if config.optimizer == "sgd":
        options |= {"momentum": config.momentum, "nesterov": config.momentum > 0}
    elif config.optimizer == "rmsprop":
        options["momentum"] = config.momentum
    is_sharded = any(hasattr(weight, "full_tensor") for weight in trained)
    if config.optimizer in FUSED and not is_sharded:
        options["fused"] = True
    if shard:
        from torch.distributed.optim import ZeroRedundancyOptimizer

        return ZeroRedundancyOptimizer(trained, optimizer_class=kind, **options)
    return kind(trained, **options)


def learning_rate(
    step: int,
    *,
    config: LearningConfig,
    peak: float,
    num_epochs: int,
    steps_per_epoch: int,
) -> float:
    """Return the learning rate of one step: a linear rise, then a fall.

    Args:
        step: Number of the step, from 0.
        config: The kind of fall, and its settings.
        peak: The largest learning rate.
        num_epochs: Epochs of the rise and the fall.
        steps_per_epoch: Steps of each.

    Returns:
        The rate; the peak at the end of the rise, with a cosine near 0 at the end.

    >>> def rates(**settings):
    ...     config = LearningConfig(**settings)
    ...     return [round(learning_rate(step, config=config, peak=1.0, num_epochs=3,
    ...         steps_per_epoch=2), 2) for step in range(6)]
    >>> rates()
    [0.33, 0.67, 1.0, 1.0, 0.75, 0.25]
    >>> rates(schedule="step", decay_epochs=1, warmup_epochs=0.5)
    [1.0, 1.0, 0.1, 0.1, 0.01, 0.01]
    >>> rates(schedule="constant", warmup_epochs=0)
    [1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
    """
    warmup_epochs = config.warmup_epochs
    if warmup_epochs is None:
        warmup_epochs = min(WARMUP_EPOCHS, num_epochs / 2)
    warmup_steps = round(steps_per_epoch * warmup_epochs)
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if config.schedule == "constant":
        return peak
    if config.schedule == "step":
        falls = step // steps_per_epoch // config.decay_epochs
        return float(peak * config.decay_factor**falls)
    fall_steps = num_epochs * steps_per_epoch - warmup_steps
    done = (step - warmup_steps) / max(1, fall_steps)
    return peak * 0.5 * (1.0 + math.cos(math.pi * done))
