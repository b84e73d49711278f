"""The server: a thread of rank zero that gives trials to ranks as they become free."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from mpitrain.checkpoint.preemption import REASONS, PreemptionHandler
from mpitrain.errors import MpitrainError, Stopped, UsageError
from mpitrain.mpi.mailbox import Mailbox
from mpitrain.mpi.world import World
from mpitrain.record.recorder import record_failure
from mpitrain.record.run_dir import read_result, shown, write_json
from mpitrain.tools.sweep.config import PROGRESS, PreparedSweep
from mpitrain.tools.sweep.messages import TO_RANK, TO_SERVER, Message, Outcome
from mpitrain.tools.sweep.placement import Placement
from mpitrain.tools.sweep.study import Study, Trial
from mpitrain.train.progress import format_seconds

LOOKAHEAD = 4  # trials that are chosen before there is room for them
MAX_OVERTAKEN = 8  # smaller trials that may start before one that waits for room
MAX_STARTS = 3  # a trial that was begun in so many jobs that it ended fails
MAX_FAILURES = 5  # without one that finished: the cause is common to all
SLEEP_SECONDS = 0.005
PROGRESS_SECONDS = 1.0  # how often the progress is written


@dataclass(kw_only=True)
class Running:
    """A trial that some ranks train."""

    trial: Trial
    ranks: list[int]
    left: set[int]  # the ranks that have not ended
    outcomes: list[Outcome] = field(default_factory=list)
    is_aborted: bool = False
    epoch: int = 0  # the last one
    values: Mapping[str, float] = field(default_factory=dict)  # its metrics


class Server:
    """Asks Optuna for trials, places them, and records how they end."""

    def __init__(
        self,
        mailbox: Mailbox,
        world: World,
        sweep: PreparedSweep,
        handler: PreemptionHandler,
        say: Callable[[str], object],
    ) -> None:
        self._mailbox, self._world, self._sweep = mailbox, world, sweep
        self._handler, self._say = handler, say
        config, search = sweep.config, sweep.search
        self._placement = Placement(world, share_gpus=config.share_gpus)
        self._study = Study(
            sweep.path, search, search.num_trials(config.trials), sweep.training.seed
        )
        self._held = self._study.unfinished()  # chosen, and not begun in this job
        self._num_overtaken = 0  # how many trials began before the first of these
        self._running: dict[int, Running] = {}
        self._num_started = 0
        self._stop_reason = 0
        # Seconds of ranks: with a trial, until now, and until the last one began.
        self._began = self._counted_at = time.monotonic()
        self._first_start = self._last_start = math.inf
        self._busy = self._busy_at_last_start = 0.0
        self._written_at = 0.0

    def run(self) -> int:
        """Serve until the sweep ends, or this job of it; return the exit status."""
        sweep, study = self._sweep, self._study
        again = f", {len(self._held)} of them begun" if self._held else ""
        counts = study.counts()
        self._say(
            f"sweep {sweep.path.name}: {study.num_trials} trials{again}, "
            f"{sum(counts.values())} done; folder {shown(sweep.path)}"
        )
        while True:
            self._check_stop()
            if not self._stop_reason:
                self._assign()
            if not self._running:
                break
            while (message := self._mailbox.receive(TO_SERVER)) is not None:
                self._receive(message)
            if time.monotonic() > self._written_at + PROGRESS_SECONDS:
                self._write_progress()
            time.sleep(SLEEP_SECONDS)
        self._write_progress()
        return self._end()

    # --- trials begin -----------------------------------------------------------------

    def _assign(self) -> None:
        """Start trials as long as there is room, by and large in their order."""
        while self._placement.num_busy < self._world.world_size:
            if not any(self._start_held(at) for at in range(len(self._held))):
                must_wait = self._num_overtaken >= MAX_OVERTAKEN
                if must_wait or len(self._held) >= LOOKAHEAD or not self._hold():
                    return

    def _hold(self) -> bool:
        """Choose another trial, if there is one."""
        trial = self._study.ask()
        if trial is not None:
            self._held.append(trial)
        return trial is not None

    def _start_held(self, at: int) -> bool:
        """Start a trial of those that wait; return whether it no longer waits."""
        if at and self._num_overtaken >= MAX_OVERTAKEN:
            return False
        trial = self._held[at]
        count = trial.num_ranks(self._sweep.config.ranks_per_trial)
        error, size = "", self._world.world_size
        if count > size:
            error = f"needs {count} ranks, and the job has {size}"
        elif trial.num_starts >= MAX_STARTS:
            error = f"ended the job {trial.num_starts} times"
        if error:
            del self._held[at]
            self._fail(trial, error)
            return True
        self._count()
        ranks = self._placement.take(count)
        if ranks is None:
            return False
        del self._held[at]
        self._num_overtaken = self._num_overtaken + 1 if at else 0
        self._study.set_starts(trial, trial.num_starts + 1)
        id, self._num_started = self._num_started, self._num_started + 1
        self._running[id] = Running(trial=trial, ranks=ranks, left=set(ranks))
        self._last_start, self._busy_at_last_start = time.monotonic(), self._busy
        self._first_start = min(self._first_start, self._last_start)
        self._send(ranks, Message("start", id, (ranks, self._flags_of(trial))))
        return True

    def _flags_of(self, trial: Trial) -> list[str]:
        sweep, training = self._sweep, self._sweep.training
        flags = [*sweep.flags, *trial.flags, "--name", trial.name]
        flags += ["--runs-dir", str(sweep.path)]
        if "wandb" in training.log and training.wandb_group is None:
            flags += ["--wandb-group", sweep.path.name]
        return flags

    # --- trials run and end -----------------------------------------------------------

    def _receive(self, message: Message) -> None:
        running = self._running[message.id]
        if message.kind == "epoch":
            self._take_epoch(message.id, running, *message.data)
            return
        outcome: Outcome = message.data
        running.outcomes.append(outcome)
        running.left.discard(outcome.rank)
        if outcome.status == "failed" and not running.is_aborted:
            running.is_aborted = True
            self._send(running.left, Message("abort", message.id))
        if not running.left:
            del self._running[message.id]
            self._count()
            self._placement.give_back(running.ranks)
            self._finish(running)

    def _take_epoch(
        self, id: int, running: Running, epoch: int, values: Mapping[str, float]
    ) -> None:
        running.epoch, running.values = epoch, values
        search = self._sweep.search
        if search.pruner is not None:
            value = values.get(search.metrics[0][1], math.nan)
            is_pruned = self._study.should_prune(running.trial.number, epoch, value)
            self._send(running.ranks[:1], Message("verdict", id, is_pruned))

    def _finish(self, running: Running) -> None:
        """Record how a trial has ended."""
        trial, study = running.trial, self._study
        path = self._sweep.path / trial.name
        outcomes = sorted(running.outcomes, key=lambda it: (it.is_consequence, it.rank))
        statuses = {outcome.status for outcome in outcomes}
        if "failed" in statuses:
            first = next(it for it in outcomes if it.status == "failed")
            is_usage = first.exit_status == UsageError.exit_status
            self._fail(trial, first.error, is_usage=is_usage)
        elif "stopped" in statuses:  # goes on in another job
            study.set_starts(trial, 0)
            self._stop(max(outcome.stop_reason for outcome in outcomes))
        elif "pruned" in statuses:
            study.prune(trial.number)
            self._say(f"{trial.name} pruned after epoch {running.epoch}")
        else:
            try:
                study.finish(trial.number, result := read_result(path))
            except MpitrainError as error:
                self._fail(trial, str(error))
                return
            values = ", ".join(
                f"{name} {study.metric_of(result, name):.4g}"
                for _, name in self._sweep.search.metrics
            )
            flags = " ".join(trial.flags)
            self._say(f"{trial.name} finished: {values} | {flags}")

    def _fail(self, trial: Trial, error: str, *, is_usage: bool = False) -> None:
        """Record a trial that has failed; raise if none can succeed."""
        path = self._sweep.path / trial.name
        self._study.fail(trial.number, error)
        if path.is_dir() and read_result(path).get("status") == "running":
            record_failure(path, error)
        logs = f"; see {shown(path / 'logs')}" if path.is_dir() else ""
        self._say(f"{trial.name} failed: {error}{logs}")
        counts = self._study.counts()
        if counts["finished"] or counts["pruned"]:
            return
        if is_usage and counts["failed"] == 1:
            raise UsageError(f"{trial.name}: {error}")
        if counts["failed"] >= min(MAX_FAILURES, self._study.num_trials):
            raise MpitrainError(
                f"the first {counts['failed']} trials failed, the last one: {error}"
            )

    # --- the end ----------------------------------------------------------------------

    def _check_stop(self) -> None:
        if not self._stop_reason and (reason := self._handler.requested()):
            self._stop(reason)

    def _stop(self, reason: int) -> None:
        """Let all trials stop, with a checkpoint."""
        if self._stop_reason:
            return
        self._stop_reason = reason
        for id, running in self._running.items():
            self._send(running.left, Message("stop", id, reason))

    def _end(self) -> int:
        path, study = self._sweep.path, self._study
        seconds = format_seconds(time.monotonic() - self._began)
        summary = f"{self._counted()} in {seconds}"
        best, metrics = study.best(), self._sweep.search.metrics
        if best is not None:
            values = (
                f"{name} {value:.4g}"
                for (_, name), value in zip(metrics, best.values, strict=True)
            )
            name = f"trial-{best.number:04}"
            summary += f"; best {name}, {', '.join(values)}"
        counts = study.counts()
        done = sum(counts.values())
        result: dict[str, Any] = {"trials": study.num_trials, "summary": summary}
        if done >= study.num_trials:
            if done == counts["failed"]:
                raise MpitrainError(f"no trial has finished: {summary}")
            write_json(path / "result.json", {"status": "finished", **result})
            self._say(f"finished: {summary}; see {shown(path)}")
            return 0
        reason = REASONS[self._stop_reason]
        stopped = f"stopped: {reason}; {done} of {study.num_trials} trials are done"
        result["stopped"] = stopped
        write_json(path / "result.json", {"status": "stopped", **result})
        self._say(f"{stopped}; the same command resumes from here")
        self._say("stopped, not failed: the exit status is 75, which mpirun may report")
        return Stopped.exit_status

    def end_all(self, status: int) -> None:
        """Let all ranks leave."""
        self._send(range(self._world.world_size), Message("end", -1, status))

    # --- what `watch` shows -----------------------------------------------------------

    def _counted(self) -> str:
        found = [f"{n} {what}" for what, n in self._study.counts().items() if n]
        return ", ".join(found) or "no trial done"

    def _count(self) -> None:
        """Add up the time of busy ranks; call it before their number changes."""
        now = time.monotonic()
        num = self._placement.num_busy
        self._busy += num * (now - self._counted_at)
        self._counted_at = now

    def busy_share(self) -> float | None:
        """Return the share of ranks that had a trial, until the last one began."""
        seconds = self._last_start - self._first_start
        if not 0 < seconds < math.inf:
            return None
        return self._busy_at_last_start / (seconds * self._world.world_size)

    def _write_progress(self) -> None:
        self._written_at = time.monotonic()
        best, left = self._study.best(), self._handler.seconds_left()
        running = [
            {
                "trial": it.trial.name,
                "ranks": it.ranks,
                "epoch": it.epoch,
                "values": it.values,
                "flags": it.trial.flags,
            }
            for it in self._running.values()
        ]
        progress = {
            "time": time.time(),
            "trials": self._study.num_trials,
            **self._study.counts(),
            "running": running,
            "best": None
            if best is None
            else {"trial": f"trial-{best.number:04}", "values": best.values},
            "metrics": [name for _, name in self._sweep.search.metrics],
            "busy_share": self.busy_share(),
            "seconds_left": left,
        }
        write_json(self._sweep.path / PROGRESS, progress)

    def _send(self, ranks: Iterable[int], message: Message) -> None:
        for rank in ranks:
            self._mailbox.send(message, rank, TO_RANK)
