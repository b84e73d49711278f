"""The callback that saves a training: writes checkpoints, resumes, stops in time.

All ranks call it at the same steps. What one of them alone knows (a signal, the time, a
full disk) they exchange now and then by `Consensus`, so that all decide alike at the
same step, and none waits for another. From a step to a checkpoint on the disk:

    training, all ranks         a thread of each rank           a thread of rank zero
    -------------------         ---------------------           ---------------------
    on_step_end: exchange
    it is time: copy tensors
      to host memory ---------> write rank-R.bin, fsync
    on_step_end: exchange       |
      (a rank still writes)     v
    on_step_end: exchange
      (all have written):
      gather the hashes ----------------------------------> flush other callbacks
    on_step_end: exchange                                   write JSON and SHA256SUMS
                                                            rename the folder
    on_step_end: exchange <-------------------------------- remove old checkpoints
      (it is complete):
      on_checkpoint

`RunCheckpoints` has what a loop of one's own needs, too; `CheckpointManager` the two
threads; `TensorWriter` one rank's file; `Consensus` the exchange.
"""

from __future__ import annotations

import logging
import math
import time
from pathlib import Path
from typing import ClassVar

from mpitrain.checkpoint.layout import list_checkpoints, set_aside
from mpitrain.checkpoint.manager import CheckpointManager, Progress, WriteResult
from mpitrain.checkpoint.memory_level import MemoryLevel
from mpitrain.checkpoint.preemption import REASONS
from mpitrain.checkpoint.resume import best_score, check_same_steps, find_best
from mpitrain.checkpoint.run_checkpoints import CheckpointError, RunCheckpoints
from mpitrain.checkpoint.save_clock import SaveClock
from mpitrain.checkpoint.tensors import (
    load_averaged,
    load_random,
    load_stage,
    schedules_to_save,
    split_state,
)
from mpitrain.checkpoint.training_state import (
    Snapshot,
    callback_states,
    check_same_best,
    collect,
    config_of,
    restore_trainer,
)
from mpitrain.console import say, shown
from mpitrain.errors import UsageError
from mpitrain.launch.job import heartbeat
from mpitrain.mpi.consensus import Consensus
from mpitrain.record.recorder import Recorder
from mpitrain.record.runs import differences
from mpitrain.train.callbacks import Callback, StopRequested, check_state_names
from mpitrain.train.evaluate import score_of, warn_of_no_best
from mpitrain.train.metrics import EpochMetrics, TrainState
from mpitrain.train.trainer import Trainer
from mpitrain.train.verification import ComputeError

logger = logging.getLogger("mpitrain")

BACK_OFF_SECONDS = (30.0, 60.0, 120.0, 300.0, 600.0)
"""After a checkpoint that failed, when the next one is tried."""

LAST_TRIES = (0.0, 1.0, 5.0)  # seconds before each attempt to write the last checkpoint
FIRST_BYTES_PER_SECOND = 100e6  # assumed speed of the disk before the first checkpoint

STOP, SAVE, ENDED, FAILED = range(4)
"""What the ranks exchange, by all-reduce(MAX). STOP: the reason to stop; 0: none. SAVE:
the number of the `SaveClock` whose time has come. ENDED, FAILED:
`Progress.to_maxima`."""

STEP, EVALUATION = range(2)  # the kinds of work between two exchanges


