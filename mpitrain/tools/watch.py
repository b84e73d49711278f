"""``python -m mpitrain watch RUN``: shows a running training in another shell.

Reads the run folder's files and nothing else, so it works wherever they are seen.
Imports no torch.
"""

from __future__ import annotations

import contextlib
import socket
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpitrain.console import say
from mpitrain.errors import UsageError
from mpitrain.files import read_json, read_yaml
from mpitrain.mpi.world import Node
from mpitrain.record.environment import node_lines
from mpitrain.record.jsonl import changed_at
from mpitrain.record.reading import Began, Metrics, make
from mpitrain.record.run_dir import read_result
from mpitrain.record.runs import RUN, is_held, lock_host
from mpitrain.record.supervised import RESTARTS, Restart, read_restarts
from mpitrain.settings import setting
from mpitrain.tools.sweep.config import PROGRESS, SETTINGS
from mpitrain.train.progress import (
    EpochLines,
    ProgressBar,
    epoch_line,
    finished_line,
    format_metrics,
    format_seconds,
    of_all,
)

POLL_SECONDS = 1.0  # how often the files are read
NUM_EPOCHS = 5  # epochs shown at the start
# A job of this host that holds no lock for so long has ended. Longer than callbacks and
# mpirun may take to end under `supervise`, which then writes of a restart.
GONE_SECONDS = 15.0
# On other hosts, where locks may not be visible, a job has ended if it has also written
# nothing for so long.
STILL_SECONDS = 300.0


@dataclass(frozen=True, kw_only=True)
class WatchConfig:
    """Show the progress of a run from its folder. Ctrl-C does not affect the run."""

    run: Path = setting(metavar="RUN", is_positional=True)
    """A run folder, such as runs/NAME, or a sweep folder."""
    once: bool = False
    """Print the current state and exit."""
    keep: bool = False
    """Keep watching after a job has ended, until the training is finished."""

    def __post_init__(self) -> None:
        if self.once and self.keep:
            raise UsageError("--once and --keep: expected one of them")


def watch(config: WatchConfig) -> None:
    """Show a run, or a sweep, until its job ends."""
    path = config.run
    if (path / SETTINGS).is_file():
        watch_sweep(config)
        return
    if not (path / RUN).is_file():
        raise UsageError(
            f"{path} is not a run folder; expected one with {RUN} in it, such as "
            "runs/NAME"
        )
    before: str | None = None
    with contextlib.closing(View(path)) as view:
        view.introduce()
        while True:
            view.update()
            end = view.end_line(at_once=config.once)
            if end is not None and end != before:
                say(end)
            elif end is None and config.once:
                say(view.state_line())
            if config.once or (end and (view.is_finished or not config.keep)):
                return
            before = end
            time.sleep(POLL_SECONDS)


def watch_sweep(config: WatchConfig) -> None:
    """Show a sweep until its job ends."""
    path, before = config.run, ""
    while True:
        result = read_result(path)
        lines = "\n".join(read_json(path / PROGRESS).get("lines", ()))
        if lines != before:
            say(lines)
        before, is_finished = lines, result.get("status") == "finished"
        # Where nobody can tell whether a job has the lock, its last status counts.
        held, is_running = is_held(path), result.get("status") == "running"
        has_ended = not (held or (held is None and is_running))
        is_over = has_ended and (is_finished or not config.keep)
        if is_over and not is_finished:
            gone = "no job works on it any more; the same command resumes"
            say(result.get("stopped") or result.get("error") or gone)
        if config.once or is_over:
            return
        time.sleep(POLL_SECONDS)


