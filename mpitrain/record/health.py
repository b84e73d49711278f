"""Warnings about a training that waits: for samples, or for one rank."""

from __future__ import annotations

import logging
from collections import Counter, defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from mpitrain.console import shown
from mpitrain.train.callbacks import Callback
from mpitrain.train.metrics import Throughput

if TYPE_CHECKING:
    from mpitrain.train.trainer import Trainer

logger = logging.getLogger("mpitrain")

WINDOW_SECONDS = 10.0  # seconds of steps that are looked at together
DATA_FRACTION = 0.2  # of the time, from which waiting for samples is too much
# A rank is late if it costs this part of the time and is the last in that of the steps.
LATE_FRACTION = 0.1
LAST_FRACTION = 0.6


class HealthCheck(Callback):
    """Warns once, on rank zero, with what helps; ``run_dir`` is named in it."""

    def __init__(self, run_dir: str | Path) -> None:
        self._run_dir = shown(Path(run_dir))
        self._window: list[Throughput] = []
        self._is_first = True
        self._suspect: int | None = None
        self._named: int | None = None
        self._is_starved = False

    def on_throughput(self, trainer: Trainer, throughput: Throughput) -> None:
        """Look at the last ten seconds of steps."""
        if not trainer.engine.world.is_rank_zero:
            return
        if self._is_first:  # compilers, caches, the first samples
            self._is_first = False
            return
        self._window.append(throughput)
        seconds = sum(it.seconds for it in self._window)
        if seconds >= WINDOW_SECONDS:
            self._check_data(trainer, seconds)
            self._check_ranks(trainer, seconds)
            self._window = []

    def _check_data(self, trainer: Trainer, seconds: float) -> None:
        waited = sum(it.data_seconds for it in self._window) / seconds
        if waited > DATA_FRACTION and not self._is_starved:
            self._is_starved = True
            workers = trainer.config.num_workers
            now = "the default" if workers is None else workers
            logger.warning(
                "data loading takes %.0f %% of a step: %s",
                100 * waited,
                "the samples are in memory; gathering and transforming them takes the "
                "time"
                if trainer.engine.data.train_loader.samples.is_in_memory
                else f"see what --num-workers auto finds (now {now}), or use a format "
                "that is read faster, such as shards",
            )

    def _check_ranks(self, trainer: Trainer, seconds: float) -> None:
        """Name a rank that is the last one in two windows in a row."""
        slowest, num_last, late_seconds = slowest_rank(self._window)
        num_steps = sum(it.num_steps for it in self._window)
        late = is_late(num_last, late_seconds, num_steps, seconds)
        before, self._suspect = self._suspect, slowest if late else None
        # Two windows in a row: one is slow by chance now and then.
        if late and before == slowest != self._named:
            self._named = slowest
            world = trainer.engine.world
            host = world.host_of(slowest)
            logger.warning(
                "[rank %d/%d %s] is the last in %.0f %% of the steps, %.3f s (%.0f %%) "
                "later than the ranks in the middle, and all wait for it: look at "
                "what else runs on that node; `python -m mpitrain check` compares "
                "nodes, `python -m mpitrain report %s` shows when it began",
                *(slowest, world.world_size, host, 100 * num_last / num_steps),
                *(late_seconds / num_last, 100 * late_seconds / seconds),
                self._run_dir,
            )


def is_late(num_last: int, late_seconds: float, num_steps: int, seconds: float) -> bool:
    """Whether the slowest rank causes the waiting, not another one in each step."""
    is_often_last = num_last >= LAST_FRACTION * num_steps
    return is_often_last and late_seconds > LATE_FRACTION * seconds


def slowest_rank(throughputs: Iterable[Throughput]) -> tuple[int, int, float]:
    """Return the rank that was last in the most steps, their number, and how late.

    -1, in no step, where that is not known.
    """
    num_steps, late_seconds = Counter[int](), defaultdict[int, float](float)
    for it in throughputs:
        if it.slowest_rank >= 0:
            num_steps[it.slowest_rank] += it.slowest_steps
            late_seconds[it.slowest_rank] += it.late_seconds
    rank, num = num_steps.most_common(1)[0] if num_steps else (-1, 0)
    return rank, num, late_seconds[rank]
