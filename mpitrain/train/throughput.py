"""How fast steps are, and which rank the others wait for."""

from __future__ import annotations

from array import array

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from mpitrain.train.metrics import (
    BACKWARD,
    COMMUNICATION,
    DATA,
    FORWARD,
    NUM_PHASES,
    Throughput,
)
from mpitrain.train.state import TrainState
from mpitrain.train.timer import StepSeconds

MIN_SECONDS = 1.25
"""Seconds of steps that a `Throughput` covers at least, across epochs; fewer before a
checkpoint and at the end. Less than the time between two synchronizations."""

# torch 2.15 renamed it; both take flat tensors.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


class ThroughputMonitor:
    """Measures steps until enough seconds of them are there for a `Throughput`.

    Attributes:
        own_seconds: What the steps since the last `Throughput` took on this rank.
        max_seconds: And on the slowest rank. Less than the sum of the maxima of each
            few of them, where ranks are late by turns.
    """

    def __init__(self, device: str) -> None:
        self.device = device
        self._clear()

    def _clear(self) -> None:
        self._step_seconds: StepSeconds = array("d")
        self._num_samples = 0
        self.own_seconds = self.max_seconds = 0.0
        self._until = 0, 0

    def add(
        self,
        num_samples: int,
        own_seconds: float,
        max_seconds: float,
        state: TrainState,
    ) -> None:
        """Add steps, up to the one that ``state`` names; set the seconds."""
        self._num_samples += num_samples
        self.own_seconds, self.max_seconds = own_seconds, max_seconds
        self._until = state.epoch, state.step

    def add_times(self, step_seconds: StepSeconds) -> None:
        """Add the seconds of each phase of these steps on this rank."""
        self._step_seconds.extend(step_seconds)

    def take(self, min_seconds: float) -> Throughput | None:
        """Return the throughput since the last one, if it covers so many seconds.

        Collective over the default group.
        """
        if not self._num_samples or self.max_seconds < min_seconds:
            return None
        (epoch, step), seconds = self._until, self._step_seconds
        num_samples, max_seconds = self._num_samples, self.max_seconds
        self._clear()
        is_cpu = self.device == "cpu"
        gpu_bytes = 0 if is_cpu else torch.cuda.max_memory_allocated(self.device)
        times = all_gather(summary_of(seconds, gpu_bytes), self.device)
        return throughput_of(times, epoch, step, num_samples, max_seconds)


def all_gather(numbers: array[float], device: str) -> NDArray[np.float64]:
    """Gather as many numbers of each rank: `(world_size, length)`.

    Collective over the default group, which carries tensors of this device.
    """
    world_size = dist.get_world_size()
    if world_size == 1:
        return np.array([numbers])
    mine = torch.frombuffer(numbers, dtype=torch.float64).to(device)
    found = mine.new_empty(world_size * len(numbers))  # gloo takes no other shape
    _all_gather(found, mine)
    return found.cpu().numpy().reshape(world_size, -1)


_NUM_SUMS = 3
"""Numbers before those of each step in what `summary_of` returns."""


def summary_of(step_seconds: StepSeconds, gpu_bytes: int) -> array[float]:
    """Return what `throughput_of` needs of a rank.

    Returns:
        Seconds of data and of computing, of all steps; those bytes; seconds of
        communication of each step.
    """
    sums = np.array(step_seconds).reshape(-1, NUM_PHASES).sum(0).tolist()
    computing = sums[FORWARD] + sums[BACKWARD]
    found = array("d", (sums[DATA], computing, gpu_bytes))
    return found + step_seconds[COMMUNICATION::NUM_PHASES]


def throughput_of(
    times: NDArray[np.float64], epoch: int, step: int, num_samples: int, seconds: float
) -> Throughput:
    """Compute the throughput of steps from the `summary_of` of all ranks.

    The last rank to finish its backward pass waits for nobody: its ``communication`` is
    what the all-reduce takes, and what the others have more is waiting for that rank.
    Waits within the backward pass (FSDP) count as computing.

    >>> late = [[0.0, 0.2, 0, 0.8], [0.0, 0.9, 0, 0.1]]
    >>> found = throughput_of(np.array(late), 1, 1, num_samples=8, seconds=1.0)
    >>> found.slowest_rank, round(found.communication_seconds, 3)
    (1, 0.1)
    >>> round(found.wait_seconds, 3), round(found.late_seconds, 3)
    (0.35, 0.7)
    """
    world_size = len(times)
    data, computing, gpu_bytes = times[:, :_NUM_SUMS].T
    communication = times[:, _NUM_SUMS:]
    shortest = communication.min(0)
    slowest, slowest_steps, late = -1, 0, 0.0
    if world_size > 1:
        last = communication.argmin(0)
        counts = np.bincount(last, minlength=world_size)
        slowest = int(counts.argmax())
        slowest_steps = int(counts[slowest])
        median = np.sort(communication, 0)[world_size // 2]
        late = float((median - shortest)[last == slowest].sum())
    return Throughput(
        epoch=epoch,
        step=step,
        num_steps=len(shortest),
        num_samples=num_samples,
        seconds=seconds,
        data_seconds=float(data.sum()) / world_size,
        compute_seconds=float(computing.sum()) / world_size,
        communication_seconds=float(shortest.sum()),
        wait_seconds=float((communication - shortest).sum()) / world_size,
        slowest_rank=slowest,
        slowest_steps=slowest_steps,
        late_seconds=late,
        gpu_bytes=int(gpu_bytes.max()) or None,
    )
