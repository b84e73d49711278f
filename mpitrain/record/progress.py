"""How far a training is, and how it goes, in words."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mpitrain.record.events import Epoch, Pace, StepRow

SecondsLeft = Callable[[], float | None]
"""Tells how long until a time limit stops a training; ``None``: there is none."""


class Standing:
    """Keeps what was heard last.

    Args:
        num_steps: Steps of the training; ``None``: not known.
        done: Steps that earlier jobs have done.
        seconds_left: How long until a time limit.
        began: When this job had done those, by `time.time`; ``None``: now.
    """

    def __init__(
        self,
        num_steps: int | None = None,
        done: int = 0,
        seconds_left: SecondsLeft = lambda: None,
        began: float | None = None,
    ) -> None:
        self.num_steps = num_steps
        self.done = done
        self._step = done
        self._seconds_left = seconds_left
        self._began = time.time() if began is None else began
        self._rows: Sequence[StepRow] = ()
        self._pace: Pace | None = None
        self._values: Mapping[str, float] = {}

    def rows_done(self, rows: Sequence[StepRow]) -> None:
        """Note the losses."""
        self._rows = rows

    def pace_done(self, pace: Pace) -> None:
        """Note how fast it is."""
        self._pace, self._step = pace, pace.step

    def epoch_done(self, epoch: Epoch) -> None:
        """Note how good it is."""
        self._values = epoch.values

    def in_words(self) -> str:
        """Say loss, accuracy, speed, and when it ends; the mean loss of some steps."""
        values: dict[str, float] = {}
        if self._rows:
            losses = [row.loss for row in self._rows]
            values["train_loss"] = sum(losses) / len(losses)
        if self._values:
            best = "accuracy" if "accuracy" in self._values else "loss"
            values[f"val_{best}"] = self._values[best]
        pace = self._pace
        rate = f"{pace.samples_per_second:,.0f} samples/s" if pace else ""
        parts = (in_words(values), rate, self._end_in_words())
        return " | ".join(part for part in parts if part)

    def _end_in_words(self) -> str:
        here = self._step - self.done
        left = self._seconds_left()
        limit = "" if left is None else f"limit in {span_in_words(left)}"
        if self.num_steps is None or here <= 0:
            return limit
        each = (time.time() - self._began) / here
        needed = each * (self.num_steps - self._step)
        if left is not None and needed > left:
            return f"{span_in_words(needed)} to go, {limit}"
        return f"done in {span_in_words(needed)}"


def span_in_words(seconds: float) -> str:
    """Show a time as schedulers do.

    >>> span_in_words(59.6), span_in_words(3725), span_in_words(90000)
    ('1:00', '1:02:05', '25:00:00')
    """
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{seconds:02}"
    return f"{minutes}:{seconds:02}"


def epoch_line(epoch: Epoch, num_epochs: int) -> str:
    """Word what an epoch came to, in fixed fields."""
    width = len(str(num_epochs))
    losses = {"train_loss": epoch.train_loss}
    losses |= {f"val_{name}": value for name, value in epoch.values.items()}
    fields = [
        f"{epoch.stage if epoch.stage != 'train' else 'epoch'} "
        f"{epoch.epoch:{width}}/{num_epochs}",
        f"step {epoch.step}",
        in_words(losses),
        f"{epoch.epoch_seconds:.2f} s",
        f"{epoch.samples_per_second:,.0f} samples/s",
    ]
    if epoch.skipped_samples:
        fields.append(f"{epoch.skipped_samples} samples skipped")
    if epoch.skipped_steps:
        fields.append(f"{epoch.skipped_steps} steps skipped")
    return " | ".join(fields)


def in_words(values: Mapping[str, float]) -> str:
    """Show values by name, shares as per cent.

    >>> in_words({"val_loss": 0.25, "val_accuracy": 0.5})
    'val_loss 0.2500 | val_accuracy 50.00%'
    """
    return " | ".join(
        f"{name} {value:.2%}" if name.endswith("accuracy") else f"{name} {value:.4f}"
        for name, value in values.items()
    )


def finished_words(result: Mapping[str, Any]) -> str:
    """Sum up a finished run.

    >>> finished_words({"val_loss": 0.5, "epochs": 1, "train_seconds": 2.0})
    'finished: val_loss 0.5000 after 1 epoch, 2.0 s of training'
    """
    epochs = result["epochs"]
    best = "val_accuracy" if "val_accuracy" in result else "val_loss"
    value = result[best]
    return (
        f"finished: {in_words({best: math.nan if value is None else value})} after "
        f"{epochs} epoch{'s' * (epochs != 1)}, "
        f"{result['train_seconds']:.1f} s of training"
    )
