"""Rank zero's record of a run: metrics, result and screen, as the training goes."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from mpitrain.record.console import Console, Lines
from mpitrain.record.events import Epoch, Pace, StepRow
from mpitrain.record.folder import finite, read_result, write_json
from mpitrain.record.lines import JsonLines
from mpitrain.record.progress import SecondsLeft, finished_words, in_words
from mpitrain.world import World

_ENCODE = json.JSONEncoder(allow_nan=False).encode


class Judged(NamedTuple):
    """An epoch that is over; its line is made, and its sums, when they are wanted."""

    time: float
    """Seconds since 1970."""
    epoch: Epoch


class Recorder:
    """Writes ``metrics.jsonl`` and ``result.json`` and moves the screen.

    Args:
        run_dir: The run folder.
        world: Where rank zero stands.
        start_seconds: From the process's start to the ready process group.
        before: What `state` gave when the checkpoint was written that is gone on from.

    Attributes:
        console: The screen.
        seconds_left: Tells how long until a time limit stops the training.
    """

    def __init__(
        self,
        run_dir: Path,
        world: World,
        start_seconds: float,
        before: Mapping[str, Any] | None = None,
    ) -> None:
        self.console: Console = Lines(0)
        self.seconds_left: SecondsLeft = lambda: None
        self._run_dir = run_dir
        self._metrics: JsonLines[Written] = JsonLines(
            run_dir / "metrics.jsonl", line_of, before["metrics_bytes"] if before else 0
        )
        values = before["values"] if before else {}
        self._result: dict[str, Any] = {
            "status": "running",
            "world_size": world.world_size,
            "num_nodes": world.num_nodes,
            "backend": world.backend,
            "start_seconds": start_seconds,
            "train_seconds": 0.0,
            "epochs": 0,
            "steps": 0,
            "skipped_samples": 0,
            "skipped_steps": 0,
            **values,
        }
        self._epochs: list[Epoch] = []
        """That are not in the result yet."""
        # Written before any rank trains, and again at the end only: a rank that fails
        # writes into it, too (`fail`), and must not be written over.
        write_json(run_dir / "result.json", self._result)

    def _write(self, event: str, values: Mapping[str, object]) -> None:
        now = round(time.time(), 3)
        self._metrics.write({"event": event, "time": now, **values})

    def state(self) -> dict[str, Any]:
        """Return what a later job must know to go on with this record."""
        own = ("status", "world_size", "num_nodes", "backend", "start_seconds")
        self._add_epochs()
        values = {k: v for k, v in self._result.items() if k not in own}
        return {"metrics_bytes": self._metrics.num_bytes(), "values": values}

    def sync(self) -> None:
        """Let what `state` tells of reach the disk; in any thread."""
        self._metrics.sync()

    def begin(self, **plan: int | None) -> None:
        """Write that a job begins to train.

        Args:
            plan: How much there is to do; ``None``: not known.
        """
        told = ("world_size", "num_nodes", "start_seconds")
        self._write("begin", {**{it: self._result[it] for it in told}, **plan})

    def checkpoint_done(
        self, step: int, copy_seconds: float, write_seconds: float, why_not: str = ""
    ) -> None:
        """Write what became of a checkpoint.

        Args:
            step: Steps that are in it.
            copy_seconds: How long it held up the training.
            write_seconds: From its begin to its end.
            why_not: Why it is not there; empty if it is.
        """
        told: dict[str, object] = {
            "step": step,
            "copy_seconds": round(copy_seconds, 6),
            "write_seconds": round(write_seconds, 6),
        }
        self._write("checkpoint", told | ({"why_not": why_not} if why_not else {}))

    def go_on(self, step: int, epoch: int, checkpoint: Path) -> None:
        """Write that the training goes on from a checkpoint."""
        told = {
            "step": step,
            "epoch": epoch,
            "world_size": self._result["world_size"],
            "checkpoint": checkpoint.name,
        }
        self._write("resume", told)

    def stop(self, why: str, how: str) -> None:
        """Write that the run has stopped, and can go on.

        Args:
            why: What stopped it, and where.
            how: What to type, to go on.
        """
        self._metrics.close()
        self._add_epochs()
        self._result |= {"status": "stopped", "stopped": why}
        write_json(self._run_dir / "result.json", self._result)
        self.console.say(f"{why}; {how} goes on from here")
        self.console.say(
            "stopped, not failed: the exit status is 75, which mpirun may report below"
        )

    def rows_done(self, rows: Sequence[StepRow]) -> None:
        """Write a line per step."""
        self.console.rows_done(rows)
        self._metrics.write(*rows)

    def pace_done(self, pace: Pace) -> None:
        """Write a line for how fast steps were."""
        self._add_epochs()
        values = {
            name: round(value, 6) if isinstance(value, float) else value
            for name, value in vars(pace).items()
        }
        left = self.seconds_left()
        if left is not None:
            values["seconds_left"] = round(left)
        self._write("pace", values)
        self.console.pace_done(pace)

    def epoch_done(self, epoch: Epoch) -> None:
        """Write a line for the epoch."""
        self._metrics.write(Judged(time.time(), epoch))
        self._epochs.append(epoch)
        self.console.epoch_done(epoch)

    def _add_epochs(self) -> None:
        """Take those that are over into the result."""
        result = self._result
        for epoch in self._epochs:
            result.update(_named("val", epoch.values))
            result["train_seconds"] += epoch.epoch_seconds
            result["epochs"], result["steps"] = epoch.epoch, epoch.step
            result["skipped_samples"] += epoch.skipped_samples
            result["skipped_steps"] += epoch.skipped_steps
        self._epochs = []

    def test_done(
        self, values: Mapping[str, float], num_samples: int, num_skipped: int
    ) -> None:
        """Write how good the finished model is on the test set."""
        self._add_epochs()
        named = _named("test", values)
        counts = {"test_samples": num_samples, "skipped_samples": num_skipped}
        self._metrics.write({"event": "test", **named, **counts})
        skipped = self._result["skipped_samples"] + num_skipped
        self._result.update(named, skipped_samples=skipped)
        self.console.say(f"test: {in_words(named)} on {num_samples:,} samples")

    def hasten(self) -> None:
        """Let the lines that wait be written now; the job is ended in the middle.

        The file stays open: a checkpoint may be about to get its name, and asks for it.
        """
        self._metrics.hasten()

    def wait(self, seconds: float) -> None:
        """Wait until they are, but not for longer."""
        self._metrics.wait(seconds)

    def finish(self) -> None:
        """Write that the run is finished, and say what came out."""
        self._metrics.close()
        self._add_epochs()
        self._result["status"] = "finished"
        write_json(self._run_dir / "result.json", self._result)
        self.console.say(
            f"{finished_words(self._result)}, "
            f"{self._result['start_seconds']:.1f} s to start; "
            f"see {shown(self._run_dir)}"
        )


Written = StepRow | Judged | Mapping[str, object]


def line_of(told: Written) -> str:
    """Write a line of ``metrics.jsonl``; floats whole: they read back as they were.

    >>> line_of(StepRow(epoch=1, step=2, loss=0.5, lr=1e-3, gradient_norm=math.inf))
    '{"event": "step", "epoch": 1, "step": 2, "train_loss": 0.5, "lr": 0.001, \
"gradient_norm": null}'
    >>> line_of({"event": "test", "test_loss": 0.1})
    '{"event": "test", "test_loss": 0.1}'
    """
    if isinstance(told, StepRow):
        epoch, step, loss, lr, norm = told
        if math.isfinite(loss + lr + norm):
            # By hand: `json` takes several times as long, and they are many.
            return (
                f'{{"event": "step", "epoch": {epoch}, "step": {step}, '
                f'"train_loss": {loss!r}, "lr": {lr!r}, "gradient_norm": {norm!r}}}'
            )
        values = {"train_loss": loss, "lr": lr, "gradient_norm": norm}
        told = {"event": "step", "epoch": epoch, "step": step, **values}
    elif isinstance(told, Judged):
        told = {"event": "epoch", "time": round(told.time, 3), **_told_of(told.epoch)}
    return _ENCODE(finite(told))


def _told_of(epoch: Epoch) -> dict[str, object]:
    return {
        "stage": epoch.stage,
        "epoch": epoch.epoch,
        "step": epoch.step,
        "train_loss": epoch.train_loss,
        **_named("val", epoch.values),
        "train_samples": epoch.train_samples,
        "val_samples": epoch.val_samples,
        "skipped_samples": epoch.skipped_samples,
        "skipped_steps": epoch.skipped_steps,
        "epoch_seconds": epoch.epoch_seconds,
        "samples_per_second": epoch.samples_per_second,
    }


def _named(of: str, values: Mapping[str, float]) -> dict[str, float]:
    return {f"{of}_{name}": value for name, value in values.items()}


def fail(run_dir: Path, message: str) -> None:
    """Write into ``result.json`` that the run failed, from whichever rank knows.

    Args:
        run_dir: The run folder.
        message: Why, as the screen says it.
    """
    result = read_result(run_dir)
    failed = {**result, "status": "failed", "error": message}
    write_json(run_dir / "result.json", failed)


def shown(path: Path) -> str:
    """Write a path as a person would: relative to here where it lies below."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
