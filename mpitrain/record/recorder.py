"""Rank zero's record of a run: ``metrics.jsonl`` and ``result.json``."""

from __future__ import annotations

import json
import logging
import math
import time
from array import array
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpitrain.console import say, shown
from mpitrain.files import finite, write_json
from mpitrain.launch.job import Job, require_world, seconds_since_start
from mpitrain.launch.process_exit import is_failing
from mpitrain.mpi.shared_arrays import Communicator, communicator
from mpitrain.mpi.world import World
from mpitrain.record.jsonl import CLOSE_SECONDS, JsonlWriter
from mpitrain.record.loop import before_step, mean_over_ranks, rows_of
from mpitrain.record.result import cost_if_known, record_failure, record_job
from mpitrain.record.run_dir import read_result
from mpitrain.record.runs import Exists, open_run
from mpitrain.train.callbacks import Callback
from mpitrain.train.metrics import EpochMetrics, StepMetrics, Throughput
from mpitrain.train.progress import SecondsLeft, finished_line, format_metrics
from mpitrain.watchdog.process import age_seconds

if TYPE_CHECKING:
    from mpitrain.train.trainer import Trainer

logger = logging.getLogger("mpitrain")

_ENCODE = json.JSONEncoder(allow_nan=False).encode

# Fields of `result.json` that a resumed job does not take over.
_OF_THE_JOB = (
    *("status", "best_by", "world_size", "num_nodes", "backend", "start_seconds"),
    *("cost", "stopped", "early_stopping"),
)

_NOT_WRITTEN = ("values", "train_losses", "steps_seconds", "is_end")
# of `EpochMetrics`, as they are

Line = StepMetrics | Mapping[str, object]


