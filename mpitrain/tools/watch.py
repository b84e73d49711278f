"""`python -m mpitrain watch RUN`: a running job's view, in another shell.

Reads the run folder's files and nothing else, so it works wherever that is seen.
Imports no torch.
"""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

from tyro.conf import Positional, arg

from mpitrain.errors import UsageError
from mpitrain.record.console import Console, open_console
from mpitrain.record.events import StepRow
from mpitrain.record.folder import read_json, read_result
from mpitrain.record.metrics import Began, Metrics, Saved
from mpitrain.record.progress import (
    Standing,
    epoch_line,
    finished_words,
    in_words,
    span_in_words,
)
from mpitrain.record.runs import RUN, is_held, lock_host
from mpitrain.world import in_runs

LOOK_SECONDS = 1.0
"""How often the files are read."""

NUM_EPOCHS = 5
"""Of those that are done when it begins, so many are shown."""

GONE_SECONDS = 5.0
"""A job of this host that holds no lock for so long has ended."""

STILL_SECONDS = 300.0
"""Elsewhere a file system may not tell of locks: there it has ended if it has written
nothing for so long, too."""


@dataclass(frozen=True, kw_only=True)
class WatchConfig:
    """Follow a run as it trains, from its folder alone. Ctrl-C leaves it in peace."""

    run: Annotated[Positional[Path], arg(metavar="RUN")]
    """A run folder, such as runs/NAME."""
    once: bool = False
    """Say how it stands, and end."""
    keep: bool = False
    """Go on where a job has ended, until the training is finished: the next
    job of a chain may come."""

    def __post_init__(self) -> None:
        if self.once and self.keep:
            raise UsageError("--once and --keep: expected one of them")


def watch(config: WatchConfig) -> None:
    """Follow a run until its job ends.

    Args:
        config: Which, and how long.

    Raises:
        UsageError: It is no run folder.
    """
    path = config.run
    if not (path / RUN).is_file():
        raise UsageError(
            f"{path} is no run folder; expected one with {RUN} in it, such as runs/NAME"
        )
    with ExitStack() as stack:
        view = View(path, stack)
        view.introduce()
        while True:
            view.update()
            end = view.end_in_words(at_once=config.once)
            if end is not None and not (config.keep and view.may_go_on):
                view.console.say(end)
                return
            if config.once:
                view.console.say(view.standing())
                return
            if end is not None:
                view.say_once(end)
            time.sleep(LOOK_SECONDS)


