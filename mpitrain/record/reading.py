"""Reads a run folder, also while the run is still going on.

Missing files are empty, lines that cannot be read are left out. Imports no torch.
"""

from __future__ import annotations

import contextlib
import math
import re
import time
from array import array
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from mpitrain.errors import UsageError
from mpitrain.files import read_json, read_yaml
from mpitrain.record.jsonl import JsonlReader, changed_at
from mpitrain.record.run_dir import read_result
from mpitrain.record.runs import RUN
from mpitrain.record.supervised import read_restarts
from mpitrain.train.metrics import OTHER, PHASES, EpochMetrics, StepMetrics, Throughput

# --- metrics.jsonl ----------------------------------------------------------------

NOT_LOGGED = float("nan")  # by identity: any other nan was logged


@dataclass(frozen=True, kw_only=True)
class TimedThroughput(Throughput):
    """How fast some steps were, and when. Times are seconds since 1970."""

    time: float
    seconds_left: float | None = None
    """Until a time limit stops the training; ``None`` without one."""


SUMMED = (
    *("num_steps", "num_samples", "seconds"),
    *("communication_seconds", "wait_seconds"),
)


def sums(throughputs: Iterable[Throughput]) -> SimpleNamespace:
    """Return the sums of what is counted and measured of some steps, by name."""
    rows = list(throughputs)
    return SimpleNamespace(
        **{name: sum(getattr(row, name) for row in rows) for name in SUMMED}
    )


@dataclass(frozen=True, kw_only=True)
class Began:
    """A job that has begun to train."""

    time: float
    num_nodes: int
    total_steps: int | None  # of the whole training; ``None``: unknown
    num_epochs: int | None  # ``None``: unknown


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """Where a job resumed from a checkpoint."""

    time: float
    step: int


@dataclass(frozen=True, kw_only=True)
class Saved:
    """A checkpoint that was written, or could not be."""

    step: int
    time: float | None
    error: str = ""  # why it could not be written; empty if it was


@dataclass(frozen=True, kw_only=True)
class Predicted:
    """A call of `Trainer.predict`."""

    time: float
    step: int  # of the training until then
    data: str  # class of the data set
    predicted_samples: int


class Metrics(JsonlReader):
    """The content of ``metrics.jsonl``, each step once."""

    def _clear(self) -> None:
        self.steps: list[StepMetrics] = []  # ascending; nan where not finite
        self.throughputs: list[TimedThroughput] = []
        self.epochs: list[EpochMetrics] = []
        self.validations: list[EpochMetrics] = []  # within epochs
        self.began: list[Began] = []
        self.resumed: list[Resumed] = []
        self.saved: list[Saved] = []
        self.test: dict[str, float] = {}
        self.predicted: list[Predicted] = []
        self.balance: tuple[int, list[int]] | None = None
        """Since which step ranks take how many micro-batches of a step."""

    @property
    def all_validations(self) -> list[EpochMetrics]:
        """Those of epochs, and within, in the order of their steps."""
        return sorted((*self.validations, *self.epochs), key=lambda it: it.step)

    def _add(self, row: Mapping[str, Any]) -> None:
        match row["event"]:
            case "step":
                # A custom loop may have logged others.
                of_step = ("train_loss", "lr", "gradient_norm")
                loss, lr, norm = (
                    number(row[it]) if it in row else NOT_LOGGED for it in of_step
                )
                step = int(row["step"])
                # Most steps have none of the rest, and share one empty default: a
                # dictionary for each of a million steps would take 64 MB.
                found = StepMetrics(int(row["epoch"]), step, loss, lr, norm)
                if others := _other_losses(row):
                    found = found._replace(losses=others)
                if rates := row.get("lr_groups"):
                    found = found._replace(lr_groups=tuple(map(number, rates)))
                self.steps.append(found)
            case "throughput":
                self.throughputs.append(make(TimedThroughput, row))
            case "epoch":
                self.epochs.append(_epoch(row))
            case "validation":
                self.validations.append(_epoch({**row, "is_end": False}))
            case "begin":
                self.began.append(make(Began, row))
                self.balance = None  # of the ranks of an earlier job
            case "resume":
                self.resumed.append(make(Resumed, row))
            case "checkpoint":
                self.saved.append(make(Saved, row))
            case "balance":
                counts = [int(num) for num in row["num_micro_batches"]]
                self.balance = int(row["step"]), counts
            case "test":
                self.test = _values(row, "test_")
            case "predict":
                self.predicted.append(make(Predicted, row))


def _epoch(row: Mapping[str, Any]) -> Any:
    rate, num = number(row["samples_per_second"]), int(row["train_samples"])
    # All of its steps may have been skipped: then the rate does not tell.
    seconds = num / rate if num else row["epoch_seconds"]
    values = {"values": _values(row, "val_"), "steps_seconds": seconds}
    values["train_loss"] = number(row["train_loss"])
    values["train_losses"] = _other_losses(row)
    return make(EpochMetrics, {**row, **values})


def _other_losses(row: Mapping[str, Any]) -> dict[str, float]:
    return {k: v for k, v in _values(row, "train_").items() if k != "loss"}


