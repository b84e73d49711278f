"""The metrics of steps, kept on the device until the ranks synchronize them."""

from __future__ import annotations

import functools
import itertools
import operator
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from mpitrain.data.sharding import Indices
from mpitrain.train.metrics import StepMetrics
from mpitrain.train.state import TrainState
from mpitrain.train.throughput import ThroughputMonitor, all_gather

SYNC_SECONDS = 2.0
"""About how often the ranks synchronize the metrics of their steps."""

MAX_STEPS = 512
"""Most steps between two synchronizations: they may become slower."""

MAX_ROWS = 1 << 18
"""Most steps times ranks: every rank receives so many numbers."""


class Losses(NamedTuple):
    """The loss of one micro-batch."""

    indices: Indices
    """Numbers of its samples, int64 `(N,)`."""
    total: Tensor
    """Sum of their losses, `()`, on the device."""


class _Step(NamedTuple):
    losses: list[Losses]
    lr: float
    grad_norm: float
    is_applied: bool


class PendingSteps:
    """Steps whose metrics the ranks have not synchronized yet."""

    def __init__(self, monitor: ThroughputMonitor) -> None:
        self._monitor = monitor
        self._steps: list[_Step] = []
        self._sync_every = 1  # equal on all ranks

    def __len__(self) -> int:
        return len(self._steps)

    @property
    def is_sync_due(self) -> bool:
        """Whether it is time to call `sync`; equal on all ranks."""
        return len(self._steps) >= self._sync_every

    def reset_interval(self) -> None:
        """Forget how long steps take: those of another stage may be much slower."""
        self._sync_every = 1

    def add(
        self, losses: list[Losses], lr: float, grad_norm: float, *, is_applied: bool
    ) -> None:
        """Add a step."""
        self._steps.append(_Step(losses, lr, grad_norm, is_applied))

    def sync(self, state: TrainState, seconds: float) -> list[StepMetrics]:
        """Sum the losses of the steps since the last call over all ranks.

        Collective over the default group. They took ``seconds`` on this rank, and are
        counted in ``state.step`` already; the sums of ``state`` grow.

        Returns:
            The metrics of each step; equal on all ranks.
        """
        steps, self._steps = self._steps, []
        if not steps:
            return []
        monitor, num = self._monitor, len(steps)
        own_seconds = monitor.own_seconds + seconds
        # Gathered and summed in the order of the ranks: an all-reduce may take another
        # order for each place of its tensor, and so for each number of steps.
        numbers_of_rank = array("d", (own_seconds, *_sums_of(steps)))
        of_ranks = all_gather(numbers_of_rank, monitor.device)
        found = functools.reduce(np.add, of_ranks)[1:].tolist()
        max_seconds = float(of_ranks[:, 0].max())
        sums, counts = found[:num], found[num:]
        for step, loss_sum, count in zip(steps, sums, counts, strict=True):
            if step.is_applied:
                state.loss_sum += loss_sum
                state.num_samples += int(count)
        wanted = round(SYNC_SECONDS * num / (max_seconds - monitor.max_seconds))
        monitor.add(int(sum(counts)), own_seconds, max_seconds, state)
        most = min(2 * self._sync_every, MAX_STEPS, MAX_ROWS // len(of_ranks))
        self._sync_every = max(1, min(wanted, most))
        numbers = range(state.step - num + 1, state.step + 1)
        losses = map(operator.truediv, sums, counts)
        lrs, norms = [step.lr for step in steps], [step.grad_norm for step in steps]
        epochs = itertools.repeat(state.epoch)
        return list(map(StepMetrics, epochs, numbers, losses, lrs, norms))


def _sums_of(steps: Sequence[_Step]) -> list[float]:
    """Return the loss sum of each step on this rank, and then its sample count.

    Summed here for many steps at once: in every step it would be some kernels more.
    """
    losses = [step.losses for step in steps]
    values = torch.stack(
        [micro_batch.total for of_step in losses for micro_batch in of_step]
    ).tolist()
    counts: list[float] = [
        len(micro_batch.indices) for of_step in losses for micro_batch in of_step
    ]
    nums = [len(of_step) for of_step in losses]
    if set(nums) != {1}:
        values, counts = _sum_groups(values, nums), _sum_groups(counts, nums)
    return [*values, *counts]


def _sum_groups(values: Sequence[float], nums: Sequence[int]) -> list[float]:
    """Sum consecutive groups of values.

    >>> _sum_groups([1, 2, 3, 4, 5], [2, 3])
    [3, 12]
    """
    left = iter(values)
    return [sum(itertools.islice(left, num)) for num in nums]
