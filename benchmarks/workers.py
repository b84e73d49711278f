"""What `--num-workers auto` finds, beside a grid of workers and prefetch.

    .venv/bin/python benchmarks/workers.py

Batches cost seconds to wait for (sleep) and on a core (spin), steps cost seconds
(sleep, as on a GPU). The search runs first; then its result and each point of the grid
take turns. A ratio is of one round: the time of steps with what the search found over
that of the best point, which is the one of the lowest median.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from in_memory import WORLD
from record import about, spread, write
from torch.utils.data import Dataset

from mpitrain.data.map_style import MapStyle
from mpitrain.data.sharding import RankShard
from mpitrain.data.worker_pool import WorkerPool
from mpitrain.data.worker_tuner import Reading, WorkerTuner

MAX_STEPS = 3000  # of the search
BATCH_SIZE = 4


class Costs(NamedTuple):
    """Milliseconds of a batch, of waiting and on a core, and of a step."""

    latency: float
    decode: float
    step: float
    spread: float = 0.0  # of the batch, as a standard deviation of its logarithm


CASES = {
    "files": Costs(40, 0, 8),
    "slow-files": Costs(150, 0, 10),
    "step": Costs(5, 0, 20),
    "even": Costs(20, 0, 20),
    "unsteady": Costs(40, 0, 10, spread=0.7),
    "decode": Costs(0, 12, 4),
    "both": Costs(20, 5, 8),
}

GRID = [Reading(workers, size) for workers in (1, 2, 4, 6, 8) for size in (2, 4)]
GRID.append(Reading(0))


class Samples(Dataset[Any]):
    """Samples that take as long as `Costs` say."""

    def __init__(self, costs: Costs) -> None:
        self.costs = costs

    def __len__(self) -> int:
        return BATCH_SIZE * MAX_STEPS

    def __getitem__(self, index: int) -> Any:
        sigma = self.costs.spread
        factor = random.lognormvariate(-(sigma**2) / 2, sigma) / BATCH_SIZE / 1000
        time.sleep(self.costs.latency * factor)
        end = time.thread_time() + self.costs.decode * factor
        while time.thread_time() < end:
            pass
        return torch.zeros(1000), index


def run(costs: Costs, tuner: WorkerTuner | None, num_steps: int) -> Any:
    """Return the times of the ends of steps, at most until the search ends; and it."""
    cores = len(os.sched_getaffinity(0))
    samples = MapStyle(
        Samples(costs),
        seed=1,
        num_workers="auto",
        world=replace(WORLD, num_cores=cores),
    )
    order = np.arange(BATCH_SIZE * num_steps, dtype=np.int64)
    shard = RankShard(
        rank=0, world_size=1, global_batch_size=BATCH_SIZE, order=order[:BATCH_SIZE]
    )
    list(samples.batches(shard, 0))  # starts the pool
    pool: Any = samples._loader
    assert isinstance(pool, WorkerPool)
    pool.tuner, ends = tuner or pool.tuner, []
    for _ in samples.batches(replace(shard, order=order), 0):
        time.sleep(costs.step / 1000)
        ends.append(time.perf_counter())
        if tuner is None and pool.tuner.is_done:
            break
    samples.close()
    return ends, pool.tuner


def milliseconds(costs: Costs, reading: Reading, num_steps: int) -> float:
    """Return the time of a step with fixed numbers, after the queue was filled."""
    tuner = WorkerTuner(reading.num_workers, reading.num_workers)
    tuner.reading, tuner.is_done = reading, True
    skipped = reading.num_workers * reading.prefetch + 5
    ends, _ = run(costs, tuner, skipped + num_steps)
    return 1000 * (ends[-1] - ends[skipped - 1]) / num_steps


def main() -> None:
    """Measure, and print a line for each case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    report: dict[str, Any] = about("benchmarks/workers.py")
    for name in args.cases:
        costs = CASES[name]
        ends, tuner = run(costs, None, MAX_STEPS)
        readings = [tuner.reading, *(it for it in GRID if it != tuner.reading)]
        times: dict[Reading, list[float]] = {it: [] for it in readings}
        for _ in range(args.rounds):
            for reading in readings:
                times[reading].append(milliseconds(costs, reading, args.steps))
        best = min(times, key=lambda it: statistics.median(times[it]))
        pairs = zip(times[tuner.reading], times[best], strict=True)
        ratios = [found / other for found, other in pairs]
        report[name] = {
            "found": tuner.reading,
            "best": best,
            "waited": tuner.waited,
            "steps": len(ends),
            "milliseconds": spread(times[tuner.reading]),
            "milliseconds_of_best": spread(times[best]),
            "milliseconds_of_none": spread(times[Reading(0)]),
            "ratio": spread(ratios),
        }
        print(
            f"{name}: {tuner.reading} after {len(ends)} steps, "
            f"{statistics.median(times[tuner.reading]):.1f} ms a step; best {best}, "
            f"{statistics.median(times[best]):.1f} ms; "
            f"ratio {statistics.median(ratios):.2f}",
            flush=True,
        )
    write(report, args.json)


if __name__ == "__main__":
    main()
