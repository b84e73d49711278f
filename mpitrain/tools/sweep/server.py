"""The server: a thread of rank zero that gives trials to ranks as they become free.

A trial is chosen (Optuna's ``ask``), waits until enough ranks are free, and runs on
them from ``start`` until each of them has sent ``ended``; then Optuna is told. Its
epochs come between, each answered if there is a pruner. See `messages`, and
docs/decisions/0011.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TextIO, get_args

from mpitrain.checkpoint.preemption import REASONS, PreemptionHandler
from mpitrain.console import shown
from mpitrain.errors import MpitrainError, Stopped, UsageError
from mpitrain.files import write_json
from mpitrain.mpi.world import World, format_ranges
from mpitrain.record.result import record_failure
from mpitrain.record.run_dir import read_result
from mpitrain.tools.sweep.config import PROGRESS, PreparedSweep
from mpitrain.tools.sweep.messages import (
    TO_RANK,
    TO_SERVER,
    Message,
    Status,
    TrialResult,
)
from mpitrain.tools.sweep.placement import Placement
from mpitrain.tools.sweep.space import RANKS, trial_flags
from mpitrain.tools.sweep.study import Study, Trial, counts_of, finished_trials, name_of
from mpitrain.train.progress import format_metrics, format_seconds

LOOKAHEAD = 4  # trials that are chosen before there is room for them
MAX_OVERTAKEN = 8  # smaller trials that may start before one that waits for room
MAX_STARTS = 3  # fail a trial during whose first epoch so many jobs have died
MAX_FAILURES = 5  # without one that finished: the cause is common to all
SLEEP_SECONDS = 0.01
PROGRESS_SECONDS = 1.0  # how often the progress is written


@dataclass
class Running:
    """A trial that some ranks train."""

    trial: Trial
    ranks: list[int]
    left: set[int]  # the ranks that have not ended
    outcomes: list[TrialResult] = field(default_factory=list)
    is_aborted: bool = False
    unit: str = "epoch"  # or ``step``, of what is reported
    number: int = 0  # the last one that was validated
    metrics: Mapping[str, float] = field(default_factory=dict)  # of it
    began: float = field(default_factory=time.monotonic)

    @property
    def busy_seconds(self) -> float:
        """How long its ranks have been busy, all together."""
        return len(self.ranks) * (time.monotonic() - self.began)


class Server:
    """Asks Optuna for trials, places them, and records how they end."""

    def __init__(
        self,
        comm: Any,
        world: World,
        sweep: PreparedSweep,
        handler: PreemptionHandler,
        screen: TextIO,
    ) -> None:
        self._comm, self._world, self._sweep = comm, world, sweep
        self._handler, self._screen = handler, screen
        num_trials = sweep.search.num_trials(sweep.options.trials)
        self._placement = Placement(world, share_gpus=sweep.options.share_gpus)
        self._study = Study(sweep.run_dir, sweep.search, num_trials, sweep.config.seed)
        self._waiting = self._study.unfinished()  # chosen, and not begun in this job
        # Of any job; the first one had those of the space, or was refused.
        known = sweep.options.ranks_per_trial, sweep.search.max_ranks
        self._most_ranks = max(self._study.note_ranks(world.world_size), *known)
        self._left: list[Trial] = []  # for a job with as many ranks as an earlier one
        # Trials of other sizes may begin before one that waits for room.
        sizes_vary = RANKS in sweep.search.names or sweep.search.function
        self._lookahead = LOOKAHEAD if sizes_vary else 1
        self._num_overtaken = 0  # how many trials began before the first of these
        self._has_more = True  # trials to ask for
        self._running: dict[int, Running] = {}
        self._num_started = self._num_failed = 0  # in this job
        self._stop_reason = 0
        self._began = time.monotonic()
        self._first_start = 0.0
        self._busy_seconds = 0.0  # of all ranks together, with trials that have ended
        self._busy_share = 1.0  # of the ranks' time, until the last trial began
        self._written_at = 0.0

    def run(self) -> int:
        """Serve until the sweep ends, or this job of it; return the exit status."""
        name, path = self._sweep.run_dir.name, shown(self._sweep.run_dir)
        write_json(self._sweep.run_dir / "result.json", {"status": "running"})
        again = f", {len(self._waiting)} begun before" if self._waiting else ""
        self._say(f"sweep {name}: {self._summary()}{again}; folder {path}")
        while True:
            self._stop(self._handler.requested())  # a signal, the file, the time limit
            if not self._stop_reason:
                self._assign()
            if not self._running:
                break
            # Polled: in a blocking receive MPI would take a core from rank zero's
            # trial.
            while self._comm.Iprobe(tag=TO_SERVER):
                self._receive(self._comm.recv(tag=TO_SERVER))
            if time.monotonic() > self._written_at + PROGRESS_SECONDS:
                self._write_progress()
            time.sleep(SLEEP_SECONDS)
        self._write_progress()
        return self._end()

    # --- trials begin -----------------------------------------------------------------

    def _assign(self) -> None:
        while self._placement.num_busy < self._world.world_size:
            can_overtake = self._num_overtaken < MAX_OVERTAKEN
            candidates = self._waiting if can_overtake else self._waiting[:1]
            # It stops at the first True, for `_start` changes the list.
            if any(self._start(trial) for trial in candidates):
                continue
            if not can_overtake or len(self._waiting) >= self._lookahead:
                return
            trial = self._study.ask() if self._has_more else None
            if trial is None:
                # Not asked again: `ask` reads all trials, and this loop runs 100 times
                # a second.
                self._has_more = False
                return
            self._waiting.append(trial)

    def _ranks_of(self, trial: Trial) -> Any:
        return trial.flags.get(RANKS, self._sweep.options.ranks_per_trial)

    def _start(self, trial: Trial) -> bool:
        sweep, size = self._sweep, self._world.world_size
        count = self._ranks_of(trial)
        if type(count) is int and size < count <= self._most_ranks:
            self._waiting.remove(trial)
            self._left.append(trial)
            # Else all that are left would be chosen, without results to choose by.
            self._has_more &= len(self._left) < self._lookahead
            return True
        error = ""
        if type(count) is not int or not 1 <= count <= size:
            error = f"{RANKS}: found {count!r}, expected 1 to {size}"
        elif trial.num_starts >= MAX_STARTS:
            error = f"{trial.num_starts} jobs have died in its first epoch"
        if error:
            self._waiting.remove(trial)
            self._fail(trial, error)
            return True
        ranks = self._placement.take(count)
        if ranks is None:
            return False
        is_first = trial is self._waiting[0]
        self._num_overtaken = 0 if is_first else self._num_overtaken + 1
        self._waiting.remove(trial)
        # Before it starts: a job that dies of it can count no more.
        self._study.set_starts(trial.number, trial.num_starts + 1)
        start_id, self._num_started = self._num_started, self._num_started + 1
        self._first_start = self._first_start or time.monotonic()
        seconds = time.monotonic() - self._first_start
        if seconds > 1.0:  # not of those that start together at first
            running = (it.busy_seconds for it in self._running.values())
            busy = self._busy_seconds + sum(running)
            self._busy_share = busy / (seconds * size)
        self._running[start_id] = Running(trial, ranks, set(ranks))
        words = sweep.trial_words(trial.name, trial.flags)
        self._send(ranks, Message("start", start_id, (ranks, trial.name, words)))
        return True

    # --- trials run and end -----------------------------------------------------------

    def _receive(self, message: Message) -> None:
        start_id, search = message.start_id, self._sweep.search
        if message.kind == "stop":
            self._stop(message.data)
            return
        running = self._running[start_id]
        if message.kind == "epoch":
            if not running.number:  # a later death of the job is not held against it
                self._study.set_starts(running.trial.number, 0)
            running.unit, running.number, running.metrics = message.data
            if search.pruner is not None:
                value = running.metrics.get(search.metrics[0][1], math.nan)
                number = running.trial.number
                is_pruned = self._study.should_prune(number, running.number, value)
                self._send(running.ranks[:1], Message("prune", start_id, is_pruned))
            return
        outcome: TrialResult = message.data
        running.outcomes.append(outcome)
        running.left.discard(outcome.rank)
        # The others wait in collectives that this rank never joins.
        if outcome.error and not running.is_aborted:
            running.is_aborted = True
            self._send(running.left, Message("abort", start_id))
        if not running.left:
            del self._running[start_id]
            self._busy_seconds += running.busy_seconds
            self._placement.give_back(running.ranks)
            self._finish(running)

    def _finish(self, running: Running) -> None:
        trial, study = running.trial, self._study
        # One rank's failure aborts the others: it is the trial's result, whoever is
        # first.
        order = get_args(Status)  # the worst first
        worst = min(running.outcomes, key=lambda it: (order.index(it.status), it.rank))
        if worst.error:
            self._fail(trial, worst.error, is_usage=worst.is_usage)
        elif worst.status == "stopped":  # another job resumes it
            study.set_starts(trial.number, 0)
            # A signal may have come to one rank alone.
            self._stop(max(outcome.stop_reason for outcome in running.outcomes))
        elif worst.status == "pruned":
            study.prune(trial.number)
            self._say(f"{trial.name} pruned after {running.unit} {running.number}")
        else:
            result = read_result(self._sweep.run_dir / trial.name)  # it is complete
            try:
                said = study.finish(trial.number, result)
            except MpitrainError as error:
                self._fail(trial, str(error))
            else:
                is_of_script = self._sweep.search.is_of_script
                words = trial_flags(trial.flags, is_of_script=is_of_script)
                self._say(f"{trial.name} finished: {said} | {' '.join(words)}")

    def _fail(self, trial: Trial, error: str, *, is_usage: bool = False) -> None:
        """Record a trial that has failed; raise if none can succeed."""
        path = self._sweep.run_dir / trial.name
        self._study.fail(trial.number, error)
        if path.is_dir() and read_result(path).get("status") == "running":
            record_failure(path, error)
        logs = f"; see {shown(path / 'logs')}" if path.is_dir() else ""
        self._say(f"{trial.name} failed: {error}{logs}")
        self._num_failed += 1
        counts = counts_of(self._study.optuna)
        if counts["finished"] or counts["pruned"]:
            return
        # A flag that the first trial has wrong is most likely one of all.
        if is_usage and self._num_failed == 1:
            raise UsageError(f"{trial.name}: {error}")
        if self._num_failed >= min(MAX_FAILURES, self._study.num_trials):
            raise MpitrainError(
                f"the first {self._num_failed} trials failed, the last one: {error}"
            )

    # --- the end ----------------------------------------------------------------------

    def _stop(self, reason: int) -> None:
        if reason and not self._stop_reason:
            self._stop_reason = reason
            for start_id, running in self._running.items():
                self._send(running.left, Message("stop", start_id, reason))

    def _end(self) -> int:
        path, study, summary = self._sweep.run_dir, self._study, self._summary()
        counts, trials = counts_of(study.optuna), study.num_trials
        result = {"trials": trials, "summary": summary}
        if sum(counts.values()) >= trials:
            if counts["failed"] == trials:
                raise MpitrainError(f"no trial has finished: {summary}")
            write_json(path / "result.json", {"status": "finished", **result})
            seconds = format_seconds(time.monotonic() - self._began)
            self._say(f"finished: {summary} | {seconds}; see {shown(path)}")
            return 0
        reason, command = REASONS[self._stop_reason], "the same command"
        if not reason and self._left:
            num, count = len(self._left), max(map(self._ranks_of, self._left))
            trials_wait = "1 trial waits" if num == 1 else f"{num} trials wait"
            size = self._world.world_size
            reason = f"{trials_wait} for a job with {count} ranks, found {size}"
            command += f" on {count} ranks"
        result["stopped"] = f"stopped: {reason}; {summary}"
        write_json(path / "result.json", {"status": "stopped", **result})
        self._say(f"{result['stopped']}; {command} resumes from here")
        self._say("stopped, not failed: the exit status is 75, which mpirun may report")
        return Stopped.exit_status

    def end_all(self, status: int) -> None:
        """Let all ranks leave."""
        self._send(range(self._world.world_size), Message("end", -1, status))

    def _say(self, line: str) -> None:
        print(line, file=self._screen, flush=True)

    def _send(self, ranks: Iterable[int], message: Message) -> None:
        for rank in ranks:
            self._comm.send(message, dest=rank, tag=TO_RANK)

    # --- what `watch` shows -----------------------------------------------------------

    def _summary(self) -> str:
        study = self._study.optuna
        counts, finished = counts_of(study), finished_trials(study)
        kinds = ", ".join(f"{num} {kind}" for kind, num in counts.items() if num)
        done = f"{sum(counts.values())}/{self._study.num_trials} trials"
        parts = [f"{done}: {kinds}" if kinds else done]
        if finished:
            said = self._study.said(finished[0].values)
            parts.append(f"best {name_of(finished[0].number)}, {said}")
        if self._num_started:
            parts.append(f"ranks busy {self._busy_share:.0%}")
        return " | ".join(parts)

    def _write_progress(self) -> None:
        self._written_at = time.monotonic()
        lines = [f"sweep {self._sweep.run_dir.name}: {self._summary()}"]
        if (left := self._handler.seconds_left()) is not None:
            lines[0] += f" | limit in {format_seconds(left)}"
        for it in self._running.values():
            said = f"{it.unit} {it.number} done, {format_metrics(it.metrics)}"
            said = said if it.number else "in its first epoch"
            lines.append(
                f"  {it.trial.name} on ranks {format_ranges(it.ranks)}: {said}"
            )
        progress = {"lines": lines, "busy_share": self._busy_share}
        with contextlib.suppress(OSError):  # a full disk ends no sweep
            write_json(self._sweep.run_dir / PROGRESS, progress)
