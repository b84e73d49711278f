"""What a training tells those who record it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """What one epoch came to. Equal on all ranks, but for the time."""

    epoch: int
    """From 1."""
    step: int
    """Steps done since the start of the training."""
    step_losses: tuple[float, ...]
    """Mean loss per sample of each of its steps, before the step's update, in nats."""
    learning_rates: tuple[float, ...]
    """The learning rate of each of its steps."""
    train_loss: float
    """Mean of the loss over its samples, as they were trained on, in nats."""
    train_samples: int
    """Samples trained on, counted over all ranks."""
    val_loss: float
    """Mean loss per validation sample, on the weights at the epoch's end, in nats."""
    val_accuracy: float
    """Share of the validation samples whose class was found, 0 to 1."""
    val_samples: int
    """Validation samples, counted over all ranks."""
    steps_seconds: float
    """Wall time of its steps on this rank."""
    epoch_seconds: float
    """Wall time of the epoch on this rank, evaluation included."""


Progress = Callable[[str], object]
"""Tells the watchdog what a rank does next, and so that it is alive."""


class Listener(Protocol):
    """Who wants to hear how the training goes; called on every rank."""

    def step_done(self, step: int) -> None:
        """Hear that step number `step`, from 1, is done."""

    def epoch_done(self, epoch: Epoch) -> None:
        """Hear what an epoch came to."""
