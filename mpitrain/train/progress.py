"""What the terminal shows of a training: a line per epoch, or a progress bar.

Imports no torch.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from mpitrain.console import say
from mpitrain.train.callbacks import Callback
from mpitrain.train.metrics import EpochMetrics, StepMetrics, Throughput, best_metric
from mpitrain.watchdog.process import parent_of_rank

MAX_SHOWN = 12  # metrics in a line; records have all

LINE_SECONDS = 60.0  # in epochs that take longer, about how often a line is printed

SecondsLeft = Callable[[], float | None]
"""Returns the seconds until a time limit stops the training; ``None`` without one."""


class EpochLines(Callback):
    """Prints a line per epoch, on rank zero; in long epochs about one a minute."""

    best_by: str | None = None

    def __init__(self, seconds_left: SecondsLeft = lambda: None) -> None:
        self._seconds_left = seconds_left
        self._is_on = True
        EpochLines.start(self, 0, None, 0)  # not a bar's, which would draw one

    def start(
        self,
        num_epochs: int | None,
        total_steps: int | None,
        done: int,
        began: float | None = None,
    ) -> None:
        """Start to print; ``done`` steps are older than ``began``, by `time.time`."""
        self._num_epochs, self._total_steps = num_epochs, total_steps
        self._done = self._step = done
        self._began = time.time() if began is None else began
        self._printed_at = time.monotonic()
        self._values: dict[str, float] = {}
        self._rate = ""

    @property
    def line(self) -> str:
        """Recent loss, last metric of `best_by`, samples per second, time to go."""
        values = dict(sorted(self._values.items()))  # training before validation
        parts = (format_metrics(values), self._rate, self._end())
        return " | ".join(part for part in parts if part)

    def _end(self) -> str:
        here, left = self._step - self._done, self._seconds_left()
        limit = "" if left is None else f"limit in {format_seconds(left)}"
        if self._total_steps is None or here <= 0:
            return limit
        each = (time.time() - self._began) / here
        needed = each * (self._total_steps - self._step)
        if left is not None and needed > left:
            return f"{format_seconds(needed)} to go, {limit}"
        return f"done in {format_seconds(needed)}"

    def on_fit_start(self, trainer: Any) -> None:
        """Start to print."""
        self._is_on, self.best_by = trainer.engine.world.is_rank_zero, trainer.best_by
        plan = trainer.engine.plan
        self.start(plan.num_epochs, plan.total_steps, trainer.state.step)

    def on_metrics(self, trainer: Any, steps: Sequence[StepMetrics]) -> None:
        """Remember the losses."""
        # Words are made when they are shown: this is called every two seconds.
        mean = sum(step.loss for step in steps) / len(steps)
        others = {f"train_{k}": v for k, v in steps[-1].losses.items()}
        if math.isnan(mean) and others:  # of a custom loop that has no loss
            self._values |= others
        else:
            self._values["train_loss"] = mean

    def on_throughput(self, trainer: Any, throughput: Throughput) -> None:
        """Print a line if there was none for long."""
        self._rate = f"{throughput.samples_per_second:,.0f} samples/s"
        self._step = throughput.step
        if self._is_on and time.monotonic() - self._printed_at > LINE_SECONDS:
            self._printed_at = time.monotonic()
            say(
                f"at step {throughput.step} of epoch "
                f"{of_all(throughput.epoch, self._num_epochs)} | {self.line}"
            )

    def on_validation_end(self, trainer: Any, epoch: EpochMetrics) -> None:
        """Print the line of a validation within an epoch."""
        if not epoch.is_end:
            self.on_epoch_end(trainer, epoch)

    def on_epoch_end(self, trainer: Any, epoch: EpochMetrics) -> None:
        """Print the line of the epoch."""
        best, _ = best_metric(epoch.values, self.best_by)
        if best in epoch.values:
            self._values[f"val_{best}"] = epoch.values[best]
        if self._is_on:
            self._printed_at = time.monotonic()
            say(epoch_line(epoch, self._num_epochs))


class ProgressBar(EpochLines):
    """Shows a progress bar over all steps on rank zero, with epoch lines above it."""

    _bar: Any = None

    def start(
        self,
        num_epochs: int | None,
        total_steps: int | None,
        done: int,
        began: float | None = None,
    ) -> None:
        """Draw the bar."""
        super().start(num_epochs, total_steps, done, began)
        if self._is_on:
            self._bar = _open_bar(total_steps, done)

    def move(self, step: int) -> None:
        """Move the bar to a step."""
        if self._bar is not None:
            self._bar.update(step - self._bar.n)

    def close(self, *_: Any, **__: Any) -> None:
        """Remove the bar."""
        if self._bar is not None:
            self._bar.close()

    on_fit_end = on_stop = on_exception = close

    def on_step_end(self, trainer: Any) -> None:
        """Move the bar."""
        self.move(trainer.state.step)

    def on_throughput(self, trainer: Any, throughput: Throughput) -> None:
        """Show the latest metrics beside the bar."""
        self._printed_at = time.monotonic()  # no lines beside it
        super().on_throughput(trainer, throughput)
        if self._bar is not None:
            self._bar.set_description_str(f" | {self.line}")


def _open_bar(total_steps: int | None, done: int) -> Any:
    from tqdm import tqdm
    from tqdm.utils import ObjectWrapper

    class WholeLines(ObjectWrapper):
        """Ends the bar with a newline: Open MPI 5's mpirun holds back what has none."""

        def write(self, text: str) -> None:
            """Write the bar in place of the last one."""
            if text.startswith("\r"):
                # Clear, write, go up, and come back by the newline: to the start of
                # the bar's own line, where other output may overwrite it.
                text = f"\r\x1b[2K{text[1:].rstrip()}\x1b[A\n"
            self._wrapped.write(text)

        def __eq__(self, other: object) -> bool:
            # So tqdm.write knows that it writes into the same file.
            return bool(self._wrapped == other)

        __hash__ = ObjectWrapper.__hash__

    return tqdm(
        total=total_steps,
        initial=done,
        unit="step",
        file=WholeLines(sys.stdout),
        ncols=_terminal_columns() - 1,
        nrows=20,  # a rank's terminal says it has no rows, and tqdm would hide
        leave=False,
        mininterval=0.2,
        bar_format="{percentage:3.0f}%|{bar}| {n_fmt}/{total_fmt}{desc}"
        if total_steps
        else "{n_fmt} steps{desc}",
    )


