"""``--profile``: traces of some steps of every rank, by torch.profiler."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path
from typing import Any

from mpitrain.console import say, shown
from mpitrain.launch.job import heartbeat
from mpitrain.mpi.world import World
from mpitrain.record.run_dir import rank_name
from mpitrain.train.callbacks import Callback
from mpitrain.train.trainer import Trainer

logger = logging.getLogger("mpitrain")

FOLDER = "profile"
SKIPPED_STEPS = 5  # before the first traced one: compilers, caches, the first samples
NUM_ROWS = 100  # rows of the table in the file


class Profiler(Callback):
    """Traces steps of each rank, from the sixth of the job, by `torch.profiler`.

    Args:
        run_dir: The run folder; traces and tables are in ``profile/`` in it.
        num_steps: How many steps are traced.
    """

    def __init__(self, run_dir: str | Path, num_steps: int = 10) -> None:
        self._folder = Path(run_dir) / FOLDER
        self._num_steps = num_steps
        self._seen = 0
        self._profile: Any = None

    def on_step_end(self, trainer: Trainer) -> None:
        """Begin, or end."""
        world = trainer.engine.world
        self._seen += 1
        if self._seen == SKIPPED_STEPS:
            self._begin(world)
        elif self._profile and self._seen == SKIPPED_STEPS + self._num_steps:
            self._end(world, self._num_steps)

    def on_fit_end(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        """End, where the training has had fewer steps."""
        world = trainer.engine.world
        if self._seen > SKIPPED_STEPS and self._profile is not None:
            self._end(world, self._seen - SKIPPED_STEPS)
        elif self._seen <= SKIPPED_STEPS:
            self.close()
            if world.is_rank_zero:
                logger.warning(
                    "--profile %d: nothing is traced; the first %d steps are skipped, "
                    "and this job had %d",
                    *(self._num_steps, SKIPPED_STEPS, self._seen),
                )

    on_stop = on_fit_end

    def close(self, *_: Any, **__: Any) -> None:
        """Stop: another training may follow in this process."""
        if self._profile is not None:
            with contextlib.suppress(Exception):
                self._profile.stop()

    on_exception = close

    def _begin(self, world: World) -> None:
        from torch.profiler import ProfilerActivity, profile

        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it is talkative, on all ranks
        activities = [ProfilerActivity.CPU]
        if world.device != "cpu":
            activities.append(ProfilerActivity.CUDA)
        # Without `acc_events` torch warns that it clears events between cycles.
        self._profile = profile(activities=activities, acc_events=True)
        self._profile.start()

    def _end(self, world: World, num_steps: int) -> None:
        profile, self._profile = self._profile, None
        # To write it may take longer than the hang limit of a step.
        heartbeat("writing a trace")
        kind = "cpu" if world.device == "cpu" else "device"
        key, name = f"self_{kind}_time_total", rank_name(world.rank, world.world_size)
        try:
            profile.stop()
            self._folder.mkdir(parents=True, exist_ok=True)
            profile.export_chrome_trace(str(self._folder / f"{name}.json.gz"))
            averages = profile.key_averages()
            table = averages.table(sort_by=key, row_limit=NUM_ROWS)
            (self._folder / f"{name}.txt").write_text(table)
        except Exception as error:  # a training does not end for it
            logger.warning("--profile: the trace could not be written: %s", error)
            return
        if world.is_rank_zero:
            say(
                f"{num_steps} steps traced: {shown(self._folder)}/rank-*.json.gz; the "
                f"slowest operations are in {name}.txt"
            )
