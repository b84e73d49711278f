"""How fast steps are, and which rank the others wait for."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpitrain.record.events import Listener, Pace, StepRow
from mpitrain.record.times import BACKWARD, COMMUNICATION, DATA, FORWARD

PACE_SECONDS = 1.0
"""How many seconds of steps a pace tells of, at least, across epochs; fewer before a
checkpoint and at the end."""


class Untold:
    """The times of steps that no pace has told of yet. Equal on all ranks."""

    def __init__(self) -> None:
        self._times: list[NDArray[np.float64]] = []
        self._num_samples = 0
        self._seconds = np.zeros(1)
        """Of each rank, once there are some."""
        self._last: StepRow | None = None

    def add(self, times: NDArray[np.float64], num_samples: int, last: StepRow) -> float:
        """Take in steps.

        Args:
            times: As `pace_of` wants them.
            num_samples: In all of them.
            last: What the last of them came to.

        Returns:
            Seconds of all of them, of the rank that took longest.
        """
        seconds = times[:, :, 0].sum(1)
        self._times.append(times)
        self._num_samples += num_samples
        self._seconds = self._seconds + seconds
        self._last = last
        return float(seconds.max())

    def tell(self, listener: Listener, at_least: float) -> None:
        """Tell how fast they were; none of them is left.

        Args:
            listener: Told.
            at_least: Not where they took fewer seconds.
        """
        if self._last is None or self._seconds.max() < at_least:
            return
        pace = pace_of(
            np.concatenate(self._times, axis=1),
            epoch=self._last.epoch,
            step=self._last.step,
            num_samples=self._num_samples,
        )
        self._times, self._num_samples, self._seconds = [], 0, np.zeros(1)
        self._last = None
        listener.pace_done(pace)


def times_of(laps: NDArray[np.float64]) -> NDArray[np.float64]:
    """Sum up where the time of steps went.

    Args:
        laps: float64 `(steps, phases)`: seconds of each.

    Returns:
        float64 `(steps, 4)`: seconds of all, of data, of computing, of communication.
    """
    computing = laps[:, FORWARD] + laps[:, BACKWARD]
    return np.column_stack(
        (laps.sum(1), laps[:, DATA], computing, laps[:, COMMUNICATION])
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
