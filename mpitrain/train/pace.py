"""How fast steps are, and which rank the others wait for. Pure functions."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from mpitrain.record.events import Pace
from mpitrain.record.times import BACKWARD, COMMUNICATION, DATA, FORWARD, Seconds


def times_of(seconds: Seconds) -> tuple[float, float, float, float]:
    """Sum up where the time of a step went.

    Args:
        seconds: Of each phase.

    Returns:
        Seconds of all, of data, of computing, and of communication.
    """
    computing = seconds[FORWARD] + seconds[BACKWARD]
    return sum(seconds), seconds[DATA], computing, seconds[COMMUNICATION]


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
        epoch: Of the steps.
        step: The last one's number.
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
