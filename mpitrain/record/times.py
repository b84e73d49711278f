"""``times/rank-N.jsonl``: where each rank's time went, for the map of ranks by time.

The first line of each job is an object: who writes. Then a line is a list: when its
steps ended (seconds since 1970), the number of the last, how many there were, the
longest of them (``data`` to ``update``), and the seconds of each phase. The last is an
object where the job was ended in the middle: what this rank did then, and for how long.
Imports no torch.
"""

from __future__ import annotations

import bisect
import contextlib
import itertools
import json
import threading
import time
from array import array
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol, TypeAlias

from mpitrain.record.lines import CLOSE_SECONDS, JsonLines
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
"""What a rank does, by number. ``data``: it waits for samples, and the ranks tell each
other whether a checkpoint or the end is due; ``communication``: it has its gradients,
and waits for those of the others; ``update``: the gradient's norm and the new weights;
``checkpoint``: it copies one."""

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

SHORTEST_SECONDS = 1.0
"""... and so long, ..."""

LONGEST_SECONDS = 30.0
"""... or so long: a day of steps of 0.1 s leaves 0.7 MB of each rank."""

LATE_SECONDS = 2.0
"""How long one that is due may wait for a pace, which counts seconds of steps alone."""

Seconds = list[float]
"""Of each phase, by its number."""

Laps: TypeAlias = "array[float]"
"""`Seconds` of steps, one behind the other: with a list for each, Python's garbage
collector would have more to do."""


class Clocked(Protocol):
    """Knows what this rank does, and what it has done: a clock of the training."""

    seconds: Seconds
    """Of all until the present phase, since the last step was over."""
    laps: Laps
    """Of each step that is over, and has not been told yet, with what was before it in
    its epoch."""
    between: list[Seconds]
    """Of what was between the steps of two epochs, and has not been told yet."""

    def sum_up(self) -> tuple[int, float]:
        """Bring the attributes up to the present phase; return it, and since when."""


class RankTimes:
    """Writes down where this rank's time goes; short steps are taken together.

    Args:
        run_dir: The run folder.
        world: Where this process stands.
        start_seconds: How long the start took that is just over.
        done: Steps that earlier jobs have done.

    Attributes:
        clock: Asked what is under way, at each `add` and at the end; ``None``: nobody.
    """

    clock: Clocked | None = None

    def __init__(
        self, run_dir: Path, world: World, start_seconds: float, done: int = 0
    ) -> None:
        folder = run_dir / FOLDER
        folder.mkdir(exist_ok=True)
        width = len(str(world.world_size - 1))
        self._lines: JsonLines[list[Any] | dict[str, Any]] = JsonLines(
            folder / f"rank-{world.rank:0{width}}.jsonl", json.dumps
        )
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
        self._wall_began = now
        self._is_closed = False
        self._lock = threading.Lock()
        self._step = done
        self._laps: Laps = array("d")
        self._between: list[Seconds] = []
        self._line_ends = self._began + SHORTEST_SECONDS

    @property
    def is_late(self) -> bool:
        """Whether a line has long been due, and should no longer wait for a pace."""
        return time.perf_counter() >= self._line_ends + LATE_SECONDS

    def add(
        self,
        step: int,
        laps: Laps,
        between: Sequence[Seconds],
    ) -> None:
        """Take in steps that are over.

        Args:
            step: The number of the last.
            laps: The seconds of each.
            between: Those of what was before them, or among them, since the last call.
        """
        with self._lock:
            if not self._is_closed:
                _, since, under_way = self._present()
                self._add(step, laps, between, since - sum(under_way))

    def _present(self) -> tuple[int, float, Seconds]:
        """Return a phase, since when, and what was before since the last step."""
        if self.clock is None:
            return OTHER, time.perf_counter(), []
        return *self.clock.sum_up(), list(self.clock.seconds)

    def _add(
        self,
        step: int,
        laps: Laps,
        between: Sequence[Seconds],
        ended: float,
    ) -> None:
        self._between += between
        if between or ended < self._line_ends:
            # Which steps were before what is between two epochs is not known here.
            self._step = step
            self._laps.extend(laps)
            self._write_if_due(ended)
            return
        totals = list(map(sum, zip(*by_phase(laps), strict=True)))
        num = len(totals)
        ends = list(itertools.accumulate(totals, initial=ended - sum(totals)))
        done = 0
        self._write_if_due(ends[0])
        while done < num:
            until = min(bisect.bisect_left(ends, self._line_ends, done + 1), num)
            self._laps.extend(laps[done * NUM_PHASES : until * NUM_PHASES])
            self._step = step - num + until
            self._write_if_due(ends[until])
            done = until

    def cut(self) -> None:
        """Write what is left, and what this rank does now that its job is ended.

        In any thread; once, whoever calls it.
        """
        with self._lock:
            if self._is_closed:
                return
            phase, since = self._write_rest()
            seconds = time.perf_counter() - since
            self._lines.write(
                {
                    "end": round(time.time(), 3),
                    "phase": PHASES[phase],
                    "seconds": round(seconds, 3),
                }
            )
        self._close()

    def close(self) -> None:
        """Write what is left; a disk that takes nothing has no say."""
        with self._lock:
            if self._is_closed:
                return
            self._write_rest()
        self._close()

    def _close(self) -> None:
        with contextlib.suppress(OSError):
            self._lines.close(CLOSE_SECONDS)

    def _write_rest(self) -> tuple[int, float]:
        """Return what this rank does since then, and since when."""
        self._is_closed = True
        phase, since, under_way = self._present()
        if self.clock is not None:
            laps, between = self.clock.laps[:], list(self.clock.between)
            ended = since - sum(under_way)
            self._add(self._step + len(laps) // NUM_PHASES, laps, between, ended)
        if any(under_way):
            self._between.append(under_way)
        self._write_if_any(since)
        return phase, since

    def _write_if_due(self, now: float) -> None:
        if now >= self._line_ends:
            self._write_if_any(now)

    def _write_if_any(self, now: float) -> None:
        if self._between or self._laps:
            self._write(now)

    def _write(self, now: float) -> None:
        between, self._between = self._between, []
        laps, self._laps = by_phase(self._laps), array("d")
        steps = map(sum, zip(*laps[: UPDATE + 1], strict=True))
        longest = max(steps, default=0.0)
        others = zip(*between, strict=True) if between else ((),) * NUM_PHASES
        sums = (sum(a) + sum(b) for a, b in zip(laps, others, strict=True))
        phases = [round(seconds, 6) for seconds in sums]
        end = round(self._wall_began + now - self._began, 4)
        counts = (self._step, len(laps[0]), round(longest, 6))
        self._lines.write([end, *counts, *phases])
        seconds = max(SHORTEST_SECONDS, (now - self._began) / RESOLUTION)
        self._line_ends = now + min(LONGEST_SECONDS, seconds)


def by_phase(laps: Laps) -> list[Laps]:
    """Return the seconds of each phase, of all steps.

    >>> [list(seconds) for seconds in by_phase(array("d", range(16)))[:2]]
    [[0.0, 8.0], [1.0, 9.0]]
    """
    return [laps[phase::NUM_PHASES] for phase in range(NUM_PHASES)]
