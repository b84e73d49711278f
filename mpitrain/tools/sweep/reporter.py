"""The callback of a trial: it reports to the server, which may prune the trial."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING

from mpitrain.checkpoint.preemption import REASONS, PreemptionHandler
from mpitrain.checkpoint.run_checkpoints import RunCheckpoints
from mpitrain.errors import UsageError
from mpitrain.mpi.shared_arrays import communicator
from mpitrain.mpi.world import World
from mpitrain.tools.sweep.messages import POLL_SECONDS, Inbox, Message
from mpitrain.train.callbacks import Callback, StopRequested
from mpitrain.train.metrics import EpochMetrics

if TYPE_CHECKING:
    from mpitrain.train.trainer import Trainer


class Reporter(Callback):
    """Tells the server the metrics of each epoch; with `waits` the server may prune.

    Attributes:
        is_used: Whether the trainer of a script has it.
        is_pruned: Whether the server has pruned the trial.
        values: The metrics of the last validation; empty before one.
        stopped: Why the trainer was stopped; empty if it was not.
    """

    def __init__(
        self,
        start_id: int,
        world: World,
        inbox: Inbox,
        metrics: Collection[str],
        handler: PreemptionHandler,
        *,
        waits: bool,
    ) -> None:
        self._start_id, self._world, self._handler = start_id, world, handler
        self._inbox, self._metrics, self._waits = inbox, metrics, waits
        self._stops = False  # itself, since there is no `Checkpointer`
        self.is_used = self.is_pruned = False
        self.values: Mapping[str, float] = {}
        self.stopped = ""

    def add_to(self, callbacks: Sequence[Callback]) -> list[Callback]:
        """Return the callbacks of a script's trainer, and this one."""
        if self.is_used:
            raise UsageError(
                "the script trains a second time; expected one Trainer.fit in a trial"
            ).on_all_ranks()
        self.is_used = True
        self._stops = not any(isinstance(it, RunCheckpoints) for it in callbacks)
        return [*callbacks, self]

    def on_validation_end(self, trainer: Trainer, epoch: EpochMetrics) -> None:
        """Report a validation within an epoch, as `on_epoch_end`."""
        if not epoch.is_end:
            self.on_epoch_end(trainer, epoch)

    def on_epoch_end(self, trainer: Trainer, epoch: EpochMetrics) -> None:
        """Report; raises `StopRequested` on all ranks if the trial is pruned."""
        for name in self._metrics:
            if name not in epoch.values:
                raise UsageError(
                    f"the space names the metric {name!r}; expected one of the "
                    f"validation: {', '.join(epoch.values)}"
                ).on_all_ranks()
        counts_steps = trainer.config.validate_every_steps is not None
        unit, number = ("step", epoch.step) if counts_steps else ("epoch", epoch.epoch)
        self.values = dict(epoch.values)
        if self._world.is_rank_zero:
            data = (unit, number, self.values)
            self._inbox.send(Message("epoch", self._start_id, data))
        ranks = communicator(self._world)
        is_last = trainer.should_stop or trainer.engine.plan.is_done(trainer.state)
        if self._waits:
            # The server sends one answer, to the trial's first rank.
            should_prune = ranks.on_rank_zero(self._answer, "ask the server")
            self.is_pruned = should_prune and not is_last  # after that it is finished
            if self.is_pruned:
                raise StopRequested(f"pruned after {unit} {number}")
        if self._stops and not is_last:
            # All stop after the same epoch, though signals come to ranks at any time.
            reason = max(ranks.allgather(self._handler.requested()))
            if reason:
                raise StopRequested(REASONS[reason])

    def on_stop(self, trainer: Trainer, reason: str) -> None:
        """Keep the reason."""
        del trainer
        self.stopped = reason

    def _answer(self) -> bool:
        while (found := self._inbox.take()) is None:
            self._inbox.raise_if_aborted()
            time.sleep(POLL_SECONDS / 4)
        return bool(found.data)
