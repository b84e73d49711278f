"""``times/rank-N.jsonl``: where each rank's time went, for the report's map.

The first line of each job is an object: the rank, its host, the phases. Then a line is
a list: when its steps ended (seconds since 1970), the number of the last step, how many
there were, the seconds of the longest of them, and the seconds of each phase. If the
job was ended in the middle, the last line is an object: what this rank did then, and
for how long.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpitrain.launch.job import Job, seconds_since_start
from mpitrain.mpi.world import World
from mpitrain.record.jsonl import CLOSE_SECONDS, JsonlWriter
from mpitrain.record.run_dir import rank_name
from mpitrain.train.callbacks import Callback
from mpitrain.train.metrics import NUM_PHASES, PHASES, UPDATE, StepMetrics

if TYPE_CHECKING:
    from mpitrain.train.timer import StepTimes, Timer
    from mpitrain.train.trainer import Trainer

FOLDER = "times"

# A line covers one part in RESOLUTION of the job's time, but no less and no more
# seconds than these: a day of steps of 0.1 s is 0.7 MB per rank.
RESOLUTION = 500
MIN_SECONDS, MAX_SECONDS = 1.0, 30.0


class RankTimes(Callback):
    """Writes where this rank's time goes; short steps share a line.

    Args:
        run_dir: The run folder; rank N's file is ``times/rank-N.jsonl`` in it.
        start_seconds: What the start of the job took; ``None``: the time from the start
            of the process to that of `fit`.
    """

    def __init__(self, run_dir: str | Path, start_seconds: float | None = None) -> None:
        self._folder = Path(run_dir) / FOLDER
        self._start_seconds = start_seconds
        self._lock = threading.Lock()  # `cut` is called by a thread of the watchdog
        self._is_closed = True

    def on_fit_start(self, trainer: Trainer) -> None:
        """Open the file."""
        self.open(trainer.engine.world, trainer.timer, trainer.state.step)
        if Job.current is not None and Job.current.is_running:
            Job.current.on_end(self.cut)

    def open(self, world: World, timer: Timer, step: int) -> None:
        """Open the file. ``step``: steps done by earlier jobs."""
        if self._start_seconds is None:
            self._start_seconds = seconds_since_start()
        self._folder.mkdir(parents=True, exist_ok=True)
        name = rank_name(world.rank, world.world_size)
        self._lines = JsonlWriter(self._folder / f"{name}.jsonl")
        now = time.time()
        self._lines.write(
            {
                "rank": world.rank,
                "world_size": world.world_size,
                "node_rank": world.node_rank,
                "hostname": world.hostname,
                "time": round(now, 3),
                "start_seconds": round(self._start_seconds, 3),
                "phases": PHASES,
            }
        )
        self._timer, self._step = timer, step
        # Once: lines stay in order where somebody sets the clock of the host.
        self._wall_offset = now - time.perf_counter()
        self._began = time.perf_counter()
        self._line_ends = self._began + MIN_SECONDS
        self._steps = array("d")
        self._between: list[list[float]] = []
        self._is_closed = False

    def on_metrics(self, trainer: Trainer, steps: Sequence[StepMetrics]) -> None:
        """Write a line if it is time to."""
        self.add(trainer.state.step, trainer.step_times)

    def add(self, step: int, times: StepTimes) -> None:
        """Add the times of steps, of which `step` is the last."""
        with self._lock:
            if self._is_closed:
                return
            self._step = step
            self._steps.extend(times.steps)
            self._between += times.between
            # What the timer has of the unfinished step is for the next line.
            ended = self._timer.since - sum(self._timer.seconds)
            if ended >= self._line_ends:
                self._write(ended)

    def on_fit_end(self, trainer: Trainer, *_: Any, **__: Any) -> None:
        """Write the rest; a disk that takes nothing is not waited for."""
        with self._lock:
            if self._is_closed:
                return
            trainer.timer.synchronize()
            self._write_rest()
        self._lines.close(CLOSE_SECONDS)

    on_stop = on_fit_end

    def cut(self, *_: Any, **__: Any) -> None:
        """Write the rest, and what this rank does when its job ends; in any thread."""
        with self._lock:
            if self._is_closed:
                return
            # Without `synchronize`: the job may end because the GPU hangs.
            phase, since = self._write_rest()
            self._lines.write(
                {
                    "end": round(time.time(), 3),
                    "phase": PHASES[phase],
                    "seconds": round(time.perf_counter() - since, 3),
                }
            )
        self._lines.close(CLOSE_SECONDS)

    on_exception = cut

    def _write_rest(self) -> tuple[int, float]:
        self._is_closed = True
        timer = self._timer
        phase, since = timer.phase, timer.since
        self._steps.extend(timer.pending.steps)
        self._step += len(timer.pending.steps) // NUM_PHASES
        self._between += [*timer.pending.between, timer.seconds]
        self._write(since)
        return phase, since

    def _write(self, now: float) -> None:
        between, self._between = self._between, []
        flat, self._steps = self._steps, array("d")
        steps = [flat[phase::NUM_PHASES] for phase in range(NUM_PHASES)]
        totals = map(sum, zip(*steps[: UPDATE + 1], strict=True))
        longest = max(totals, default=0.0)
        others = zip(*between, strict=True) if between else ((),) * NUM_PHASES
        phases = [round(sum(a) + sum(b), 6) for a, b in zip(steps, others, strict=True)]
        end = round(now + self._wall_offset, 4)
        counts = (self._step, len(steps[0]), round(longest, 6))
        self._lines.write([end, *counts, *phases])
        seconds = max(MIN_SECONDS, (now - self._began) / RESOLUTION)
        self._line_ends = now + min(MAX_SECONDS, seconds)