def choose_progress(
    progress: Literal["auto", "bar", "lines"], seconds_left: SecondsLeft
) -> EpochLines:
    """Return a bar where a person watches, or lines."""
    is_bar = progress == "bar" or (progress == "auto" and _terminal() is not None)
    return ProgressBar(seconds_left) if is_bar else EpochLines(seconds_left)


def _terminal() -> str | None:
    """Return the terminal that shows what this process prints, if there is one.

    Under Open MPI a rank's stdout is a pseudo-terminal even where mpirun writes to a
    file, and under MPICH it is a pipe even where mpiexec writes to a terminal (both
    tried). So the parent's stdout is looked at too: under Open MPI that is mpirun
    itself, or its daemon, whose stdout is no terminal.
    """
    if not sys.stdout.isatty() or os.environ.get("TERM") == "dumb":
        return None
    try:
        path = str(Path(f"/proc/{parent_of_rank()}/fd/1").readlink())
    except OSError:
        return None
    return path if path.startswith(("/dev/pts/", "/dev/tty")) else None


def _terminal_columns(default: int = 100) -> int:
    """Return the width of mpirun's terminal; a rank's own has none."""
    path = _terminal()
    try:
        if path is not None:
            with Path(path).open() as terminal:
                return os.get_terminal_size(terminal.fileno()).columns or default
    except OSError:
        pass
    return default


def format_seconds(seconds: float) -> str:
    """Format a time as schedulers do.

    >>> format_seconds(59.6), format_seconds(3725), format_seconds(90000)
    ('1:00', '1:02:05', '25:00:00')
    """
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours}:{minutes:02}:{seconds:02}"
    return f"{minutes}:{seconds:02}"


def of_all(number: int, num: int | None) -> str:
    """Return a number and how many there are, if that is known.

    >>> of_all(2, 10), of_all(2, None)
    ('2/10', '2')
    """
    return str(number) if num is None else f"{number}/{num}"


def epoch_line(epoch: EpochMetrics, num_epochs: int | None) -> str:
    """Return the line of an epoch."""
    width = 2 * len(str(num_epochs)) + 1 if num_epochs else 0
    losses = {"train_loss": epoch.train_loss}
    if not epoch.train_samples and math.isnan(epoch.train_loss):
        losses = {}  # of a custom loop that logs none
    losses |= {f"val_{name}": value for name, value in epoch.values.items()}
    fields = [
        f"{'in ' * (not epoch.is_end)}"
        f"{epoch.stage if epoch.stage != 'train' else 'epoch'} "
        f"{of_all(epoch.epoch, num_epochs):>{width}}",
        f"step {epoch.step}",
        format_metrics(losses),
        f"{epoch.epoch_seconds:.2f} s",
        *([f"{epoch.samples_per_second:,.0f} samples/s"] * bool(epoch.train_samples)),
    ]
    if epoch.skipped_samples:
        fields.append(f"{epoch.skipped_samples} samples skipped")
    if epoch.skipped_steps:
        fields.append(f"{epoch.skipped_steps} steps skipped")
    return " | ".join(fields)


def format_metrics(values: Mapping[str, float]) -> str:
    """Format metrics by name, accuracies in per cent.

    >>> format_metrics({"val_loss": 0.25, "val_accuracy": 0.5})
    'val_loss 0.2500 | val_accuracy 50.00%'
    """
    found = [
        f"{name} {value:.2%}" if name.endswith("accuracy") else f"{name} {value:.4f}"
        for name, value in values.items()
    ]
    more = [f"and {len(found) - MAX_SHOWN} more"] * (len(found) > MAX_SHOWN)
    return " | ".join(found[:MAX_SHOWN] + more)


def finished_line(result: Mapping[str, Any]) -> str:
    """Summarize a finished run.

    >>> finished_line({"val_loss": 0.5, "epochs": 1, "train_seconds": 2.0})
    'finished: val_loss 0.5000 after 1 epoch, 2.0 s of training'
    >>> finished_line({"best_by": "max:f1", "val_loss": 0.5, "val_f1": 0.9,
    ...     "epochs": 2, "train_seconds": 2.0})
    'finished: val_f1 0.9000 after 2 epochs, 2.0 s of training'
    >>> finished_line({"steps": 90})
    'finished: 90 steps'
    """
    epochs = result.get("epochs")
    count = f"{epochs} epoch{'s' * (epochs != 1)}"
    if not epochs:  # of a custom loop
        count = f"{result.get('steps')} steps"
    names = [name[4:] for name in result if name.startswith("val_")]
    if names:
        best = f"val_{best_metric(names, result.get('best_by'))[0]}"
        best = best if best in result else f"val_{names[0]}"
        value = result[best]
        found = format_metrics({best: math.nan if value is None else value})
        count = f"{found} after {count}"
    if "train_seconds" in result:
        count += f", {result['train_seconds']:.1f} s of training"
    stopping = result.get("early_stopping")
    return f"finished: {count}" + f"; early stopping: {stopping}" * bool(stopping)
