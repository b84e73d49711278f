"""Reads ``metrics.jsonl``, also while it is still being written. Imports no torch."""

from __future__ import annotations

import contextlib
import math
from array import array
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from mpitrain.record.growing import GrowingFile
from mpitrain.train.metrics import EpochMetrics, Throughput

WRONG = (KeyError, TypeError, ValueError, IndexError, ArithmeticError)
"""What comes of a line that is JSON, and not what was expected."""


@dataclass(kw_only=True)
class StepColumns:
    """What steps came to: a column each, ascending by step."""

    step: array[int] = field(default_factory=lambda: array("q"))
    epoch: array[int] = field(default_factory=lambda: array("q"))
    loss: array[float] = field(default_factory=lambda: array("d"))
    """Mean per sample; not a number where it was not finite."""
    lr: array[float] = field(default_factory=lambda: array("d"))
    gradient_norm: array[float] = field(default_factory=lambda: array("d"))

    def add(self, row: Mapping[str, Any]) -> None:
        """Take in a line."""
        step, epoch = int(row["step"]), int(row["epoch"])
        names = ("train_loss", "lr", "gradient_norm")
        loss, lr, norm = (number(row[name]) for name in names)
        self.step.append(step)
        self.epoch.append(epoch)
        self.loss.append(loss)
        self.lr.append(lr)
        self.gradient_norm.append(norm)


@dataclass(frozen=True, kw_only=True)
class TimedThroughput(Throughput):
    """How fast some steps were, and when that was."""

    time: float
    """At their end, seconds since 1970."""
    seconds_left: float | None = None
    """Until a time limit stops it, from then on; ``None``: there is none."""


@dataclass(frozen=True, kw_only=True)
class Began:
    """A job that has begun to train."""

    time: float
    """Seconds since 1970."""
    world_size: int
    num_nodes: int
    start_seconds: float
    total_steps: int | None
    """Of the whole training; ``None``: not known."""
    num_epochs: int
    steps_per_epoch: int | None
    global_batch_size: int


@dataclass(frozen=True, kw_only=True)
class TimedEpoch(EpochMetrics):
    """What an epoch came to, and when that was."""

    time: float | None
    """Seconds since 1970."""


@dataclass(frozen=True, kw_only=True)
class WentOn:
    """Where a job went on from a checkpoint."""

    time: float | None
    """Seconds since 1970."""
    step: int
    epoch: int
    world_size: int
    checkpoint: str
    """The name of its folder."""


@dataclass(frozen=True, kw_only=True)
class Saved:
    """What became of a checkpoint."""

    step: int
    """Steps that are in it."""
    time: float | None
    """When it was there, seconds since 1970."""
    copy_seconds: float | None = None
    """How long it held up the training; ``None``: not known."""
    write_seconds: float | None = None
    """From its begin to its end; ``None``: not known."""
    error: str = ""
    """Why it could not be written; empty if it was."""


class Metrics:
    """What ``metrics.jsonl`` tells: along the way to the last weights, each step once.

    Args:
        path: The file.

    Attributes:
        test: The values on the test set by name; empty before it was asked.
    """

    def __init__(self, path: Path) -> None:
        self._file = GrowingFile(path)
        self._clear()

    def _clear(self) -> None:
        self.steps = StepColumns()
        self.throughputs: list[TimedThroughput] = []
        self.epochs: list[TimedEpoch] = []
        self.began: list[Began] = []
        self.went_on: list[WentOn] = []
        self.saved: list[Saved] = []
        self.test: dict[str, float] = {}

    def update(self) -> bool:
        """Read what is new; tell whether what was told before no longer holds."""
        was_cut = self._file.was_cut()
        if was_cut:
            self._clear()
        for rows in self._file.blocks():
            for row in rows:
                with contextlib.suppress(*WRONG):
                    self._add(row)
        return was_cut

    def changed_at(self) -> float | None:
        """Return when the file was written last, seconds since 1970."""
        return self._file.changed_at()

    def _add(self, row: Mapping[str, Any]) -> None:
        match row["event"]:
            case "step":
                self.steps.add(row)
            case "throughput" | "pace":  # before format 2
                self.throughputs.append(made(TimedThroughput, row))
            case "epoch":
                self.epochs.append(_epoch(row))
            case "begin":
                self.began.append(made(Began, row))
            case "resume":
                self.went_on.append(made(WentOn, {"time": None, **row}))
            case "checkpoint":
                row = {"error": row.get("why_not", ""), **row}  # before format 2
                self.saved.append(made(Saved, row))
            case "test":
                self.test = _values(row, "test_")


def number(value: float | None) -> float:
    """Return a number of a line; nan where it was not finite: JSON knows no other.

    >>> number(None), number(1)
    (nan, 1.0)
    """
    return math.nan if value is None else float(value)


def made(kind: Any, row: Mapping[str, Any]) -> Any:
    """Make a dataclass of those of a line's values that it knows.

    Raises:
        ValueError, TypeError: Values are missing, or of another kind.
    """
    values = {}
    for it in fields(kind):
        name, _, optional = str(it.type).partition(" | ")
        if it.name in row:
            value = row[it.name]
            is_left = name not in CASTS or (optional and value is None)
            values[it.name] = value if is_left else CASTS[name](value)
    return kind(**values)


def _epoch(row: Mapping[str, Any]) -> TimedEpoch:
    rate, num = number(row["samples_per_second"]), int(row["train_samples"])
    return TimedEpoch(
        time=row.get("time"),
        stage=str(row.get("stage", "train")),
        epoch=int(row["epoch"]),
        step=int(row["step"]),
        train_loss=number(row["train_loss"]),
        train_samples=num,
        values=_values(row, "val_"),
        val_samples=int(row["val_samples"]),
        skipped_samples=int(row["skipped_samples"]),
        skipped_steps=int(row["skipped_steps"]),
        # All of its steps may have been skipped: then the rate does not tell.
        steps_seconds=num / rate if num else number(row["epoch_seconds"]),
        epoch_seconds=number(row["epoch_seconds"]),
    )


def _values(row: Mapping[str, Any], prefix: str) -> dict[str, float]:
    return {
        name.removeprefix(prefix): number(value)
        for name, value in row.items()
        if name.startswith(prefix) and not name.endswith("_samples")
    }


CASTS: Mapping[str, Any] = {"int": int, "float": number, "str": str}
"""By the name of a field's type."""
