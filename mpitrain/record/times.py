"""``times/rank-N.jsonl``: where each rank's time went, for the map of ranks by time.

The first line of each job is an object: who writes. Then a line is a list: when its
steps ended (seconds since 1970), the number of the last, how many there were, the
longest of them (``data`` to ``update``), and the seconds of each phase. The last is an
object where the job was ended in the middle: what this rank did then, and for how long.
Imports no torch.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from mpitrain.record.lines import JsonLines
from mpitrain.world import World

FOLDER = "times"

PHASES = (
    "data",
    "forward",
    "backward",
    "communication",
    "update",
    "evaluation",
    "checkpoint",
    "other",
)
"""What a rank does, by number. ``data``: it waits for samples; ``communication``: it
has its gradients, and waits for those of the others; ``update``: the gradient's norm
and the new weights; ``checkpoint``: it copies one, or asks whether one is due."""

NUM_PHASES = len(PHASES)

(
    DATA,
    FORWARD,
    BACKWARD,
    COMMUNICATION,
    UPDATE,
    EVALUATION,
    CHECKPOINT,
    OTHER,
) = range(NUM_PHASES)

RESOLUTION = 500
"""A line is written once its steps took one part in so many of the job's time, ..."""

CLOSE_SECONDS = 1.0
"""How long the end waits for a disk: whoever fails has something to say."""

LONGEST_SECONDS = 30.0
"""... or so long: a day of steps of 0.1 s leaves 0.7 MB of each rank."""


Position = Callable[[], tuple[int, float]]
"""Tells a phase, and since when, by `time.perf_counter`."""


class RankTimes:
    """Writes down where this rank's time goes; short steps are taken together.

    Args:
        run_dir: The run folder.
        world: Where this process stands.
        start_seconds: How long the start took that is just over.

    Attributes:
        at_present: Tells what this rank does, and since when.
    """

    at_present: Position

    def __init__(self, run_dir: Path, world: World, start_seconds: float) -> None:
        folder = run_dir / FOLDER
        folder.mkdir(exist_ok=True)
        width = len(str(world.world_size - 1))
        self._lines = JsonLines(folder / f"rank-{world.rank:0{width}}.jsonl")
        now = time.time()
        self._lines.write(
            {
                "rank": world.rank,
                "world_size": world.world_size,
                "node_rank": world.node_rank,
                "hostname": world.hostname,
                "time": round(now, 3),
                "start_seconds": round(start_seconds, 3),
                "phases": PHASES,
            }
        )
        self._began = time.perf_counter()
        self.at_present = lambda: (OTHER, self._began)
        self._wall_began = now
        self._is_closed = False
        self._step = 0
        self._sums = [0.0] * NUM_PHASES
        self._longest = 0.0
        self._num_steps = 0
        self._line_began = self._began

    def add(self, step: int, laps: Sequence[float], *, is_step: bool) -> None:
        """Take in a step that has just ended, or what was between steps.

        Args:
            step: Its number.
            laps: Seconds of each phase.
            is_step: Whether it was one.
        """
        self._sums = [a + b for a, b in zip(self._sums, laps, strict=True)]
        self._step = step
        if is_step:
            self._num_steps += 1
            self._longest = max(self._longest, sum(laps[: UPDATE + 1]))
        now = time.perf_counter()
        least = min(LONGEST_SECONDS, (now - self._began) / RESOLUTION)
        if now - self._line_began >= least:
            self._write(now)

    def cut(self) -> None:
        """Write what is left, and what this rank does now that its job is ended."""
        if self._is_closed:
            return
        phase, since = self.at_present()
        seconds = time.perf_counter() - since
        self._write_rest(since)
        self._lines.write(
            {
                "end": round(time.time(), 3),
                "phase": PHASES[phase],
                "seconds": round(seconds, 3),
            }
        )
        self.close()

    def close(self) -> None:
        """Write what is left; a disk that takes nothing has no say."""
        if self._is_closed:
            return
        self._is_closed = True
        self._write_rest(time.perf_counter())
        with contextlib.suppress(OSError):
            self._lines.close(CLOSE_SECONDS)

    def _write_rest(self, now: float) -> None:
        if self._num_steps or any(self._sums):
            self._write(now)

    def _write(self, now: float) -> None:
        end = self._wall_began + now - self._began
        phases = ", ".join([f"{seconds:.6f}" for seconds in self._sums])
        counts = f"{self._step}, {self._num_steps}, {self._longest:.6f}"
        self._lines.write(f"[{end:.4f}, {counts}, {phases}]")
        self._line_began = now
        self._num_steps = 0
        self._longest = 0.0
        self._sums = [0.0] * NUM_PHASES