class Checkpointer(RunCheckpoints, Callback):
    """Writes checkpoints, resumes from them, and stops the training when asked to.

        Trainer(model, train, val, callbacks=[Checkpointer("runs/mine")]).fit()

    Started again, the script resumes where it was, also within an epoch and on another
    number of ranks. SIGUSR2, SIGTERM, a file ``stop`` in the run folder and the time
    limit of the scheduler stop it: after a checkpoint `fit` raises `Stopped`, whose
    exit status is 75. In a loop of your own call `restore` and `save`.

    Args:
        run_dir: The run folder, on a file system that all nodes share. Checkpoints are
            in ``checkpoints/``.
        every_epochs: Epochs between two checkpoints; ``None``: not by epochs. One that
            is the best so far is written, too, if any of these, ``best_by`` or
            ``load_best_at_end`` is set.
        every_steps: Steps between two checkpoints; ``None``: not by steps.
        every_minutes: Minutes between two checkpoints; ``None``: not by time. With
            ``best_by`` each epoch that is better is written besides.
        keep: How many of the newest are kept, beside the best one; ``None``: all.
        memory: Under ``supervise --restarts``, the share of a node's free memory for
            checkpoints in between, from which a restart resumes; 0: none.
        best_by: The metric of the best one, such as ``"val_loss"``; ``None``: accuracy,
            else loss, else there is no best one. See `CheckpointConfig`.
        resume: ``"auto"``: from the newest checkpoint in `run_dir`. ``"never"``: an
            error if the run exists. Or the path of another run folder or checkpoint.
        time_limit: ``[[hours:]minutes:]seconds`` since the start of the process.
        load_best_at_end: Whether the finished training has the weights of the best
            checkpoint: `fit` returns its metrics, `Trainer.state_dict` its weights.

    Attributes:
        reader: Reads the checkpoint that is resumed from; ``None`` without one.
        is_disabled: Whether nothing is saved, since hosts do not see the run folder.
        data: ``num_classes``, ``in_channels`` and ``image_size`` of the data set, for
            ``mpitrain export``.
    """

    runs_last: ClassVar[bool] = True

    def __init__(
        self,
        run_dir: str | Path,
        *,
        every_epochs: int | None = 1,
        every_steps: int | None = None,
        every_minutes: float | None = 10.0,
        keep: int | None = 3,
        memory: float = 0.25,
        best_by: str | None = None,
        resume: str = "auto",
        time_limit: str | None = None,
        load_best_at_end: bool = False,
    ) -> None:
        super().__init__(
            run_dir, keep=keep, memory=memory, resume=resume, time_limit=time_limit
        )
        for name, value in (
            ("every_epochs", every_epochs),
            ("every_steps", every_steps),
            ("every_minutes", every_minutes),
            ("keep", keep),
        ):
            if value is not None and value <= 0:
                raise UsageError(f"{name} must be above 0 or None, found {value!r}")
        if not 0 <= memory < 1:
            raise UsageError(f"memory must be from 0 to below 1, found {memory!r}")
        self._every = every_epochs, every_steps
        self._best_by, self._load_best_at_end = best_by, load_best_at_end
        self._saves_best = any((*self._every, best_by, load_best_at_end))
        self._clock = SaveClock(60 * every_minutes if every_minutes else math.inf)
        self._failed_in_a_row = 0
        self._saved: object = None
        self._last_tick: float | None = None
        self._best = -math.inf
        self._has_warned = False  # that no checkpoint is the best one
        self._level: MemoryLevel | None = None

    # --- hooks of the trainer -----------------------------------------------------

    def setup(self, trainer: Trainer) -> None:
        """Load model, state and callbacks, if there is a checkpoint."""
        world, engine = trainer.engine.world, trainer.engine
        if self._manager is not None:
            raise UsageError(
                "the Checkpointer was used before; make one for each fit"
            ).on_all_ranks()
        trainer.best_by = self._best_by
        if trainer.config.dry_run:
            self.is_disabled = True
            return
        if self._best_by and not engine.data.val_sets:
            raise UsageError(
                f"best_by={self._best_by!r} without val_data; expected validation data"
            ).on_all_ranks()
        self.open(world)
        path = self.run_dir.resolve()
        for it in trainer.callbacks:
            if isinstance(it, Recorder) and it.run_dir.resolve() == path:
                self._has_recorder = it.is_open = True
        self._start_handler()
        if self.is_disabled:
            return
        split_state(engine.model)  # what cannot be saved is an error now
        check_state_names(trainer.callbacks)
        callback_states(trainer)
        count = FAILED + 1 + MemoryLevel.COUNT
        self._consensus = Consensus(world, count=count, kinds=EVALUATION + 1)
        others = [it for it in trainer.callbacks if it is not self]

        def flush() -> None:  # a checkpoint counts on what the others have recorded
            for callback in others:
                callback.flush()

        self._manager = CheckpointManager(
            self.run_dir, world, self._ranks, keep=self._keep, before_rename=flush
        )
        if self._folder is not None and self._supervision is not None:
            self._level = MemoryLevel(
                self._folder, self._supervision, world, self._ranks, self._memory
            )
        if self.reader is None:
            return
        found = self.reader.metadata["trainer"]
        config = config_of(trainer, self.run_dir.name)
        path = self.reader.checkpoint.path
        if found is None:
            other = f"{path} was not written by a Trainer, but by `save`"
            raise UsageError(other).on_all_ranks()
        is_own = self.reader.metadata["run"] == self._run_id
        changed = differences(found["config"], config, trainer.config.may_change)
        if is_own and changed:
            raise UsageError(
                f"{path} was written with another configuration: {'; '.join(changed)}\n"
                f"Expected the same, or a new folder, with resume={str(self.run_dir)!r}"
            ).on_all_ranks()
        if is_own:
            check_same_best(self.reader, self._best_by)
            self._best = best_score(self.run_dir, self._ranks)
        else:
            check_same_steps(self.reader, config)
        # The callbacks of another run count what is not in this one's record.
        restore_trainer(self.reader, trainer, others if is_own else (), is_own=is_own)
        state = trainer.state
        if not is_own and engine.plan.is_done(state):
            raise UsageError(
                f"{path} was written after epoch {state.epoch - 1}, step {state.step}, "
                f"and this run has {engine.plan.length}: there is nothing to train. "
                "Expected more, or the weights alone (--weights)"
            ).on_all_ranks()
        if self._is_from_memory:
            assert self._level is not None
            self._level.saved = _position(state)  # the disk has not
        elif is_own:
            self._saved = _position(state)

    def on_fit_start(self, trainer: Trainer) -> None:
        """Print what is resumed."""
        self._first_step = trainer.state.step
        self._record(status="running")
        if self.reader is None or not trainer.engine.world.is_rank_zero:
            return
        found, num = self.reader.metadata["trainer"], self.reader.metadata["world_size"]
        say(
            f"resuming from {shown(self.reader.checkpoint.path)}: step "
            f"{trainer.state.step}, epoch {trainer.state.epoch}, written by {num} "
            f"rank{'s' * (num != 1)}"
        )
        config = config_of(trainer, self.run_dir.name)
        for change in differences(found["config"], config, trainer.config.may_change):
            say(f"changed since then: {change}")

    def on_stage_start(self, trainer: Trainer) -> None:
        """Load optimizer, EMA, loss scale and random numbers, if they are saved."""
        if self.is_disabled:
            return
        self._consensus.forget()
        engine = trainer.engine
        if not self._save_seconds:
            # Not measured yet. An optimizer may have twice as much as the model.
            tensors = split_state(engine.model)[0].values()
            size = 3 * sum(tensor.numel() * tensor.element_size() for tensor in tensors)
            self._save_seconds = size / FIRST_BYTES_PER_SECOND
        schedules_to_save(engine.optimizer)  # what cannot be saved is an error now
        if self.reader is None:
            return
        reader, self.reader = self.reader, None
        load_stage(reader, engine, is_own=reader.metadata["run"] == self._run_id)
        step = trainer.state.step
        load_random(reader, engine.world, seed=trainer.config.seed, step=step)

    def on_step_end(self, trainer: Trainer) -> None:
        """Save if it is time to; raises `StopRequested` if all ranks are to stop."""
        if self.is_disabled:
            return
        state, validates_every = trainer.state, trainer.config.validate_every_steps
        every = self._every[1]
        if every and state.step % every == 0:
            self._clock.is_due = True
        # First: a stop is known to all here, and saves by itself, in `on_stop`.
        self._tick(trainer, STEP)
        if not validates_every or state.step % validates_every:
            self._save_if_due(trainer)  # else after the validation, which follows

    def on_validation_batch_end(self, trainer: Trainer) -> None:
        """Stop if all ranks are to; a checkpoint waits for the end of it."""
        if not self.is_disabled:
            self._tick(trainer, EVALUATION)

    def on_validation_end(self, trainer: Trainer, epoch: EpochMetrics) -> None:
        """Save within an epoch if it is time to, or if the metric is the best one."""
        if not self.is_disabled and not epoch.is_end:
            self._save_validated(trainer, epoch)

    def on_epoch_end(self, trainer: Trainer, epoch: EpochMetrics) -> None:
        """Save if it is time to; raises `StopRequested` if all ranks are to stop."""
        if not self.is_disabled:
            self._save_validated(trainer, epoch)

    def on_train_end(self, trainer: Trainer) -> None:
        """Write the last checkpoint.

        Raises:
            CheckpointError: It could not be written; on every rank.
        """
        self._end(trainer, "writing the last checkpoint")
        if self._load_best_at_end and not self.is_disabled:
            self._load_best(trainer)

    def on_fit_end(self, trainer: Trainer) -> None:
        """Record that the run is finished, unless a `Recorder` does."""
        self._record(status="finished", steps=trainer.state.step)

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:
        """Let signals end the process again, and no thread complete a checkpoint."""
        if self._manager is not None:
            self._consensus.abandon()
            self._manager.abandon()  # a later `fit` removes what is not complete
        # After `abandon`: then no thread adds a checkpoint to those that are listed.
        if isinstance(error, ComputeError):
            self._set_unverified_aside(error.verified_step or self._first_step)
        self.close()

    def on_stop(self, trainer: Trainer, reason: str) -> None:
        """Write the last checkpoint, as `on_train_end`, and that the run is stopped."""
        self._stop_reason = reason
        self._end(trainer, "stopping")
        stopped = f"stopped at step {trainer.state.step}: {reason}"
        self._record(status="stopped", stopped=stopped)

    # --- inside -----------------------------------------------------------------------

    def _set_unverified_aside(self, verified_step: int) -> None:
        """Let nobody resume from what may hold wrong numbers; local.

        If nothing was ever verified, from what this job has written.
        """
        if self._folder is not None:
            self._folder.remove()
        if self._world is None or not self._world.is_rank_zero:
            return
        for checkpoint in list_checkpoints(self.run_dir):
            if checkpoint.step > verified_step:
                aside = set_aside(checkpoint, "unverified")
                logger.warning("not verified: %s is set aside", shown(aside))

    def _end(self, trainer: Trainer, doing: str) -> None:
        if self.is_disabled:
            return
        self._save_now(trainer, doing)
        if self._level is not None:
            self._level.close()
        self._consensus.close()
        self.close()  # last: until here a signal must not end this rank

    def _load_best(self, trainer: Trainer) -> None:
        engine, state = trainer.engine, trainer.state
        reader = find_best(self.run_dir, engine.world, self._ranks)
        if reader is None:
            return
        prefix, ema = engine.part.prefix, engine.optimizer.ema_values
        load_averaged(reader, engine.model, ema, prefix)
        of_best = TrainState(**reader.metadata["trainer"]["state"])
        state.metrics, state.val_samples = of_best.metrics, of_best.val_samples
        trainer.results = {}  # of the last validation
        if engine.world.is_rank_zero:
            say(f"the weights are those of {shown(reader.checkpoint.path)}, the best")

    def _tick(self, trainer: Trainer, kind: int) -> None:
        now = time.monotonic()
        if self._last_tick is not None:
            self._longest_gap = max(self._longest_gap, now - self._last_tick)
        self._last_tick = now
        if not self._consensus.is_due(kind):  # equal on all ranks
            return
        found = self._consensus.exchange(self._own_numbers())
        if found is None:
            return
        self._clock.apply(found[SAVE])
        assert self._manager is not None
        progress = Progress.from_maxima(found[ENDED : FAILED + 1])
        if (result := self._manager.apply_progress(progress)) is not None:
            self._report(trainer, result)
        if self._level is not None:
            self._level.apply(found[FAILED + 1 :])
        if found[STOP]:
            raise StopRequested(REASONS[found[STOP]])

    def _own_numbers(self) -> list[int]:
        assert self._world is not None
        assert self._handler is not None
        assert self._manager is not None
        return [
            self._handler.requested(),
            self._clock.own_number() if self._world.is_rank_zero else 0,
            *self._manager.local_progress().to_maxima(),
            *(self._level.own_numbers() if self._level else [0] * MemoryLevel.COUNT),
        ]

    def _save_validated(self, trainer: Trainer, epoch: EpochMetrics) -> None:
        values, every = epoch.values, self._every[0]
        metric = score_of(values, self._best_by, losses=epoch.train_losses)
        is_best = metric is not None and metric > self._best
        if epoch.is_end and every is not None and epoch.epoch % every == 0:
            self._clock.is_due = True
        self._clock.is_due |= is_best and self._saves_best
        if trainer.engine.world.is_rank_zero and not self._has_warned:
            self._has_warned = True
            warn_of_no_best(values, self._best_by)
        # The best alone waits for a write that is under way: a newer one comes soon, a
        # better one perhaps never.
        self._save_if_due(trainer, may_queue=is_best)
        self._tick(trainer, EVALUATION)

    def _save_if_due(self, trainer: Trainer, *, may_queue: bool = False) -> None:
        assert self._manager is not None
        if self._clock.may_save and (may_queue or not self._manager.is_busy):
            self._save(trainer)
        elif self._level is not None and self._level.is_due:
            with trainer.timer("checkpoint"):
                position = _position(trainer.state)
                self._level.save(position, lambda: self._collect(trainer))

    def _finish(self, trainer: Trainer, doing: str) -> WriteResult | None:
        assert self._manager is not None
        with trainer.timer("checkpoint"):
            result = self._manager.finish(doing)
        if result is not None:
            self._report(trainer, result)
        return result

    def _save(self, trainer: Trainer) -> None:
        self._clock.is_due = False
        position = _position(trainer.state)
        if position == self._saved:
            return
        self._saved = position  # `_report` takes it back if the write fails
        self._clock.restart()
        assert self._manager is not None
        with trainer.timer("checkpoint"):
            snapshot = self._collect(trainer, flush=True)
            heartbeat("copying a checkpoint")
            self._manager.save(*snapshot)
        if (metric := snapshot.metadata["metric"]) is not None:
            self._best = max(self._best, metric)

    def _collect(self, trainer: Trainer, *, flush: bool = False) -> Snapshot:
        # The record has all steps before its length is saved.
        trainer.sync_metrics(flush=flush)
        name = self.run_dir.name
        return collect(trainer, self._run_id, name, self.data, self._best_by)

    def _save_now(self, trainer: Trainer, doing: str) -> None:
        while self._finish(trainer, doing) is not None:
            pass
        for seconds in LAST_TRIES:
            time.sleep(seconds)
            self._save(trainer)
            result = self._finish(trainer, doing)
            if result is None or not result.error:
                return  # it is there, or was before
        assert result is not None
        raise CheckpointError(
            f"the last checkpoint could not be written: {result.error}.\nThe one "
            "before it is complete, and a job with this run's --name resumes from "
            "there, once there is room"
        ).on_all_ranks()

    def _report(self, trainer: Trainer, result: WriteResult) -> None:
        trainer.call("on_checkpoint", result)
        if not result.error:
            # The longest one, for `_margin`.
            self._save_seconds = max(self._save_seconds, result.write_seconds)
            self._failed_in_a_row = 0
            logger.info(
                "checkpoint of step %d: %.3f s to copy, %.3f s to write",
                *(result.step, result.copy_seconds, result.write_seconds),
            )
            return
        wait = BACK_OFF_SECONDS[min(self._failed_in_a_row, len(BACK_OFF_SECONDS) - 1)]
        self._best = -math.inf  # it may have been the one that was lost
        self._failed_in_a_row += 1
        assert self._manager is not None
        if not self._manager.is_busy:  # else a newer one, which waited, is written
            self._saved = None
        self._clock.restart(back_off_seconds=wait)
        if trainer.engine.world.is_rank_zero:
            logger.warning(
                "the checkpoint of step %d could not be written: %s; training goes on, "
                "the next try is in %.0f s",
                *(result.step, result.error, wait),
            )


def _position(state: TrainState) -> tuple[int, ...]:
    return state.step, state.epoch, state.epoch_step, state.validated_step
