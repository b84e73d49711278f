"""Keeps a training from being lost: writes checkpoints, goes on from them, stops.

All ranks come by at the same steps. What one of them alone knows (its signal, the time,
a disk that is full) they tell each other now and then, by `Consensus`, so that all do
the same at the same step, and none waits for another.
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn, Protocol

from mpitrain.checkpoints.config import CheckpointConfig
from mpitrain.checkpoints.loading import Loader
from mpitrain.checkpoints.saving import Outcome, Saver
from mpitrain.errors import MpitrainError, agreed
from mpitrain.launch.consensus import Consensus
from mpitrain.launch.shared import Ranks
from mpitrain.record.times import CHECKPOINT
from mpitrain.train.plan import Stage
from mpitrain.train.state import (
    load_model,
    load_progress,
    load_random,
    split_state,
    tensors_of,
)
from mpitrain.train.steps import SoFar
from mpitrain.train.stopping import FIRST_MARGIN_SECONDS, REASONS, Stopped, Stopper
from mpitrain.world import World

if TYPE_CHECKING:
    from mpitrain.train.trainer import Trainer

logger = logging.getLogger("mpitrain")

BACK_OFF_SECONDS = (30.0, 60.0, 120.0, 300.0, 600.0)
"""How long after a checkpoint that failed the next one is tried."""

LAST_TRIES = (0.0, 1.0, 5.0)
"""Before each try to write the last checkpoint: seconds to wait."""

FIRST_BYTES_PER_SECOND = 100e6
"""How fast a disk is held to be before it has shown it."""

LONG_WRITE_SECONDS = 30.0
"""A checkpoint that takes less is not worth a warning, however often they come."""

STOP, SAVE, RETRY, ENDED, FAILED = range(5)
"""What the ranks tell each other, of which all hear the largest.

STOP: why to stop; 0: it goes on. SAVE: the number that a checkpoint would have which
is due by its age. RETRY: the number of the failure after which it is time to try again.
ENDED, FAILED: the saver's (`Saver.report`).
"""

STEP, EVALUATION = range(2)
"""The kinds of work after which the ranks exchange those; they are counted apart."""


class CheckpointError(MpitrainError):
    """The last checkpoint could not be written."""


class StopWanted(Exception):
    """All ranks have agreed to stop; raised where that is known."""

    def __init__(self, reason: int) -> None:
        super().__init__(REASONS[reason])
        self.reason = reason


class Record(Protocol):
    """What else goes on with a training: rank zero's record."""

    def state(self) -> dict[str, Any]:
        """Return what the record must know to go on; JSON can carry it."""

    def sync(self) -> None:
        """Let what `state` tells of reach the disk; in any thread."""

    def checkpoint_done(
        self, step: int, copy_seconds: float, write_seconds: float, why_not: str = ""
    ) -> None:
        """Write what became of a checkpoint."""


