"""Optimizers by name, and the learning rate of every step."""

from __future__ import annotations

import math

import torch
from torch import nn

from mpitrain.train.config import TrainConfig


def build_optimizer(model: nn.Module, config: TrainConfig) -> torch.optim.Optimizer:
    """Build the optimizer of the weights that train."""
    weights = [weight for weight in model.parameters() if weight.requires_grad]
    if config.optimizer == "adamw":
        return torch.optim.AdamW(
            weights, lr=config.peak_lr, weight_decay=config.weight_decay
        )
    return torch.optim.SGD(
        weights,
        lr=config.peak_lr,
        momentum=config.momentum,
        nesterov=config.momentum > 0,
        weight_decay=config.weight_decay,
    )


def learning_rate(
    step: int, *, peak: float, warmup_steps: int, total_steps: int
) -> float:
    """Return the learning rate of one step: a linear rise, then half a cosine.

    Args:
        step: Number of the step, from 0.
        peak: The largest learning rate.
        warmup_steps: Steps of the rise.
        total_steps: All steps, the rise included.

    Returns:
        The rate; the peak at the end of the rise, near 0 at the last step.

    >>> [round(learning_rate(s, peak=1.0, warmup_steps=2, total_steps=6), 2)
    ...  for s in range(6)]
    [0.5, 1.0, 1.0, 0.85, 0.5, 0.15]
    """
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    done = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    return peak * 0.5 * (1.0 + math.cos(math.pi * done))
