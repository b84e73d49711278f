"""The search of `--num-workers auto`: how many workers read, and how far ahead.

A pure function of what it is told of each step: the seconds that the rank waited for
samples, and those of the whole step.

    window of steps -> waits < 2 %, twice:           done, samples are no limit
                    -> faster than the best by 5 %:  it is the best; try more workers
                    -> not faster:                   try a longer queue from the best
                    -> neither was faster:           done, with the best

Workers that wait for a disk are useful in any number, those that compute only on cores
of their own; the search does not ask which, but what an attempt has brought.
"""

from __future__ import annotations

import math
from statistics import median, stdev
from typing import NamedTuple

ENOUGH = 0.02  # of the time waited for samples: nothing is to be won
IS_FASTER = 0.95  # of a step's time: below it an attempt has paid
MIN_STEPS, MIN_SECONDS = 8, 0.5  # of a window; shorter ones measure noise
MAX_STEPS, ERROR = 64, 0.02  # a window is that long, if its mean is less certain
MAX_PREFETCH = 8


class Reading(NamedTuple):
    """How a rank's samples are read; 0 workers: by the rank itself."""

    num_workers: int
    prefetch: int = 2  # batches ahead, per worker


class WorkerTuner:
    """Finds the `Reading` by which steps take the least time.

    Args:
        start: The number of workers to begin with.
        most: The maximum number.

    Attributes:
        reading: To be used now; it may change in `add`.
        is_done: Whether it has been found.
        max_batches: How many may be ahead, for the memory that they take.
        waited: Part of the time of steps waited for samples with it, 0 to 1, once done.
    """

    def __init__(self, start: int, most: int) -> None:
        self.reading, self.is_done, self.waited = Reading(start), False, 1.0
        self._most, self.max_batches = most, math.inf
        self._best, self._best_seconds = self.reading, math.inf
        self._attempts, self._enough_before = list[Reading](), False
        self._skip()

    def _skip(self, batches_per_step: float = 1) -> None:
        """Forget the window; leave out the steps whose batches are read already."""
        workers, prefetch = self.reading
        self._left_out = 1 + math.ceil(workers * prefetch / batches_per_step)
        self._steps: list[tuple[float, float]] = []

    def add(self, waited: float, seconds: float, num_batches: int = 1) -> bool:
        """Take the times of a step; return whether `reading` is another one now."""
        self._left_out -= 1
        if self.is_done or self._left_out >= 0:
            return False
        self._steps.append((waited, seconds - waited))
        num, times = len(self._steps), [sum(step) for step in self._steps]
        num_steps = max(MIN_STEPS, 3 * self.reading.num_workers / num_batches)
        if num < num_steps or sum(times) < MIN_SECONDS:
            return False
        # The median: a validation or a checkpoint may have come between two steps. Not
        # of the waits: each n-th batch may be the one that n workers are waited for.
        mean_wait = sum(wait for wait, _ in self._steps) / num
        seconds = mean_wait + median(other for _, other in self._steps)
        error = stdev(times) / math.sqrt(num)
        if num < MAX_STEPS and error > max(ERROR * seconds, mean_wait / 8):
            return False
        before = self.reading
        self._decide(mean_wait / seconds, seconds)
        self._skip(num_batches)
        return self.reading != before

    def _decide(self, waited: float, seconds: float) -> None:
        is_faster = seconds < IS_FASTER * self._best_seconds
        if is_faster:
            self._best, self._best_seconds = self.reading, seconds
            self.waited = waited
            self._attempts = self._next(waited)
        if waited < ENOUGH and (is_faster or self.reading == self._best):
            # The first steps of a training are slow, and hide a wait: look again.
            self.is_done, self._enough_before = self._enough_before, True
            self.waited = waited
            return
        self._enough_before = False
        self.is_done = not self._attempts
        self.reading = self._best if self.is_done else self._attempts.pop(0)

    def _next(self, waited: float) -> list[Reading]:
        """Return what to try from the best on: more workers, then a longer queue."""
        workers, prefetch = self._best
        # If all are busy, so many take no longer than the rest of the step.
        wanted = math.ceil((workers or waited) / max(1 - waited, 0.25))
        more = min(max(wanted, workers + 1), self._most)
        found = [Reading(more, prefetch)]
        if workers:
            found.append(Reading(workers, min(2 * prefetch, MAX_PREFETCH)))
        found = [it for it in found if it.num_workers * it.prefetch <= self.max_batches]
        return [it for it in found if it != self._best]
