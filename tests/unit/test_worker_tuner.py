"""The search for the number of workers, against a simulated pipeline."""

from __future__ import annotations

import heapq
import random
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from statistics import mean, median

import pytest

from mpitrain.data.worker_tuner import Reading, WorkerTuner

NUM_STEPS = 1500  # of an epoch in which the search has to be over
GRID = [
    Reading(workers, prefetch)
    for workers in (1, 2, 3, 4, 6, 8, 12, 16)
    for prefetch in (2, 8)
]
GRID.append(Reading(0))


@dataclass
class Costs:
    """Seconds of a batch on a core, of waiting for its files, and of a step."""

    decode: float
    latency: float
    step: float
    cores: int
    spread: float = 0.0  # relative, of each
    seed: int = 0


class Pipeline:
    """Workers that share cores, and hand over their batches in order."""

    def __init__(self, costs: Costs, reading: Reading) -> None:
        self.costs, self.now = costs, 0.0
        # Of each its own: each batch and step costs the same with any `Reading`.
        self.of_files, self.of_cores, self.of_steps = (
            random.Random(f"{costs.seed} {kind}") for kind in range(3)
        )
        self.cores = [0.0] * costs.cores  # when each is free
        self.free: list[float] = []  # when each worker can begin its next batch
        self.ready: deque[float] = deque()  # when the batches ahead are read
        self.change(reading)

    def change(self, reading: Reading) -> None:
        self.reading = reading
        more = reading.num_workers - len(self.free)
        self.free += [self.now] * more
        self.free = sorted(self.free)[: reading.num_workers]
        heapq.heapify(self.free)
        heapq.heapify(self.cores)

    def noisy(self, seconds: float, draws: random.Random) -> float:
        spread = self.costs.spread
        return seconds * draws.lognormvariate(-spread * spread / 2, spread)

    def read(self, begin: float) -> float:
        """Return when a batch is read: its files, then its turn on a core."""
        there = begin + self.noisy(self.costs.latency, self.of_files)
        core = heapq.heappop(self.cores)
        end = max(there, core) + self.noisy(self.costs.decode, self.of_cores)
        heapq.heappush(self.cores, end)
        return end

    def fill(self) -> None:
        workers, prefetch = self.reading
        while len(self.ready) < workers * prefetch:
            begin = max(heapq.heappop(self.free), self.now)
            end = self.read(begin)
            heapq.heappush(self.free, end)
            self.ready.append(end)

    def steps(self) -> Iterator[tuple[float, float]]:
        """Yield the seconds waited, and of the step, for ever."""
        while True:
            self.fill()
            begin = self.now
            end = self.ready.popleft() if self.ready else self.read(self.now)
            self.now = max(self.now, end)
            waited = self.now - begin
            self.fill()
            self.now += self.noisy(self.costs.step, self.of_steps)
            yield waited, self.now - begin


def seconds_per_step(costs: Costs, reading: Reading) -> float:
    steps = islice(Pipeline(costs, reading).steps(), 50, 350)
    return mean(seconds for _, seconds in steps)


def tune(costs: Costs, start: int, most: int = 16) -> tuple[WorkerTuner, int]:
    """Return a tuner after an epoch, and the steps after which it was done."""
    tuner = WorkerTuner(start, most)
    pipeline, num_done = Pipeline(costs, tuner.reading), NUM_STEPS
    for number, (waited, seconds) in enumerate(pipeline.steps(), 1):
        if tuner.add(waited, seconds):
            pipeline.change(tuner.reading)
        if tuner.is_done or number == NUM_STEPS:
            num_done = number
            break
    return tuner, num_done


def random_costs(number: int) -> Costs:
    draw = random.Random(number)
    return Costs(
        decode=10 ** draw.uniform(-3.5, -0.5),
        latency=draw.choice([0.0, 10 ** draw.uniform(-3.5, -0.3)]),
        step=10 ** draw.uniform(-2.5, -0.5),
        cores=draw.choice([1, 2, 3, 4, 8, 16]),
        spread=draw.choice([0.0, 0.1, 0.5]),
        seed=number,
    )


def test_the_search_is_within_a_tenth_of_the_best_of_a_grid() -> None:
    ratios, of_constant, num_steps = [], [], []
    for number in range(200):
        costs = random_costs(number)
        tuner, num = tune(costs, start=min(8, costs.cores - 1))
        num_steps.append(num)
        best = min(seconds_per_step(costs, reading) for reading in GRID)
        ratios.append(seconds_per_step(costs, tuner.reading) / best)
        constant = Reading(max(8, 2 * costs.cores))
        of_constant.append(seconds_per_step(costs, constant) / best)
    within = mean(ratio <= 1.1 for ratio in ratios)
    print(f"{within:.1%} within 10 %, at most {max(ratios):.2f}")
    print(f"mean {mean(ratios):.3f}, of twice the cores or 8 {mean(of_constant):.3f}")
    print(f"steps: median {median(num_steps)}, at most {max(num_steps)}")
    assert within >= 0.95
    assert max(num_steps) < NUM_STEPS


def test_it_ends_where_the_step_is_bound_by_compute() -> None:
    tuner, num_steps = tune(Costs(0.01, 0.0, 0.1, cores=4), start=1)
    assert tuner.reading == Reading(1)
    assert tuner.waited < 0.01
    assert num_steps < 30


def test_cores_that_do_not_suffice_are_told_by_the_time_waited() -> None:
    tuner, _ = tune(Costs(0.1, 0.0, 0.01, cores=2), start=1)
    assert tuner.reading.num_workers in (2, 3, 4)
    assert tuner.waited > 0.7  # 50 ms for samples, 10 ms for a step


def test_a_validation_between_two_steps_is_none_of_their_time() -> None:
    tuner = WorkerTuner(1, 8)
    for number in range(1000):
        tuner.add(0.09, 5.0 if number % 10 == 9 else 0.1)
    assert tuner.is_done
    assert tuner.waited == pytest.approx(0.9)


def test_no_more_batches_are_ahead_than_memory_has_room_for() -> None:
    tuner = WorkerTuner(1, 16)
    tuner.max_batches = 8
    seen = {tuner.reading}
    while not tuner.is_done:  # each attempt pays
        num = tuner.reading.num_workers * tuner.reading.prefetch
        tuner.add(0.9 / num, 0.9 / num + 0.01)
        seen.add(tuner.reading)
    assert max(it.num_workers * it.prefetch for it in seen) == 8
