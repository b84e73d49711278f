"""What steps came to, kept on the device until somebody asks; and how far all is."""

from __future__ import annotations

import functools
import itertools
import math
import operator
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from mpitrain.data.sharding import Indices
from mpitrain.record.events import Epoch, StepRow
from mpitrain.train.pace import Untold, of_all_ranks

MEET_SECONDS = 2.0
"""About how often the sums of all ranks meet, so that somebody sees them."""

MOST_AT_ONCE = 512
"""Steps whose sums meet at once, at most: they may become slower."""

MOST_ROWS = 1 << 18
"""Steps times ranks, at most: so many rows come together on every rank."""


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
    """Gathers losses, learning rates and norms, step by step.

    Args:
        untold: Gets those whose sums have met.

    Attributes:
        untold: That.
    """

    def __init__(self, untold: Untold) -> None:
        self.untold = untold
        self._steps: list[_Taken] = []
        self._num_at_once = 1
        """After how many steps the ranks' sums meet; equal on all ranks."""

    def begin_anew(self) -> None:
        """Forget how fast steps were: those of another stage may be much slower."""
        self._num_at_once = 1

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def are_due(self) -> bool:
        """Whether it is time for the sums of all ranks to meet; equal on all ranks."""
        return len(self._steps) >= self._num_at_once

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

    def meet(
        self,
        so_far: SoFar,
        seconds: float,
        *,
        is_heard: bool,
    ) -> list[StepRow]:
        """Add the sums of all ranks up, of the steps since the last call.

        Collective over the default group.

        Args:
            so_far: Its sums grow; its steps have been counted already.
            seconds: Wall time of all of them.
            is_heard: Whether somebody here wants to hear what they came to.

        Returns:
            That: a row per step, if so; equal on all ranks.
        """
        steps, self._steps = self._steps, []
        if not steps:
            return []
        num, end = len(steps), so_far.num_steps
        num_ranks, untold = dist.get_world_size(), self.untold
        own_seconds = untold.own_seconds + seconds
        found, longest = _sums_of(steps), own_seconds
        if num_ranks > 1:
            found, longest = _added_up(found, own_seconds, untold.device)
        sums, counts = found[:num], found[num:]
        for step, loss_sum, count in zip(steps, sums, counts, strict=True):
            if step.is_applied:
                so_far.loss_sum += loss_sum
                so_far.num_samples += int(count)
        at_once = round(MEET_SECONDS * num / (longest - untold.seconds))
        untold.add(int(sum(counts)), own_seconds, longest, (so_far.epoch, end))
        most = min(2 * self._num_at_once, MOST_AT_ONCE, MOST_ROWS // num_ranks)
        self._num_at_once = max(1, min(at_once, most))
        if not is_heard:
            return []
        losses = map(operator.truediv, sums, counts)
        rates, norms = [step.rate for step in steps], [step.norm for step in steps]
        numbers = range(end - num + 1, end + 1)
        epochs = itertools.repeat(so_far.epoch)
        return list(map(StepRow, epochs, numbers, losses, rates, norms))


def _added_up(
    own: list[float], seconds: float, device: str
) -> tuple[list[float], float]:
    """Return the sums over all ranks, and the most seconds of one.

    Gathered, and not added up on the way: an all-reduce may take another order of the
    ranks for each place in what it is given, and so for each number of steps.
    """
    of_ranks = of_all_ranks(array("d", (seconds, *own)), device)
    found = functools.reduce(np.add, of_ranks)  # in the order of the ranks
    return found[1:].tolist(), max(of_ranks[:, 0].tolist())


def _sums_of(steps: Sequence[_Taken]) -> list[float]:
    """Return the sum of each step's losses on this rank, and then their numbers.

    Summed up here, not step by step: that would be some kernels in every step.
    """
    losses = [step.losses for step in steps]
    values = torch.stack([it.total for of_step in losses for it in of_step]).tolist()
    counts: list[float] = [len(it.indices) for of_step in losses for it in of_step]
    nums = list(map(len, losses))
    if set(nums) != {1}:
        values, counts = _by_step(values, nums), _by_step(counts, nums)
    return [*values, *counts]


def _by_step(values: Sequence[float], nums: Sequence[int]) -> list[float]:
    """Sum up so many of them in each step.

    >>> _by_step([1, 2, 3, 4, 5], [2, 3])
    [3, 12]
    """
    left = iter(values)
    return [sum(itertools.islice(left, num)) for num in nums]
