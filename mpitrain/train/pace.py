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
        self._seconds = 0.0
        self._until = 0, 0

    def add(self, num_samples: int, seconds: float, until: tuple[int, int]) -> None:
        """Take in steps; their times are asked for later.

        Args:
            num_samples: In all of them, on all ranks.
            seconds: Of all of them, of the rank that took longest.
            until: The epoch, and the number, of the last.
        """
        self._num_samples += num_samples
        self._seconds += seconds
        self._until = until

    def tell(self, listeners: Listeners, step: int, at_least: float) -> None:
        """Tell how fast they were, if it is time to; then none of them is left.

        Collective over the default group.

        Args:
            listeners: Told.
            step: The number of the last step of all.
            at_least: Not where they took fewer seconds; equal on all ranks.
        """
        is_due = self._num_samples > 0 and self._seconds >= at_least
        if is_due or (self._times is not None and self._times.is_due):
            self._take(step)
        if is_due:
            self._tell(listeners)

    def _take(self, step: int) -> None:
        laps, between = self._clock.take()
        self._laps.extend(laps)
        if self._times is not None:
            self._times.add(step, laps, between)

    def _tell(self, listeners: Listeners) -> None:
        own = times_of(self._laps, self._gpu_bytes())
        times = of_all_ranks(own, self.device)
        (epoch, step), num_samples = self._until, self._num_samples
        self._clear()
        if listeners:
            listeners.pace_done(
                pace_of(times, epoch=epoch, step=step, num_samples=num_samples)
            )


def of_all_ranks(own: NDArray[np.float64], device: str) -> NDArray[np.float64]:
    """Tell all ranks what each of them knows.

    Collective over the default group.

    Args:
        own: Of one shape on all ranks.
        device: It is sent from there.

    Returns:
        `(world_size, ...)`.
    """
    num = dist.get_world_size()
    if num == 1:
        return own[None]
    mine = torch.from_numpy(own).to(device).flatten()
    found = mine.new_empty(num * mine.numel())  # gloo takes no other shape
    _all_gather(found, mine)
    return found.cpu().numpy().reshape(num, *own.shape)


def times_of(laps: Laps, gpu_bytes: int) -> NDArray[np.float64]:
    """Sum up where the time of steps went, as `pace_of` wants it of each rank.

    Args:
        laps: The seconds of each phase of each of them.
        gpu_bytes: Most memory of its GPU that this rank has held; 0 without one.

    Returns:
        float64 `(steps, 5)`.
    """
    each = np.array(laps).reshape(-1, NUM_PHASES)
    computing = each[:, FORWARD] + each[:, BACKWARD]
    held = np.full(len(each), float(gpu_bytes))
    return np.column_stack(
        (each.sum(1), each[:, DATA], computing, each[:, COMMUNICATION], held)
    )


def pace_of(
    times: NDArray[np.float64], *, epoch: int, step: int, num_samples: int
) -> Pace:
    """Sum up how fast steps were on all ranks.

    The last rank that has its gradients waits for nobody: what is left for it until
    they have met is what communication takes, and what the others waited longer was for
    that rank. Where ranks also meet within the backward pass (fsdp), the wait there
    counts as computing.

    Args:
        times: float64 `(world_size, steps, 5)`: seconds of all, of data, of computing,
            of communication, and bytes of GPU memory.
        epoch: Of the last step.
        step: Its number.
        num_samples: In all of them.

    >>> late = [[[1.0, 0.0, 0.2, 0.8, 0.0]], [[1.0, 0.0, 0.9, 0.1, 0.0]]]
    >>> pace = pace_of(np.array(late), epoch=1, step=1, num_samples=8)
    >>> pace.slowest_rank, round(pace.communication_seconds, 3)
    (1, 0.1)
    >>> round(pace.wait_seconds, 3), round(pace.late_seconds, 3)
    (0.35, 0.7)
    """
    world_size, num_steps, _ = times.shape
    whole, data, computing, communication, gpu_bytes = np.moveaxis(times, 2, 0)
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
        num_steps=num_steps,
        num_samples=num_samples,
        seconds=float(whole.sum(1).max()),
        data_seconds=float(data.sum()) / world_size,
        compute_seconds=float(computing.sum()) / world_size,
        communication_seconds=float(least.sum()),
        wait_seconds=float((communication - least).sum()) / world_size,
        slowest_rank=slowest,
        slowest_steps=slowest_steps,
        late_seconds=late,
        **more,
    )