class Recorder(Callback):
    """Writes the metrics of steps, epochs and checkpoints, on rank zero.

        Trainer(model, train, val, callbacks=[EpochLines(), Recorder("runs/mine")])

    ``python -m mpitrain watch`` and ``report`` read them. To resume a run, add a
    `Checkpointer` of the same folder; without one the folder must be new.

    A custom loop calls `log` and `finish`::

        recorder = Recorder("runs/mine")
        for step in range(1, 1001):
            recorder.log(step, loss=loss, lr=lr)
        recorder.finish()

    Args:
        run_dir: The run folder.
        start_seconds: What the start of the job took; ``None``: the time from the start
            of the process to that of `fit`.
        seconds_left: Returns the seconds until a time limit stops the training.
        resume_with: What to type to resume, for the screen.
        is_open: Whether this job has opened the folder; a `Checkpointer` says so, too.
    """

    def __init__(
        self,
        run_dir: str | Path,
        *,
        start_seconds: float | None = None,
        seconds_left: SecondsLeft = lambda: None,
        resume_with: str = "the same command",
        is_open: bool = False,
    ) -> None:
        self.run_dir, self.is_open = Path(run_dir), is_open
        self._start_seconds = start_seconds
        self._seconds_left = seconds_left
        self._resume_with = resume_with
        self._before: Mapping[str, Any] = {}
        self._metrics: JsonlWriter | None = None
        self._result: dict[str, Any] = {}
        self._of_epoch: dict[str, float] = {}  # counts of one that a stop has cut
        self._micro_batch_counts: list[int] = []
        self._ranks: Communicator | None = None  # of a custom loop
        self._began = self._validated_at = 0.0
        self._losses = array("d")  # logged since the last validation

    # --- start and end ------------------------------------------------------------

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue a record: drop what was written after the checkpoint."""
        self._before = state

    def state_dict(self) -> dict[str, Any]:
        """Return the length of the record, and the result of the steps until now."""
        if self._metrics is None:
            return {}
        values = {k: v for k, v in self._result.items() if k not in _OF_THE_JOB}
        return {"metrics_bytes": self._metrics.num_bytes, "values": values}

    def flush(self) -> None:
        """Sync the record to the disk; in any thread."""
        if (metrics := self._metrics) is not None:
            metrics.sync()

    def on_fit_start(self, trainer: Trainer) -> None:
        """Open the record."""
        world, plan, state = trainer.engine.world, trainer.engine.plan, trainer.state
        if not world.is_rank_zero:
            return
        if self._start_seconds is None:
            self._start_seconds = seconds_since_start()
        self._open_folder("resume" if self._before or self._result else "refuse")
        self.is_open = True
        write_json(self.run_dir / "inputs.json", trainer.task.inputs)
        self._open(keep_bytes=self._before.get("metrics_bytes", 0))
        self._of_epoch = {}
        self._result = {
            "status": "running",
            "best_by": trainer.best_by,
            **_of_job(world, self._start_seconds),
            "train_seconds": 0.0,
            "epochs": 0,
            "steps": 0,
            "skipped_samples": 0,
            "skipped_steps": 0,
            **self._before.get("values", {}),
        }
        self._begin(
            total_steps=plan.total_steps,
            num_epochs=plan.num_epochs,
            steps_per_epoch=plan.steps_per_epoch,
            global_batch_size=trainer.config.global_batch_size,
        )
        if state.step or state.epoch > 1:
            self._write(
                "resume",
                step=state.step,
                epoch=state.epoch,
                world_size=world.world_size,
                checkpoint=trainer.resumed_from,
            )

    def on_stage_start(self, trainer: Trainer) -> None:
        """Let a script's failure be recorded, too: now all ranks may use the folder."""
        record_job(self.run_dir)

    def on_fit_end(self, trainer: Trainer) -> None:
        """Write that the run is finished."""
        if self._metrics is None:
            return
        for callback in trainer.callbacks:
            if reason := callback.finish_reason():
                self._result["early_stopping"] = reason
        self._end("finished")
        say(
            f"{finished_line(self._result)}, {self._start_seconds or 0.0:.1f} s to "
            f"start; see {shown(self.run_dir)}"
        )

    def on_stop(self, trainer: Trainer, reason: str) -> None:
        """Write that the run was stopped, and can be resumed."""
        if self._metrics is None:
            return
        stopped = f"stopped at step {trainer.state.step}: {reason}"
        self._result |= {"stopped": stopped, "steps": trainer.state.step}
        epoch = trainer.state.epoch_metrics("", is_end=False)
        # Apart: a job that resumes counts them when the epoch ends.
        self._of_epoch = {
            "train_seconds": epoch.epoch_seconds,
            "skipped_samples": epoch.skipped_samples,
            "skipped_steps": epoch.skipped_steps,
        }
        self._end("stopped")
        say(f"{stopped}; {self._resume_with} resumes from here")
        say("stopped, not failed: the exit status is 75, which mpirun may report below")

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:
        """Write what waits, and close the record."""
        metrics, self._metrics = self._metrics, None
        if metrics is None:
            return
        metrics.close(CLOSE_SECONDS)
        # Unless the rank that failed first has written why: this error may follow.
        if read_result(self.run_dir).get("status") == "running":
            record_failure(self.run_dir, f"{type(error).__name__}: {error}")

    def _end(self, status: str) -> None:
        assert self._metrics is not None
        self._before = self.state_dict()  # for a second `fit`
        # The record before the result: who reads "finished" finds all of its lines.
        self._metrics.close()
        self._metrics = None
        self._result |= {"status": status, **cost_if_known(self.run_dir)}
        counts = {k: self._result[k] + num for k, num in self._of_epoch.items()}
        write_json(self.run_dir / "result.json", self._result | counts)

    # --- for a custom loop ----------------------------------------------------------

    def log(
        self, step: int, *, epoch: int | None = None, **values: Any
    ) -> dict[str, float]:
        """Record values of a step, and return them.

        Collective over all ranks. After a resume it drops what an earlier job recorded
        of this step and later ones.

        Args:
            step: Steps that are done, this one included.
            epoch: Of the step, from 1; ``None``: the number of validations before it,
                plus one.
            **values: By name. A tensor `()` is of this rank, and its mean over the
                ranks is recorded; a number is recorded as it is on rank zero. ``loss``,
                ``lr`` and ``gradient_norm`` are those of the trainer's records. Names
                that begin with ``val_`` are of a validation after this step.

        Raises:
            UsageError: The names differ between ranks; on every rank.
        """
        if self._ranks is None:
            world = require_world("Recorder.log")
            self._ranks = communicator(world)
            self._ranks.on_rank_zero(
                lambda: self._start_loop(world, step, values), "open the record"
            )
            # After rank zero has made the folder: other ranks may write logs there.
            record_job(self.run_dir)
            if Job.current is not None:
                # Last of all: a `Checkpointer` knows whether the loop was stopped.
                Job.current.guard.on_leave.insert(0, self._leave)
        found = mean_over_ranks(values, self._ranks)
        if self._metrics is not None:
            self._log(step, epoch, found)
        return found

    def finish(self, stopped: str = "") -> None:
        """Record that the loop is finished, and close the record; local.

        The end of the job calls it, too.

        Args:
            stopped: Why the loop was stopped before its end, such as the reason of
                `Checkpointer.should_stop`: then the run is stopped, and can be resumed.
        """
        self._ranks = None  # a later `log` opens it again
        if self._metrics is None:
            return
        self._result["train_seconds"] += time.monotonic() - self._began
        if stopped:
            stopped = f"stopped at step {self._result['steps']}: {stopped}"
            self._result["stopped"] = stopped
        self._end("stopped" if stopped else "finished")
        say(stopped or finished_line(self._result))

    def _start_loop(self, world: World, step: int, names: Iterable[str]) -> None:
        self._open_folder("refuse")
        record = self.run_dir / "metrics.jsonl"
        is_validation = all(it.startswith("val_") for it in names)
        kept, last, num_validations, self._losses = before_step(
            record, step, is_validation=is_validation
        )
        self._open(keep_bytes=kept)
        before = read_result(self.run_dir)
        self._result = {
            "train_seconds": 0.0,
            **{k: v for k, v in before.items() if k not in ("stopped", "error")},
            "status": "running",
            "epochs": num_validations,
            **_of_job(world, age_seconds()),
            "steps": last,
        }
        self._began = self._validated_at = time.monotonic()
        self._begin(total_steps=None, num_epochs=None)
        if kept:
            self._write("resume", step=last, world_size=world.world_size)

    def _log(self, step: int, epoch: int | None, values: Mapping[str, float]) -> None:
        result, now = self._result, time.monotonic()
        epoch = result["epochs"] + 1 if epoch is None else epoch
        result["steps"] = step
        if "loss" in values:
            self._losses.append(values["loss"])
        for event, row in rows_of(values, self._losses, now - self._validated_at):
            self._write(event, epoch=epoch, step=step, **row)
            if event == "epoch":
                result |= {k: v for k, v in values.items() if k.startswith("val_")}
                result["epochs"], self._validated_at = epoch, now
                self._losses = array("d")

    def _leave(self) -> None:
        """Close the record at the end of the job."""
        if self._metrics is None:
            return
        result = read_result(self.run_dir)
        if result.get("status") == "failed" or is_failing():
            self._metrics.close(CLOSE_SECONDS)
            self._metrics = None
        else:
            self.finish(result.get("stopped", "").partition(": ")[2])

    # --- metrics ------------------------------------------------------------------

    def on_metrics(self, trainer: Trainer, steps: Sequence[StepMetrics]) -> None:
        """Write a line per step, and one if ranks take other micro-batches now."""
        if self._metrics is None:
            return
        self._metrics.write(*steps)
        counts = trainer.engine.strategy.micro_batch_counts
        if counts != self._micro_batch_counts:
            self._micro_batch_counts = counts
            step = trainer.state.step
            self._write("balance", step=step, num_micro_batches=counts)

    def on_throughput(self, trainer: Trainer, throughput: Throughput) -> None:
        """Write a line for the speed of some steps."""
        values = {
            name: round(value, 6) if isinstance(value, float) else value
            for name, value in vars(throughput).items()
            if value is not None
        }
        if (left := self._seconds_left()) is not None:
            values["seconds_left"] = round(left)
        self._write("throughput", **values)

    def on_validation_end(self, trainer: Trainer, epoch: EpochMetrics) -> None:
        """Write a line for a validation within an epoch."""
        if self._metrics is not None and not epoch.is_end:
            self._write_epoch("validation", epoch)

    def on_epoch_end(self, trainer: Trainer, epoch: EpochMetrics) -> None:
        """Write a line for the epoch, and add it to the result."""
        if self._metrics is None:
            return
        self._write_epoch("epoch", epoch)
        result = self._result
        result["epochs"] = epoch.epoch
        result["train_seconds"] += epoch.epoch_seconds
        result["skipped_samples"] += epoch.skipped_samples
        result["skipped_steps"] += epoch.skipped_steps

    def _write_epoch(self, event: str, epoch: EpochMetrics) -> None:
        validation = _prefixed("val", epoch.values)
        values = {k: v for k, v in vars(epoch).items() if k not in _NOT_WRITTEN}
        rate = epoch.samples_per_second
        others = _prefixed("train", epoch.train_losses)
        self._write(event, **values, **others, **validation, samples_per_second=rate)
        self._result |= {**validation, "steps": epoch.step}

    def on_checkpoint(self, trainer: Trainer, checkpoint: Any) -> None:
        """Write a line for the checkpoint."""
        self._write(
            "checkpoint",
            step=checkpoint.step,
            copy_seconds=round(checkpoint.copy_seconds, 6),
            write_seconds=round(checkpoint.write_seconds, 6),
            **({"error": checkpoint.error} if checkpoint.error else {}),
        )

    def on_test_end(self, trainer: Trainer, evaluation: Any, skipped: int) -> None:
        """Write the metrics of the test set, also after the end of the training."""
        if not self._result:
            return
        named, num = _prefixed("test", evaluation.values), evaluation.num_samples
        self._result.update(named)
        self._result["skipped_samples"] += skipped
        self._write_late("test", **named, test_samples=num, skipped_samples=skipped)
        say(f"test: {format_metrics(named)} on {num:,} samples")

    def on_predict_end(self, trainer: Trainer, data: Any, num_samples: int) -> None:
        """Write how many samples of which class of data set were predicted."""
        if self._result:
            self._write_late(
                "predict",
                step=trainer.state.step,
                data=type(data).__name__,
                predicted_samples=num_samples,
            )

    def _write_late(self, event: str, **values: object) -> None:
        """Write a line, also after the end of the training."""
        status = self._result["status"]
        if self._metrics is None:
            self._open(keep_bytes=None)
        self._write(event, **values)
        if status != "running":
            self._end(status)

    def _open_folder(self, exists: Exists) -> None:
        path, job = self.run_dir.resolve(), Job.current
        if not self.is_open and not (job and path in job.run_dirs):
            open_run(path.parent, path.name, exists=exists)

    def _begin(self, **plan: object) -> None:
        # Again at the end only: a rank that fails writes into it, too
        # (`record_failure`), and must not be overwritten.
        write_json(self.run_dir / "result.json", self._result)
        names = ("world_size", "num_nodes", "start_seconds")
        self._write("begin", **{it: self._result[it] for it in names}, **plan)

    def _open(self, keep_bytes: int | None) -> None:
        path = self.run_dir / "metrics.jsonl"
        self._metrics = JsonlWriter(path, line_of, keep_bytes)

    def _write(self, event: str, **values: object) -> None:
        if self._metrics is not None:
            now = round(time.time(), 3)
            self._metrics.write({"event": event, "time": now, **values})