class View:
    """What was read of a run, and what of it was shown."""

    def __init__(self, path: Path) -> None:
        self._lines = EpochLines()
        self._path = path
        self._metrics = Metrics(path / "metrics.jsonl")
        self._shown: dict[str, int] = {}
        self._job: Began | None = None
        self._limit: float | None = None
        self._result: Mapping[str, Any] = {}
        self._restarts: list[Restart] = []
        self._num_restarts = 0  # that were shown
        self._gone_since: float | None = None

    def close(self) -> None:
        """Remove the progress bar."""
        if isinstance(self._lines, ProgressBar):
            self._lines.close()

    def introduce(self) -> None:
        """Print the run, its hosts and its last epochs."""
        self._read()
        metrics, changed = self._metrics, changed_at(self._metrics.path)
        age = ""
        if changed is not None:
            age = f", last line {format_seconds(max(0.0, time.time() - changed))} ago"
        say(f"run {self._path.absolute().name}, {self._result.get('status')}{age}")
        hosts = read_json(self._path / "environment.json").get("hosts") or []
        with contextlib.suppress(TypeError, ValueError):  # not written by `describe`
            for line in node_lines([make(Node, host) for host in hosts]):
                say(line)
        if self._restarts:
            last, self._num_restarts = self._restarts[-1], len(self._restarts)
            say(
                f"restarts: {self._num_restarts}, the last after step {last.step}: "
                f"{last.error}"
            )
        num_epochs = metrics.began[-1].num_epochs if metrics.began else 0
        for epoch in metrics.epochs[-NUM_EPOCHS:]:
            say(epoch_line(epoch, num_epochs))
        for name in ("resumed", "validations", "epochs", "saved"):
            self._new(name)
        # Of the others the last one: it says how the training goes.
        self._shown["throughputs"] = max(0, len(metrics.throughputs) - 1)
        self._shown["steps"] = max(0, len(metrics.steps) - 1)

    def update(self) -> None:
        """Read what is new, and show it."""
        resumed = self._metrics.resumed
        if self._read():  # a resumed job drops what its checkpoint does not hold
            for name, num in self._shown.items():
                self._shown[name] = min(num, len(getattr(self._metrics, name)))
            # A second resume from a checkpoint stands where the first one did.
            before = [it for it in self._metrics.resumed if it in resumed]
            self._shown["resumed"] = len(before)
        metrics = self._metrics
        for it in self._restarts[self._num_restarts :]:
            self._num_restarts += 1
            say(f"restart {self._num_restarts} after step {it.step}: {it.error}")
        resumed_now = self._new("resumed")
        # A job's "resume" follows its "begin", and may be read later.
        if metrics.began and (metrics.began[-1] != self._job or resumed_now):
            self._start(metrics.began[-1])
        for resumed in resumed_now:
            say(f"resumed from step {resumed.step}")
        if steps := self._new("steps"):
            self._lines.on_metrics(None, steps)
            if isinstance(self._lines, ProgressBar):
                self._lines.move(steps[-1].step)
        for throughput in self._new("throughputs"):
            if self._job is not None and throughput.time >= self._job.time:
                left = throughput.seconds_left
                self._limit = None if left is None else throughput.time + left
            self._lines.on_throughput(None, throughput)
        found = *self._new("validations"), *self._new("epochs")
        for epoch in sorted(found, key=lambda it: it.step):
            self._lines.on_epoch_end(None, epoch)
        for it in self._new("saved"):
            if it.error:
                say(
                    f"the checkpoint of step {it.step} could not be written: {it.error}"
                )

    def end_line(self, *, at_once: bool = False) -> str | None:
        """Return how the job has ended; ``None`` while it has not."""
        result, status = self._result, self._result.get("status")
        config = read_yaml(self._path / "config.yaml")  # {}: of a custom loop
        of_command = config and "script" not in config
        name = f" with --name {self._path.absolute().name}" if of_command else ""
        resume = f"the same command{name} resumes"
        if self.is_finished:
            tests = {k: v for k, v in result.items() if k.startswith("test_")}
            test = f"test: {format_metrics(tests)}\n" if tests else ""
            return test + finished_line(result)
        held = is_held(self._path)
        if status == "stopped" and not held:
            return f"{result.get('stopped')}; {resume} from there"
        # ``None``: nobody can tell, as on a file system without locks.
        is_failed = status == "failed" and not held
        if not is_failed and held is not False:
            # If it has ended, it is about to let go, or the next job is about to begin.
            self._gone_since = None
            return None
        if self._is_restarting():
            self._gone_since = None
            return None
        self._gone_since = self._gone_since or time.monotonic()
        if time.monotonic() - self._gone_since < GONE_SECONDS and not at_once:
            return None
        if is_failed:
            return f"failed: {result.get('error')}"
        still = time.time() - (changed_at(self._metrics.path) or 0.0)
        if socket.gethostname() != lock_host(self._path) and still < STILL_SECONDS:
            return None
        return (
            "no job writes into it any more, and none wrote a reason; "
            f"{resume} from its last checkpoint"
        )

    def _is_restarting(self) -> bool:
        """Whether `supervise` starts a job that has not opened the run yet."""
        # Both of the file server's clock, which differs from those of nodes.
        at = changed_at(self._path / RESTARTS) or 0.0
        ended = changed_at(self._path / "result.json") or 0.0
        return ended <= at and time.time() - at < STILL_SECONDS

    @property
    def is_finished(self) -> bool:
        """Whether no other job can follow."""
        return self._result.get("status") == "finished"

    def state_line(self) -> str:
        """Return epoch, step and the latest metrics."""
        metrics, job = self._metrics, self._job
        if job is None or not metrics.steps:
            return "no step is done yet"
        of = "" if job.total_steps is None else f"/{job.total_steps}"
        return (
            f"epoch {of_all(metrics.steps[-1].epoch, job.num_epochs)}, step "
            f"{metrics.steps[-1].step}{of} | {self._lines.line}"
        )

    def _read(self) -> bool:
        # The result first: what it refers to is in the other file by then.
        self._result = read_result(self._path)
        self._restarts = read_restarts(self._path)
        return self._metrics.update()

    def _start(self, job: Began) -> None:
        self._job, self._limit = job, None
        self.close()
        kind = ProgressBar if sys.stdout.isatty() else EpochLines
        self._lines = kind(self._seconds_left)
        self._lines.best_by = self._result.get("best_by")
        resumed = [it for it in self._metrics.resumed if it.time >= job.time]
        first = resumed[-1].step if resumed else 0
        self._lines.start(job.num_epochs, job.total_steps, first, job.time)

    def _seconds_left(self) -> float | None:
        return None if self._limit is None else max(0.0, self._limit - time.time())

    def _new(self, name: str) -> list[Any]:
        found = getattr(self._metrics, name)
        first, self._shown[name] = self._shown.get(name, 0), len(found)
        return found[first:]  # type: ignore[no-any-return]
