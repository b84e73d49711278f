"""``--profile``: what each rank does in some steps, by torch.profiler."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mpitrain.record.events import Progress
from mpitrain.record.recorder import shown
from mpitrain.world import World

logger = logging.getLogger("mpitrain")

FOLDER = "profile"

FIRST_STEPS = 5
"""That are let go by: compilers, caches, the first samples."""

NUM_ROWS = 8
"""Of the table on the screen."""

NUM_FILE_ROWS = 100
"""Of the one in the file."""


class Profiler:
    """Traces steps of this rank, from the sixth that a job trains on.

    Args:
        run_dir: The run folder.
        world: Where this process stands.
        num_steps: How many steps.
        say: Prints a line; ``None``: on other ranks than zero.
        progress: Told that this rank is alive: a long trace takes time to write.
    """

    def __init__(
        self,
        run_dir: Path,
        world: World,
        num_steps: int,
        say: Callable[[str], object] | None,
        progress: Progress,
    ) -> None:
        width = len(str(world.world_size - 1))
        self._folder = run_dir / FOLDER
        self._name = f"rank-{world.rank:0{width}}"
        self._device = world.device
        self._num_steps = num_steps
        self._say = say
        self._progress = progress
        self._seen = 0
        self._profile: Any = None

    def step_done(self, _: int) -> None:
        """Begin, or end."""
        self._seen += 1
        if self._seen == FIRST_STEPS:
            self._begin()
        elif self._profile is not None and self._seen == FIRST_STEPS + self._num_steps:
            self._end(self._num_steps)

    def close(self) -> None:
        """End, where the training has had fewer steps."""
        if self._seen > FIRST_STEPS:
            if self._profile is not None:
                self._end(self._seen - FIRST_STEPS)
            return
        if self._profile is not None:
            with contextlib.suppress(Exception):
                self._profile.stop()
        if self._say is not None:
            logger.warning(
                "--profile %d: nothing is traced; the first %d steps are let go by, "
                "and this job had %d",
                *(self._num_steps, FIRST_STEPS, self._seen),
            )

    def _begin(self) -> None:
        from torch.profiler import ProfilerActivity, profile

        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # it is talkative, on all ranks
        activities = [ProfilerActivity.CPU]
        if self._device != "cpu":
            activities.append(ProfilerActivity.CUDA)
        self._profile = profile(activities=activities, acc_events=True)
        self._profile.start()

    def _end(self, num_steps: int) -> None:
        profile, self._profile = self._profile, None
        self._progress("writing a trace")
        key = (
            "self_cpu_time_total" if self._device == "cpu" else "self_device_time_total"
        )
        try:
            profile.stop()
            self._folder.mkdir(exist_ok=True)
            trace = self._folder / f"{self._name}.json.gz"
            profile.export_chrome_trace(str(trace))
            averages = profile.key_averages()
            table = averages.table(sort_by=key, row_limit=NUM_FILE_ROWS)
            (self._folder / f"{self._name}.txt").write_text(table)
        except Exception as error:  # a training does not end for it
            logger.warning("--profile: the trace could not be written: %s", error)
            return
        if self._say is not None:
            folder = shown(self._folder)
            self._say(f"{num_steps} steps traced: {folder}/rank-*.json.gz")
            for line in rows_of(averages, key, num_steps):
                self._say(line)


def rows_of(averages: Any, key: str, num_steps: int) -> list[str]:
    """Say what took longest, in milliseconds of a step.

    Args:
        averages: What torch's profiler has summed up, by name.
        key: Which time counts.
        num_steps: How many steps that was.
    """
    found = sorted(averages, key=lambda it: -getattr(it, key))
    whole = sum(getattr(it, key) for it in found) or 1
    return [
        f"  {getattr(it, key) / 1000 / num_steps:9.3f} ms a step | "
        f"{getattr(it, key) / whole:4.0%} | {it.count / num_steps:7.1f} calls | "
        f"{it.key[:60]}"
        for it in found[:NUM_ROWS]
    ]
