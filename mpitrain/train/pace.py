"""How fast steps are, and which rank the others wait for."""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from mpitrain.record.events import Listeners, Pace
from mpitrain.record.times import (
    BACKWARD,
    COMMUNICATION,
    DATA,
    FORWARD,
    NUM_PHASES,
    Laps,
    RankTimes,
)
from mpitrain.train.clock import Clock

PACE_SECONDS = 1.25
"""How many seconds of steps a pace tells of, at least, across epochs; fewer before a
checkpoint and at the end. Fewer than until sums meet, however long a step is."""


# Older versions of torch have it by another name; both take flat tensors.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class Untold:
    """The steps that no pace has told of yet.

    Args:
        clock: Knows where their time went on this rank.
        times: Also wants to know it; ``None``: nobody does.
        device: What ranks tell each other is sent from there.
        gpu_bytes: Tells the most memory of its GPU that this rank has held; 0 without.

    Attributes:
        own_seconds: What all of them took this rank.
        seconds: And the rank that took longest. That is less than the sum of the
            longest of each few of them, where ranks are late by turns.
    """

    def __init__(
        self,
        clock: Clock,
        times: RankTimes | None,
        device: str,
        gpu_bytes: Callable[[], int],
    ) -> None:
        self.device = device
        self._clock = clock
        self._times = times
        self._gpu_bytes = gpu_bytes
        self._clear()

    def _clear(self) -> None:
        self._laps: Laps = array("d")
        self._num_samples = 0
        self.own_seconds = self.seconds = 0.0
        self._until = 0, 0

    def add(
        self,
        num_samples: int,
        own_seconds: float,
        seconds: float,
        until: tuple[int, int],
    ) -> None:
        """Take in steps; where their time went is asked for later.

        Args:
            num_samples: In them, on all ranks.
            own_seconds: What they, and all before them that are untold, took this rank.
            seconds: And the rank that took longest.
            until: The epoch, and the number, of the last.
        """
        self._num_samples += num_samples
        self.own_seconds, self.seconds = own_seconds, seconds
        self._until = until

    def tell(self, listeners: Listeners, at_least: float) -> None:
        """Tell how fast they were, if it is time to; then none of them is left.

        Collective over the default group.

        Args:
            listeners: Told.
            at_least: Not where they took fewer seconds; equal on all ranks.
        """
        if not self._num_samples:
            return
        is_due = self.seconds >= at_least
        if is_due or (self._times is not None and self._times.is_late):
            self._take()  # before another rank is waited for
        if is_due:
            self._tell(listeners)

    def _take(self) -> None:
        laps, between = self._clock.take()
        self._laps.extend(laps)
        if self._times is not None:
            self._times.add(self._until[1], laps, between)

    def _tell(self, listeners: Listeners) -> None:
        (epoch, step), num_samples, laps = self._until, self._num_samples, self._laps
        seconds = self.seconds
        self._clear()
        times = of_all_ranks(times_of(laps, self._gpu_bytes()), self.device)
        if listeners:
            listeners.pace_done(pace_of(times, epoch, step, num_samples, seconds))


def of_all_ranks(own: array[float], device: str) -> NDArray[np.float64]:
    """Tell all ranks what each of them knows.

    Collective over the default group.

    Args:
        own: Of one length on all ranks.
        device: It is sent from there.

    Returns:
        `(world_size, length)`.
    """
    num = dist.get_world_size()
    if num == 1:
        return np.array([own])
    mine = torch.frombuffer(own, dtype=torch.float64).to(device)
    found = mine.new_empty(num * len(own))  # gloo takes no other shape
    _all_gather(found, mine)
    return found.cpu().numpy().reshape(num, -1)


_NUM_SUMS = 3
"""Numbers before those of each step in what `times_of` returns."""


def times_of(laps: Laps, gpu_bytes: int) -> array[float]:
    """Sum up where the time of steps went, as `pace_of` wants it of each rank.

    Args:
        laps: The seconds of each phase of each of them.
        gpu_bytes: Most memory of its GPU that this rank has held; 0 without one.

    Returns:
        The seconds of data and of computing, of all of them; those bytes; and the
        seconds of communication of each step.
    """
    sums = np.array(laps).reshape(-1, NUM_PHASES).sum(0).tolist()
    computing = sums[FORWARD] + sums[BACKWARD]
    found = array("d", (sums[DATA], computing, gpu_bytes))
    return found + laps[COMMUNICATION::NUM_PHASES]


def pace_of(
    times: NDArray[np.float64], epoch: int, step: int, num_samples: int, seconds: float
) -> Pace:
    """Sum up how fast steps were on all ranks.

    The last rank that has its gradients waits for nobody: what is left for it until
    they have met is what communication takes, and what the others waited longer was for
    that rank. Where ranks also meet within the backward pass (fsdp), the wait there
    counts as computing.

    Args:
        times: float64 `(world_size, 3 + steps)`: what `times_of` returned on each.
        epoch: Of the last step.
        step: Its number.
        num_samples: In all of them.
        seconds: Of all of them, of the rank that took longest.

    >>> late = [[0.0, 0.2, 0, 0.8], [0.0, 0.9, 0, 0.1]]
    >>> pace = pace_of(np.array(late), epoch=1, step=1, num_samples=8, seconds=1.0)
    >>> pace.slowest_rank, round(pace.communication_seconds, 3)
    (1, 0.1)
    >>> round(pace.wait_seconds, 3), round(pace.late_seconds, 3)
    (0.35, 0.7)
    """
    world_size = len(times)
    data, computing, gpu_bytes = times[:, :_NUM_SUMS].T
    communication = times[:, _NUM_SUMS:]
    least = communication.min(0)
    slowest, slowest_steps, late = -1, 0, 0.0
    if world_size > 1:
        last = communication.argmin(0)
        counts = np.bincount(last, minlength=world_size)
        slowest = int(counts.argmax())
        slowest_steps = int(counts[slowest])
        middle = np.sort(communication, 0)[world_size // 2]
        late = float((middle - least)[last == slowest].sum())
    held = int(gpu_bytes.max())
    more: dict[str, Any] = {"gpu_bytes": held} if held else {}
    return Pace(
        epoch=epoch,
        step=step,
        num_steps=len(least),
        num_samples=num_samples,
        seconds=seconds,
        data_seconds=float(data.sum()) / world_size,
        compute_seconds=float(computing.sum()) / world_size,
        communication_seconds=float(least.sum()),
        wait_seconds=float((communication - least).sum()) / world_size,
        slowest_rank=slowest,
        slowest_steps=slowest_steps,
        late_seconds=late,
        **more,
    )