def line_of(event: Line) -> str:
    """Return a line of ``metrics.jsonl``, with floats in full precision.

    >>> line_of(StepMetrics(epoch=1, step=2, loss=0.5, lr=1e-3, grad_norm=math.inf))
    '{"event": "step", "epoch": 1, "step": 2, "train_loss": 0.5, "lr": 0.001, \
"gradient_norm": null}'
    >>> line_of({"event": "test", "test_loss": 0.1})
    '{"event": "test", "test_loss": 0.1}'
    """
    if isinstance(event, StepMetrics):
        epoch, step, loss, lr, norm, groups, others = event
        if math.isfinite(loss + lr + norm) and not groups and not others:
            # By hand: `json` takes six times as long, and they are many.
            return (
                f'{{"event": "step", "epoch": {epoch}, "step": {step}, '
                f'"train_loss": {loss!r}, "lr": {lr!r}, "gradient_norm": {norm!r}}}'
            )
        values = {"train_loss": loss, "lr": lr, "gradient_norm": norm}
        values |= _prefixed("train", others)
        event = {"event": "step", "epoch": epoch, "step": step, **values}
        if groups:
            event["lr_groups"] = [it if math.isfinite(it) else None for it in groups]
    return _ENCODE(finite(event))


def _of_job(world: World, start_seconds: float) -> dict[str, object]:
    names = ("world_size", "num_nodes", "backend")
    found = {name: getattr(world, name) for name in names}
    return {**found, "start_seconds": start_seconds}


def _prefixed(prefix: str, values: Mapping[str, float]) -> dict[str, float]:
    return {f"{prefix}_{name}": value for name, value in values.items()}
