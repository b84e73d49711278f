"""What a training tells those who record it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol


class StepRow(NamedTuple):
    """What one step came to. Equal on all ranks."""

    epoch: int
    """Its epoch, from 1."""
    step: int
    """Its number, from 1, over all epochs."""
    loss: float
    """Mean loss per sample, before the step's update."""
    lr: float
    """Its learning rate."""
    gradient_norm: float
    """Of the mean loss's gradient, before it was shortened."""


@dataclass(frozen=True, kw_only=True)
class Pace:
    """How fast steps were, of one epoch or more, in wall time. Equal on all ranks."""

    epoch: int
    """That of the last, from 1."""
    step: int
    """The number of the last, from 1, over all epochs."""
    num_steps: int
    """How many there were."""
    num_samples: int
    """Samples in them, counted over all ranks."""
    seconds: float
    """All their time: of the rank that took longest."""
    data_seconds: float
    """Waiting for samples: mean of the ranks."""
    compute_seconds: float
    """Forward and backward: mean of the ranks."""
    communication_seconds: float
    """Letting gradients meet after the backward pass, once the last rank is there; and,
    where the model has buffers, taking rank zero's (ddp)."""
    wait_seconds: float
    """Waiting for that rank: mean of the ranks."""
    slowest_rank: int
    """Which was the last in most of the steps; -1 for a world of one."""
    slowest_steps: int
    """In how many steps it was the last."""
    late_seconds: float
    """How much later it was in those than the rank in the middle, in sum."""
    gpu_bytes: int | None = None
    """Most memory of a GPU that a rank has held; ``None`` without GPUs."""

    @property
    def samples_per_second(self) -> float:
        """Samples per second, over all ranks."""
        return self.num_samples / self.seconds


@dataclass(frozen=True, kw_only=True)
class Epoch:
    """What one epoch came to. Equal on all ranks, but for the time."""

    stage: str
    """``train``, ``probe`` or ``finetune``."""
    epoch: int
    """From 1, over all stages."""
    step: int
    """Steps done since the start of the training."""
    train_loss: float
    """Mean of the loss over its samples, as they were trained on."""
    train_samples: int
    """Samples trained on, counted over all ranks."""
    values: Mapping[str, float]
    """Means per validation sample, on the weights at the epoch's end: ``loss``, and
    what else is told, such as ``accuracy`` (0 to 1)."""
    val_samples: int
    """Validation samples, counted over all ranks."""
    skipped_samples: int
    """Samples left out since they could not be read, counted over all ranks."""
    skipped_steps: int
    """Steps whose gradient was not finite, and was not applied."""
    steps_seconds: float
    """Wall time of its steps on this rank."""
    epoch_seconds: float
    """Wall time of the epoch on this rank, evaluation included."""

    @property
    def samples_per_second(self) -> float:
        """Samples per second of its steps, over all ranks."""
        return self.train_samples / self.steps_seconds


Progress = Callable[[str], object]
"""Tells the watchdog what a rank does next, and so that it is alive."""


class Listener(Protocol):
    """Who wants to hear how the training goes; called on every rank."""

    def rows_done(self, rows: Sequence[StepRow]) -> None:
        """Hear what steps came to: those since the last call, of one epoch."""

    def pace_done(self, pace: Pace) -> None:
        """Hear how fast steps were: those since the last call, of one epoch or more."""

    def epoch_done(self, epoch: Epoch) -> None:
        """Hear what an epoch came to; `rows_done` has told of all its steps."""


class Silent:
    """The listener that wants to hear nothing."""

    def rows_done(self, rows: Sequence[StepRow]) -> None:
        """Do nothing."""

    def pace_done(self, pace: Pace) -> None:
        """Do nothing."""

    def epoch_done(self, epoch: Epoch) -> None:
        """Do nothing."""


class Listeners:
    """Several listeners, told one after the other; true if there are any.

    Args:
        listeners: They; ``None`` is nobody.
    """

    def __init__(self, *listeners: Listener | None) -> None:
        self._listeners: list[Listener] = []
        for one in listeners:
            if one is not None:
                self._listeners += one if isinstance(one, Listeners) else [one]

    def __bool__(self) -> bool:
        return bool(self._listeners)

    def __iter__(self) -> Iterator[Listener]:
        return iter(self._listeners)

    def rows_done(self, rows: Sequence[StepRow]) -> None:
        """Tell all of them."""
        for one in self._listeners:
            one.rows_done(rows)

    def pace_done(self, pace: Pace) -> None:
        """Tell all of them."""
        for one in self._listeners:
            one.pace_done(pace)

    def epoch_done(self, epoch: Epoch) -> None:
        """Tell all of them."""
        for one in self._listeners:
            one.epoch_done(epoch)