class Keeper:
    """Keeps one training.

    Collective over all ranks, and so are its methods unless they say otherwise.

    Args:
        trainer: Whose.
        run_dir: The run folder; all ranks see it.
        facts: What every checkpoint says of the run.
        world: Where this process stands.
        ranks: All of them.
        stopper: Knows whether to stop.
        record: Rank zero's; ``None`` elsewhere.
        loader: Of the checkpoint that is gone on from, if there is one.
    """

    def __init__(
        self,
        trainer: Trainer,
        *,
        run_dir: Path,
        facts: dict[str, Any],
        world: World,
        ranks: Ranks,
        stopper: Stopper,
        record: Record | None,
        loader: Loader | None,
    ) -> None:
        self._trainer = trainer
        self._config: CheckpointConfig = trainer.config
        self._facts = facts
        self._world = world
        self._stopper = stopper
        self._record = record
        self._loader = loader
        self._saver = Saver(
            run_dir,
            world,
            ranks,
            keep=self._config.keep_checkpoints,
            before_naming=record.sync if record is not None else lambda: None,
        )
        self._consensus = Consensus(world, count=FAILED + 1, kinds=EVALUATION + 1)
        self._is_due = False
        self._is_late = self._has_warned = False
        self._is_backing_off = False
        self._num_begun = 0
        self._num_failed = 0
        self._failed_in_a_row = 0
        self._retry_at = 0.0
        self._saved_at = time.monotonic()
        self._saved: object = None
        self._save_seconds = 0.0
        self._longest_gap = 0.0
        self._last_tick: float | None = None
        self._goodness: float | None = None
        self._best = -math.inf
        stopper.margin = self.margin

    # --- going on -----------------------------------------------------------------

    def restore(self) -> SoFar:
        """Give the model what the checkpoint has, if there is one; before any stage.

        Returns:
            How far the training has come.
        """
        split_state(self._trainer.setup.model)  # what cannot be kept is told now
        if self._loader is None:
            return SoFar()
        load_model(self._loader, self._trainer.setup.model)
        so_far = SoFar(**self._loader.facts["so_far"])
        self._saved = _position(so_far)
        return so_far

    def begin(self, stage: Stage) -> None:
        """Go on within a stage that has just begun, if the checkpoint is of it."""
        self._consensus.forget()
        setup = self._trainer.setup
        if not self._save_seconds:
            # Not measured yet. An optimizer may know twice as much as there is.
            state = split_state(setup.model)[0].values()
            size = 3 * sum(tensor.numel() * tensor.element_size() for tensor in state)
            self._save_seconds = size / FIRST_BYTES_PER_SECOND
        if self._loader is None:
            return
        loader, self._loader = self._loader, None
        if loader.facts["stage"] == stage.name:
            load_progress(loader, setup.replica, setup.updater, setup.prefix)
            if loader.facts["config"]["precision"] == self._trainer.config.precision:
                setup.updater.scale.restore(loader.facts["scale"])
        so_far = self._trainer.so_far
        seed = self._trainer.config.seed
        load_random(loader, self._world, seed=seed, num_steps=so_far.num_steps)

    # --- on the way -----------------------------------------------------------------

    def after_step(self) -> None:
        """Write a checkpoint if one is due.

        Raises:
            StopWanted: All ranks are to stop here.
        """
        every = self._config.checkpoint_every_steps
        if every and self._trainer.so_far.num_steps % every == 0:
            self._is_due = True
        self._tick(STEP)
        self._save_if_due()

    def after_evaluation_batch(self) -> None:
        """Hear whether to stop; a checkpoint waits for the end of the evaluation.

        Raises:
            StopWanted: All ranks are to stop here.
        """
        self._tick(EVALUATION)

    def after_epoch(self, epoch: int, goodness: float | None) -> None:
        """Write a checkpoint if one is due.

        Args:
            epoch: The epoch that has ended.
            goodness: How good the model is; more is better. ``None``: not known.

        Raises:
            StopWanted: All ranks are to stop here.
        """
        every = self._config.checkpoint_every_epochs
        if every and epoch % every == 0:
            self._is_due = True
        self._goodness = goodness
        is_best = goodness is not None and goodness > self._best
        self._save_if_due(may_wait=is_best)
        self._tick(EVALUATION)

    def stop(self, reason: int) -> NoReturn:
        """Write a checkpoint of where the training stands, and stop.

        Raises:
            Stopped: On every rank.
            CheckpointError: It could not be written; on every rank.
        """
        self._save_now("stopping")
        self.close()
        step = self._trainer.so_far.num_steps
        raise agreed(Stopped(f"stopped at step {step}: {REASONS[reason]}"))

    def finish(self) -> None:
        """Write the last checkpoint, of a training that is done.

        Raises:
            CheckpointError: It could not be written; on every rank.
        """
        self._save_now("writing the last checkpoint")
        self.close()

    def close(self) -> None:
        """Take down what the ranks tell each other by."""
        self._consensus.close()

    def margin(self) -> float:
        """Return how many seconds before its end a training should stop; local."""
        return FIRST_MARGIN_SECONDS + 3 * self._save_seconds + 2 * self._longest_gap

    # --- inside -----------------------------------------------------------------------

    def _tick(self, kind: int) -> None:
        now = time.monotonic()
        if self._last_tick is not None:
            self._longest_gap = max(self._longest_gap, now - self._last_tick)
        self._last_tick = now
        if not self._consensus.is_due(kind):
            return
        heard = self._consensus.exchange(self._mine(now))
        if heard is None:
            return
        # By number: what was told before the last failure, or save, is of the past.
        if heard[RETRY] == self._num_failed:
            self._is_backing_off = False
        if heard[SAVE] == self._num_begun + 1:
            self._is_due = True
        outcome = self._saver.hear(heard[ENDED : FAILED + 1])
        if outcome is not None:
            self._note(outcome)
        if heard[STOP]:
            raise StopWanted(heard[STOP])

    def _mine(self, now: float) -> list[int]:
        """Return what this rank tells the others."""
        minutes = self._config.checkpoint_every_minutes
        is_old = minutes is not None and now - self._saved_at > 60 * minutes
        is_zero = self._world.is_rank_zero
        return [
            self._stopper.wanted(),
            (self._num_begun + 1) * (is_zero and is_old),
            self._num_failed if is_zero and now >= self._retry_at else -1,
            *self._saver.report(),
        ]

    def _save_if_due(self, *, may_wait: bool = False) -> None:
        """Write a checkpoint if one is due.

        Args:
            may_wait: Let it wait as a copy, where another one is being written.
        """
        is_busy = self._saver.is_busy
        self._is_late |= self._is_due and is_busy
        if self._is_due and not self._is_backing_off and (may_wait or not is_busy):
            before = self._trainer.clock.phase
            self._trainer.clock.enter(CHECKPOINT)
            self._save()
            self._trainer.clock.enter(before)

    def _save(self) -> None:
        """Begin to write a checkpoint of where the training stands."""
        self._is_due = False
        trainer = self._trainer
        trainer.meet(tell_all=True)
        so_far, setup = trainer.so_far, trainer.setup
        position = _position(so_far)
        if position == self._saved:
            return
        self._saved = position
        self._saved_at = time.monotonic()
        self._num_begun += 1
        epoch = 0 if so_far.epoch_steps else so_far.epoch - 1  # that was just judged
        goodness = self._goodness if epoch else None
        if goodness is not None:
            self._best = max(self._best, goodness)
        tensors = tensors_of(
            setup.model, setup.replica, setup.updater, self._world, setup.prefix
        )
        facts = {
            **self._facts,
            "world_size": self._world.world_size,
            "stage": setup.stage.name,
            "strategy": setup.replica.strategy,
            "so_far": asdict(so_far),
            "scale": setup.updater.scale.state(),
            "extra_state": split_state(setup.model)[1],
            "goodness": goodness,
            "record": self._record.state() if self._record is not None else None,
        }
        trainer.progress("copying a checkpoint")
        self._saver.begin(tensors, facts, so_far.num_steps, epoch)

    def _save_now(self, doing: str) -> None:
        """Write a checkpoint of where the training stands, to its end."""

        def progress() -> None:
            self._trainer.progress(doing)

        while (outcome := self._saver.finish(progress)) is not None:
            self._note(outcome)
        for seconds in LAST_TRIES:
            time.sleep(seconds)
            self._save()
            outcome = self._saver.finish(progress)
            if outcome is None:
                return  # it is there already
            self._note(outcome)
            if not outcome.why_not:
                return
        assert outcome is not None
        raise agreed(
            CheckpointError(
                f"the last checkpoint could not be written: {outcome.why_not}.\nThe "
                "one before it is whole, and a job with this run's --name goes on from "
                "there, once there is room"
            )
        )

    def _note(self, outcome: Outcome) -> None:
        """Take in what became of a checkpoint."""
        if self._record is not None:
            self._record.checkpoint_done(
                outcome.step,
                self._saver.stall_seconds,
                outcome.seconds,
                outcome.why_not,
            )
        if not outcome.why_not:
            self._save_seconds = max(self._save_seconds, outcome.seconds)
            self._failed_in_a_row = 0
            self._warn_if_late(outcome.seconds)
            logger.info(
                "checkpoint of step %d: %.3f s to copy, %.3f s to write",
                *(outcome.step, self._saver.stall_seconds, outcome.seconds),
            )
            return
        wait = BACK_OFF_SECONDS[min(self._failed_in_a_row, len(BACK_OFF_SECONDS) - 1)]
        self._best = -math.inf  # it may have been the one that was lost
        self._failed_in_a_row += 1
        self._num_failed += 1
        self._is_backing_off = True
        self._retry_at = time.monotonic() + wait
        self._saved = None
        self._is_due = True
        if self._world.is_rank_zero:
            logger.warning(
                "the checkpoint of step %d could not be written: %s; training goes on, "
                "the next try is in %.0f s",
                *(outcome.step, outcome.why_not, wait),
            )

    def _warn_if_late(self, seconds: float) -> None:
        """Say, once, that checkpoints take longer than is between them."""
        is_late = self._is_late and seconds > LONG_WRITE_SECONDS
        self._is_late = False
        if is_late and not self._has_warned and self._world.is_rank_zero:
            self._has_warned = True
            logger.warning(
                "a checkpoint takes %.0f s to write, and the next one was due before: "
                "they come as fast as the disk takes them. Write them less often: "
                "--checkpoint-every-epochs, -steps, -minutes",
                seconds,
            )


def _position(so_far: SoFar) -> tuple[int, ...]:
    return so_far.num_steps, so_far.epoch, so_far.epoch_steps
