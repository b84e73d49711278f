"""What steps came to, kept on the device until somebody asks; and how far all is."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from mpitrain.data.sharding import Indices
from mpitrain.record.events import Epoch, StepRow

GATHERED_STEPS = 4096
"""Steps whose sums meet at once."""


@dataclass(kw_only=True)
class SoFar:
    """How far a training has come. Equal on all ranks, but for the time."""

    num_steps: int = 0
    """Steps done, over all epochs."""
    epoch: int = 1
    """The epoch that is under way, from 1; one more than the last: all is done."""
    epoch_steps: int = 0
    """Steps of it that are done."""
    loss_sum: float = 0.0
    """Of its samples, in steps that were applied."""
    num_samples: int = 0
    """How many those are."""
    skipped_steps: int = 0
    """Steps of it that were not applied."""
    skipped_samples: int = 0
    """Samples of it that could not be read."""
    steps_seconds: float = 0.0
    """Wall time of its steps."""
    taken: list[int] = field(default_factory=list)
    """Samples of it taken of each part, where ranks read parts of a set."""
    values: dict[str, float] = field(default_factory=dict)
    """How good the model was when it was last judged."""
    val_samples: int = 0
    """By how many samples."""

    def as_epoch(self, stage: str, val_seconds: float) -> Epoch:
        """Return what the epoch came to, which has just been judged.

        Args:
            stage: The name of its stage.
            val_seconds: Wall time of the evaluation.
        """
        num = self.num_samples
        return Epoch(
            stage=stage,
            epoch=self.epoch,
            step=self.num_steps,
            train_loss=self.loss_sum / num if num else math.nan,
            train_samples=num,
            values=self.values,
            val_samples=self.val_samples,
            skipped_samples=self.skipped_samples,
            skipped_steps=self.skipped_steps,
            steps_seconds=self.steps_seconds,
            epoch_seconds=self.steps_seconds + val_seconds,
        )

    def add(self, loss_sum: float, num_samples: int) -> None:
        """Take in a step that was applied."""
        self.loss_sum += loss_sum
        self.num_samples += num_samples

    def begin_epoch(self, epoch: int) -> None:
        """Set all that is counted by epoch to nothing."""
        self.epoch, self.epoch_steps = epoch, 0
        self.loss_sum, self.num_samples = 0.0, 0
        self.skipped_steps = self.skipped_samples = 0
        self.steps_seconds = 0.0
        self.taken = []


class Losses(NamedTuple):
    """What the samples of one microstep came to."""

    indices: Indices
    """Their numbers, int64 `(N,)`."""
    total: Tensor
    """Sum of their losses, `()`; on the device."""


class _Taken(NamedTuple):
    losses: list[Losses]
    rate: float
    norm: float
    is_applied: bool


class Steps:
    """Gathers losses, learning rates and norms, step by step."""

    def __init__(self) -> None:
        self._steps: list[_Taken] = []

    def add(
        self, losses: list[Losses], rate: float, norm: float, *, is_applied: bool
    ) -> None:
        """Take in a step.

        Args:
            losses: Of this rank's microsteps.
            rate: Its learning rate.
            norm: Of its gradient.
            is_applied: Whether the weights have changed.
        """
        self._steps.append(_Taken(losses, rate, norm, is_applied))

    def meet(self, so_far: SoFar) -> list[StepRow]:
        """Add the sums of all ranks up, of the steps since the last call.

        Collective over the default group.

        Args:
            so_far: Its sums grow; its steps have been counted already.

        Returns:
            A row per step.
        """
        steps, self._steps = self._steps, []
        first = so_far.num_steps - len(steps) + 1
        rows: list[StepRow] = []
        for start in range(0, len(steps), GATHERED_STEPS):
            some = steps[start : start + GATHERED_STEPS]
            totals = _totals([step.losses for step in some])
            for step, (loss_sum, count) in zip(some, totals, strict=True):
                if step.is_applied:
                    so_far.add(loss_sum, count)
                rows.append(
                    StepRow(
                        epoch=so_far.epoch,
                        step=first + len(rows),
                        loss=loss_sum / count,
                        lr=step.rate,
                        gradient_norm=step.norm,
                    )
                )
        return rows


def _totals(losses: list[list[Losses]]) -> list[tuple[float, int]]:
    """Return each step's sum of losses, and how many they are, over all ranks.

    Added up here, not step by step: that would be some kernels in every step. In the
    order of the ranks: an all-reduce may take another for each place in what it is
    given, and so for each number of steps.
    """
    found = torch.stack([it.total for of in losses for it in of])
    values = iter(found.double().tolist())
    mine = [
        (sum(next(values) for _ in of), float(sum(len(it.indices) for it in of)))
        for of in losses
    ]
    if dist.get_world_size() > 1:
        own = torch.tensor(mine, dtype=torch.float64, device=found.device)
        parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, own)
        total = parts[0]
        for part in parts[1:]:
            total += part
        mine = total.tolist()
    return [(loss_sum, int(count)) for loss_sum, count in mine]
