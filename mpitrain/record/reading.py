"""Reads what a run has left behind, also while it is still being written.

Files that are missing are empty, lines that cannot be read are left out, and what older
versions did not write yet is ``None``. Imports no torch.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import re
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

from mpitrain.errors import UsageError
from mpitrain.record import rank_times
from mpitrain.record.growing import GrowingFile
from mpitrain.record.metrics import WRONG, Metrics, Saved, made
from mpitrain.record.run_dir import read_json, read_result
from mpitrain.record.runs import RUN
from mpitrain.train.metrics import OTHER, PHASES


@dataclass(frozen=True, kw_only=True)
class CutShort:
    """What a rank did when its job was ended in the middle."""

    time: float
    """Seconds since 1970."""
    phase: int
    """By its number in `times.PHASES`."""
    seconds: float
    """How long it had done that."""


@dataclass(kw_only=True)
class RankJob:
    """Where the time of one rank went in one job: a column each, ascending by time."""

    rank: int
    world_size: int
    node_rank: int
    hostname: str
    time: float
    """When it wrote its first line, seconds since 1970."""
    start_seconds: float
    """From the process's start until then, about."""
    ends: array[float] = field(default_factory=lambda: array("d"))
    """When the steps of a line ended, seconds since 1970."""
    steps: array[int] = field(default_factory=lambda: array("q"))
    """The number of the last."""
    num_steps: array[int] = field(default_factory=lambda: array("q"))
    """How many there were."""
    longest: array[float] = field(default_factory=lambda: array("d"))
    """Seconds of the longest of them."""
    seconds: tuple[array[float], ...] = field(
        default_factory=lambda: tuple(array("d") for _ in PHASES)
    )
    """Of each phase."""
    cut: CutShort | None = None
    """What it did when the job was ended in the middle, if it could tell."""

    def add(self, rows: Sequence[list[float]], places: Sequence[int]) -> None:
        """Take in lines, whose phases have these numbers: all of them or none.

        Raises:
            ValueError, TypeError: There are others among them.
        """
        end, step, num, longest, *seconds = zip(*rows, strict=True)
        ends, most = array("d", end), array("d", longest)
        steps, nums = array("q", step), array("q", num)
        sums = [array("d", bytes(8 * len(rows))) for _ in PHASES]
        for place, column in zip(places, seconds, strict=True):
            sums[place] = array("d", map(operator.add, sums[place], column))
        self.ends.extend(ends)
        self.steps.extend(steps)
        self.num_steps.extend(nums)
        self.longest.extend(most)
        for mine, new in zip(self.seconds, sums, strict=True):
            mine.extend(new)

    @property
    def ended(self) -> float:
        """Until when something is known of it, seconds since 1970."""
        last = self.ends[-1] if self.ends else self.time
        return max(last, self.cut.time if self.cut else last)


class RankFile:
    """What a file ``times/rank-N.jsonl`` tells, job by job.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self._file = GrowingFile(path)
        self._clear()

    def _clear(self) -> None:
        self.jobs: list[RankJob] = []
        self._places: list[int] = []

    def update(self) -> None:
        """Read what is new."""
        if self._file.was_cut():
            self._clear()
        for rows in self._file.blocks():
            for is_line, part in itertools.groupby(rows, lambda it: type(it) is list):
                if is_line:
                    self._add_lines(list(part))
                    continue
                for row in part:
                    with contextlib.suppress(*WRONG):
                        self._add(row)

    def changed_at(self) -> float | None:
        """Return when the file was written last, seconds since 1970."""
        return self._file.changed_at()

    def _add_lines(self, rows: list[list[float]]) -> None:
        if not self.jobs:
            return
        try:  # all at once, which takes a third of the time
            self.jobs[-1].add(rows, self._places)
        except WRONG:
            for row in rows:
                with contextlib.suppress(*WRONG):
                    self.jobs[-1].add([row], self._places)

    def _add(self, row: Any) -> None:
        if "end" in row:
            self.jobs[-1].cut = CutShort(
                time=float(row["end"]),
                phase=_phase(row["phase"]),
                seconds=float(row["seconds"]),
            )
        else:
            job = made(RankJob, row)
            self._places = [_phase(name) for name in row["phases"]]
            self.jobs.append(job)


class Run:
    """A run folder; `update` reads what is new in it.

    Args:
        path: The folder.

    Attributes:
        name: Its name.
        config: ``config.yaml``: what was asked.
        environment: ``environment.json``: where it ran last.
        result: ``result.json``: what it came to.
        begun: When it was begun, seconds since 1970; ``None``: not known.
        metrics: ``metrics.jsonl``.
        ranks: ``times/``, by the names of the files.
        checkpoints: Those that are there or were written, ascending by step.
        read_at: When all this was read, seconds since 1970.

    Raises:
        UsageError: It is no run folder.
    """

    def __init__(self, path: Path) -> None:
        known = (RUN, "config.yaml", "result.json", "metrics.jsonl")
        if not any((path / name).is_file() for name in known):
            raise UsageError(
                f"{path} is no run folder; expected one with {known[1]} in it, such as "
                "runs/NAME"
            )
        self.path = path
        self.name = path.absolute().name
        self.metrics = Metrics(path / "metrics.jsonl")
        self.ranks: dict[str, RankFile] = {}
        self.update()

    def update(self) -> None:
        """Read what is new."""
        self.read_at = time.time()
        self.config = _yaml(self.path / "config.yaml")
        self.environment = read_json(self.path / "environment.json")
        self.result = read_result(self.path)
        self.begun = _seconds_of(read_json(self.path / RUN).get("begun"))
        self.metrics.update()
        for file in (self.path / rank_times.FOLDER).glob("rank-*.jsonl"):
            # By name: rank-3 and rank-03 are of jobs with fewer and more ranks.
            self.ranks.setdefault(file.stem, RankFile(file)).update()
        self.checkpoints = self._checkpoints()

    @property
    def status(self) -> str:
        """``running``, ``finished``, ``stopped`` or ``failed``, as it says itself."""
        return str(self.result.get("status", "running"))

    def changed_at(self) -> float | None:
        """Return when a line was written last, seconds since 1970."""
        found = [self.metrics.changed_at()]
        found += [file.changed_at() for file in self.ranks.values()]
        return max((at for at in found if at is not None), default=None)

    def _checkpoints(self) -> list[Saved]:
        """Those that were told of, and those that lie there untold.

        What was written after a checkpoint began is dropped when it is gone on from,
        and so is the line that tells of it.
        """
        told = list(self.metrics.saved)
        steps = {saved.step for saved in told if not saved.error}
        with contextlib.suppress(OSError):
            for sums in (self.path / "checkpoints").glob("step-*/SHA256SUMS"):
                name = re.fullmatch(r"step-(\d+)(-epoch-\d+)?", sums.parent.name)
                if name is not None and int(name[1]) not in steps:
                    at = GrowingFile(sums).changed_at()
                    told.append(Saved(step=int(name[1]), time=at))
        return sorted(told, key=lambda saved: saved.step)


def _phase(name: str) -> int:
    return PHASES.index(name) if name in PHASES else OTHER


def _yaml(path: Path) -> dict[str, Any]:
    import yaml

    try:
        found = yaml.safe_load(path.read_text(errors="replace"))
    except (OSError, yaml.YAMLError):
        return {}
    return found if isinstance(found, dict) else {}


def _seconds_of(date: object) -> float | None:
    try:
        return datetime.fromisoformat(str(date)).timestamp()
    except ValueError:
        return None