def _values(row: Mapping[str, Any], prefix: str) -> dict[str, float]:
    return {
        name.removeprefix(prefix): number(value)
        for name, value in row.items()
        if name.startswith(prefix) and name != f"{prefix}samples"
    }


# --- times/rank-N.jsonl -----------------------------------------------------------

NUM_COLUMNS = 2 + len(PHASES)  # of a line


@dataclass(frozen=True, kw_only=True)
class CutShort:
    """What a rank did when its job was ended in the middle."""

    time: float
    phase: int  # number in `PHASES`
    seconds: float  # how long it had done that


@dataclass(kw_only=True)
class RankJob:
    """Where the time of one rank went in one job."""

    rank: int
    world_size: int
    node_rank: int
    hostname: str
    time: float  # when it wrote its first line
    start_seconds: float  # about from the start of the process until then
    lines: array[float] = field(default_factory=lambda: array("d"))
    """`NUM_COLUMNS` numbers a line, ascending by time: when its steps ended, the number
    of the last one, and the seconds of each phase."""
    cut: CutShort | None = None
    """What it did when the job was ended in the middle, if known."""

    def add(self, row: list[float], places: list[int]) -> None:
        """Add a line, whose phases have these numbers; all of it or nothing."""
        end, step, _, _, *seconds = row
        # Phases are found by name: another version may have written others.
        line = array("d", [end, step, *(0.0 for _ in PHASES)])
        for place, value in zip(places, seconds, strict=True):
            line[2 + place] += value
        if type(step) is not int:
            raise TypeError(step)
        self.lines.extend(line)

    @property
    def last_step(self) -> int:
        """The number of the last step that is known; 0 without any."""
        return int(self.lines[1 - NUM_COLUMNS]) if self.lines else 0

    @property
    def ended(self) -> float:
        """When the last thing that is known of it was."""
        last = self.lines[-NUM_COLUMNS] if self.lines else self.time
        return max(last, self.cut.time if self.cut else last)


class RankFile(JsonlReader):
    """The content of a file ``times/rank-N.jsonl``, job by job."""

    def _clear(self) -> None:
        self.jobs: list[RankJob] = []
        self._places: list[int] = []

    def _add(self, row: Any) -> None:
        if type(row) is list:
            self.jobs[-1].add(row, self._places)
        elif "end" in row:
            values = {"time": row["end"], "phase": _phase(row["phase"])}
            self.jobs[-1].cut = make(CutShort, {**row, **values})
        else:
            job = make(RankJob, row)
            self._places = [_phase(name) for name in row["phases"]]
            self.jobs.append(job)


def _phase(name: str) -> int:
    return PHASES.index(name) if name in PHASES else OTHER


# --- the folder -------------------------------------------------------------------


class Run:
    """The content of a run folder. Times are seconds since 1970."""

    def __init__(self, path: Path) -> None:
        known = (RUN, "config.yaml", "result.json", "metrics.jsonl")
        if not any((path / name).is_file() for name in known):
            raise UsageError(
                f"{path} is not a run folder; expected one with {RUN} in it, "
                "such as runs/NAME"
            )
        self.path = path
        self.name = path.absolute().name
        self.read_at = time.time()
        self.config = read_yaml(path / "config.yaml")
        self.environment = read_json(path / "environment.json")
        # Before the metrics: what it refers to is in them by then.
        self.result = read_result(path)
        self.restarts = read_restarts(path)
        self.metrics = Metrics(path / "metrics.jsonl")
        # rank-3 and rank-03 are of jobs with fewer and more ranks.
        self.ranks = [RankFile(file) for file in (path / "times").glob("rank-*.jsonl")]
        for reader in (self.metrics, *self.ranks):
            reader.update()
        self.checkpoints = self._checkpoints()

    @property
    def status(self) -> str:
        """``running``, ``finished``, ``stopped`` or ``failed``."""
        return str(self.result.get("status", "running"))

    def changed_at(self) -> float | None:
        """Return when a line was written last."""
        found = [changed_at(file.path) for file in (self.metrics, *self.ranks)]
        return max((at for at in found if at is not None), default=None)

    def _checkpoints(self) -> list[Saved]:
        """Return those in ``metrics.jsonl``, and those in the folder only.

        A resumed job drops the line of the checkpoint that it resumes from.
        """
        known = list(self.metrics.saved)
        steps = {saved.step for saved in known if not saved.error}
        with contextlib.suppress(OSError):
            for sums in (self.path / "checkpoints").glob("step-*/SHA256SUMS"):
                name = re.fullmatch(r"step-(\d+)(-epoch-\d+|-val)?", sums.parent.name)
                if name is not None and int(name[1]) not in steps:
                    known.append(Saved(step=int(name[1]), time=changed_at(sums)))
        return sorted(known, key=lambda saved: saved.step)


def number(value: float | None) -> float:
    """Return a number of a line; nan for null, since JSON has no infinite numbers.

    >>> number(None), number(1)
    (nan, 1.0)
    """
    return math.nan if value is None else float(value)


def make(kind: Any, row: Mapping[str, Any]) -> Any:
    """Make a dataclass of those values of a line that it has fields for."""
    names = [it.name for it in fields(kind) if it.name in row]
    return kind(**{name: row[name] for name in names})
