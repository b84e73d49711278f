"""Slow ranks take fewer micro-batches; with ``--bitwise`` that changes no result."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from statistics import median

from mpitrain.data.sharding import MicroBatchAssignment

NUM_MEASUREMENTS = 5  # the median of these counts; one for each reduction of metrics
MIN_MEASUREMENTS = 3  # the first passes are slower
MIN_GAIN = 0.05  # of the time of a step: batches are loaded anew, and more sums sent


class Balance:
    """Decides which rank takes how many micro-batches. Equal on all ranks."""

    def __init__(self) -> None:
        self._measured: deque[list[float]] = deque(maxlen=NUM_MEASUREMENTS)

    def assignment(
        self, present: MicroBatchAssignment, num: int, seconds: list[float]
    ) -> MicroBatchAssignment:
        """Return a faster assignment, or the present one.

        ``num`` are the micro-batches of a step; ``seconds`` are of one on each rank,
        measured with the present assignment since the last call.

        >>> balance, even = Balance(), MicroBatchAssignment(world_size=2)
        >>> for seconds in ([0.1, 0.2], [0.1, 0.2], [0.5, 0.1]):
        ...     found = balance.assignment(even, 12, seconds)
        ...     print([len(part) for part in found.all_ranks(12)])
        [6, 6]
        [6, 6]
        [8, 4]
        """
        self._measured.append(seconds)
        if len(self._measured) < MIN_MEASUREMENTS:
            return present
        medians: list[float] = list(map(median, zip(*self._measured, strict=True)))
        if min(medians) <= 0:
            return present
        other = replace(present, speeds=tuple(1 / it for it in medians))

        def step_seconds(assignment: MicroBatchAssignment) -> float:
            parts = assignment.all_ranks(num)
            return max(
                len(part) * each for part, each in zip(parts, medians, strict=True)
            )

        gain = 1 - step_seconds(other) / step_seconds(present)
        return other if gain > MIN_GAIN else present