class View:
    """What was read of a run, and what of it was shown.

    Args:
        path: The run folder.
        stack: Closes the consoles.

    Attributes:
        console: The screen.
    """

    def __init__(self, path: Path, stack: ExitStack) -> None:
        self.console: Console = open_console("lines", 0, Standing())
        self._path = path
        self._stack = stack
        self._metrics = Metrics(path / "metrics.jsonl")
        self._shown: dict[str, int] = {}
        self._job: Began | None = None
        self._limit: float | None = None
        self._result: Mapping[str, Any] = {}
        self._gone_since: float | None = None
        self._said = ""

    def introduce(self) -> None:
        """Say whose run it is, and what came before."""
        self._read()
        say = self.console.say
        changed = self._metrics.changed_at()
        age = "" if changed is None else f", last line {_age(changed)} ago"
        say(f"run {self._path.absolute().name}, {self._result.get('status')}{age}")
        for line in _hosts_in_words(read_json(self._path / "environment.json")):
            say(line)
        metrics = self._metrics
        num_epochs = metrics.began[-1].num_epochs if metrics.began else 0
        for epoch in metrics.epochs[-NUM_EPOCHS:]:
            say(epoch_line(epoch, num_epochs))
        self._skip()

    def update(self) -> None:
        """Read what is new, and show it."""
        if self._read():  # what its checkpoint did not know of is gone
            self._shown = {
                name: min(num, len(self._found(name)))
                for name, num in self._shown.items()
            }
        metrics = self._metrics
        if metrics.began and metrics.began[-1] != self._job:
            self._begin(metrics.began[-1])
        for went_on in self._new("went_on"):
            self.console.say(f"going on from step {went_on.step}")
        rows = _rows(metrics, self._shown.get("rows", 0))
        self._shown["rows"] = len(metrics.steps.step)
        if rows:
            self.console.rows_done(rows)
        for pace in self._new("paces"):
            if self._job is not None and pace.time >= self._job.time:
                left = pace.seconds_left
                self._limit = None if left is None else pace.time + left
            self.console.pace_done(pace)
        for epoch in self._new("epochs"):
            self.console.epoch_done(epoch)
        for saved in self._new("saved"):
            self._show_checkpoint(saved)

    def end_in_words(self, *, at_once: bool = False) -> str | None:
        """Say how the job has ended; ``None`` while it has not.

        Args:
            at_once: Do not wait to see whether it holds a lock soon.
        """
        result = self._result
        status = result.get("status")
        if status == "finished":
            tests = {k: v for k, v in result.items() if k.startswith("test_")}
            test = f"test: {in_words(tests)}\n" if tests else ""
            return test + finished_words(result)
        held = is_held(self._path)
        if status in ("stopped", "failed"):
            if held:
                return None  # it is about to end, or the next job is about to begin
            if status == "failed":
                return f"failed: {result.get('error')}"
            return f"{result.get('stopped')}; {self._how_to_go_on()} from there"
        if held is not False:
            self._gone_since = None
            return None
        now = time.monotonic()
        if self._gone_since is None:
            self._gone_since = now
        if now - self._gone_since < GONE_SECONDS and not at_once:
            return None
        still = time.time() - (self._metrics.changed_at() or 0.0)
        if socket.gethostname() != lock_host(self._path) and still < STILL_SECONDS:
            return None
        return (
            "no job writes into it any more, and none said why; "
            f"{self._how_to_go_on()} from its last checkpoint"
        )

    def _how_to_go_on(self) -> str:
        return f"the same command with --name {self._path.absolute().name} goes on"

    @property
    def may_go_on(self) -> bool:
        """Whether another job may come."""
        return self._result.get("status") != "finished"

    def standing(self) -> str:
        """Say how far it is."""
        metrics, job = self._metrics, self._job
        if job is None or not metrics.steps.step:
            return "no step is done yet"
        of = "" if job.total_steps is None else f"/{job.total_steps}"
        return (
            f"epoch {metrics.steps.epoch[-1]}/{job.num_epochs}, step "
            f"{metrics.steps.step[-1]}{of} | {self.console.standing()}"
        )

    def say_once(self, line: str) -> None:
        """Say something that was not said just before."""
        if line != self._said:
            self._said = line
            self.console.say(line)

    def _read(self) -> bool:
        # The result first: what it tells of stands in the other file by then.
        self._result = read_result(self._path)
        return self._metrics.update()

    def _begin(self, job: Began) -> None:
        """Open the console for a job."""
        self._job = job
        self._limit = None
        self._said = ""
        self._stack.close()
        went_on = self._metrics.went_on
        first = went_on[-1].step if went_on else 0
        self.console = self._stack.enter_context(
            open_console(
                "bar" if sys.stdout.isatty() else "lines",
                job.num_epochs,
                Standing(job.total_steps, first, self._seconds_left, job.time),
            )
        )

    def _seconds_left(self) -> float | None:
        return None if self._limit is None else max(0.0, self._limit - time.time())

    def _new(self, name: str) -> list[Any]:
        """Return what has come of a kind since it was last asked for."""
        found = self._found(name)
        first, self._shown[name] = self._shown.get(name, 0), len(found)
        return list(found[first:])

    def _found(self, name: str) -> Sequence[Any]:
        metrics = self._metrics
        found: Sequence[Any] = (
            metrics.steps.step if name == "rows" else getattr(metrics, name)
        )
        return found

    def _skip(self) -> None:
        """Take for shown what is there."""
        for name in ("went_on", "epochs", "saved"):
            self._new(name)
        # Of the others the last: they say how it goes.
        self._shown["paces"] = max(0, len(self._metrics.paces) - 1)
        self._shown["rows"] = max(0, len(self._metrics.steps.step) - 1)

    def _show_checkpoint(self, saved: Saved) -> None:
        if saved.why_not:
            self.console.say(
                f"the checkpoint of step {saved.step} could not be written: "
                f"{saved.why_not}"
            )


def _age(moment: float) -> str:
    return span_in_words(max(0.0, time.time() - moment))


def _rows(metrics: Metrics, first: int) -> list[StepRow]:
    it = metrics.steps
    return [
        StepRow(
            epoch=it.epoch[place],
            step=it.step[place],
            loss=it.loss[place],
            lr=it.lr[place],
            gradient_norm=it.gradient_norm[place],
        )
        for place in range(first, len(it.step))
    ]


def _hosts_in_words(environment: Mapping[str, Any]) -> list[str]:
    """Say who is there, as far as it is known."""
    lines = []
    for number, host in enumerate(environment.get("hosts") or []):
        ranks = host.get("ranks") or []
        devices = ", ".join(dict.fromkeys(host.get("devices") or ["?"]))
        lines.append(
            f"node {number}: {host.get('hostname')}, rank{'s' * (len(ranks) > 1)} "
            f"{in_runs(ranks)} on {devices}"
        )
    return lines
