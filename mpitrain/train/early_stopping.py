"""The callback that finishes a training whose metric does not get better."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Literal

from mpitrain.console import say
from mpitrain.errors import UsageError
from mpitrain.train.callbacks import Callback
from mpitrain.train.evaluate import score_of
from mpitrain.train.metrics import EpochMetrics, best_metric, knows_best


class EarlyStopping(Callback):
    """Finishes the training when a metric of the validation stops improving.

        Trainer(model, train, val, callbacks=[EarlyStopping("f1", patience=5)])

    `fit` returns, as after the last epoch. With a `Checkpointer` the run stays finished
    when it is started again, and the best checkpoint is kept; see ``best_by`` and
    ``load_best_at_end`` there. Validations within epochs count, too.

    Args:
        metric: Such as ``"loss"`` or ``"f1"``; ``None``: accuracy, else loss.
        patience: Validations in a row without a better value.
        mode: ``"min"`` or ``"max"``; ``None``: min for loss, error, mae and
            the like, else max.
        min_delta: By more than this a value must be better to count, in its own units.
    """

    def __init__(
        self,
        metric: str | None = None,
        *,
        patience: int = 3,
        mode: Literal["min", "max"] | None = None,
        min_delta: float = 0.0,
    ) -> None:
        is_known = mode is None or (mode in ("min", "max") and metric is not None)
        if patience < 1 or min_delta < 0 or not is_known:
            raise UsageError(
                f"EarlyStopping({metric!r}, {patience=}, {mode=}, {min_delta=}): "
                "expected patience from 1, min_delta from 0, and a mode min or max of "
                "a metric with a name"
            )
        self.metric = f"{mode}:{metric}" if mode else metric
        self.patience, self.min_delta = patience, min_delta
        self.setup(None)

    def setup(self, trainer: Any) -> None:
        """Begin to count: each `fit` is a training of its own."""
        self._best, self._best_step, self._num_bad = -math.inf, 0, 0
        self._name = self.metric or ""
        if trainer is not None and not trainer.engine.data.val_sets:
            raise UsageError(
                "EarlyStopping without val_data; expected validation data"
            ).on_all_ranks()

    def on_fit_start(self, trainer: Any) -> None:
        """Stay finished, if the job before was."""
        # Not by an assignment: another callback may have finished it.
        trainer.should_stop |= self._num_bad >= self.patience

    def on_validation_end(self, trainer: Any, epoch: EpochMetrics) -> None:
        """Finish the training after `patience` validations."""
        if not knows_best(epoch.values, self.metric):
            found = next(iter(epoch.values), "f1")
            raise UsageError(
                "EarlyStopping() by accuracy or loss, which the validation does not "
                f"have; expected a metric, such as 'max:{found}'"
            ).on_all_ranks()
        losses = epoch.train_losses
        score = score_of(epoch.values, self.metric, by="EarlyStopping", losses=losses)
        if score is not None and score > self._best + self.min_delta:
            self._best, self._best_step, self._num_bad = score, epoch.step, 0
            return
        self._num_bad += 1
        self._name = f"val_{best_metric(epoch.values, self.metric)[0]}"
        if not self.finish_reason():
            return
        trainer.should_stop = True
        if trainer.world.is_rank_zero:
            engine = trainer.engine
            later = [it.name for it in engine.plan.stages_from(epoch.epoch + 1)]
            left = [it for it in later if it != engine.stage.name]
            say(
                f"early stopping at step {epoch.step}: {self.finish_reason()}"
                + f"; not trained: {', '.join(left)}" * bool(left)
            )

    def finish_reason(self) -> str:
        """Return which value was the best one; empty if the training continues."""
        if self._num_bad < self.patience:
            return ""
        where = f"{self._name} was best at step {self._best_step}"
        return f"{where}, {self._num_bad} validation{'s' * (self._num_bad > 1)} before"

    def state_dict(self) -> dict[str, Any]:
        """Return the best value, and how many were not better since."""
        # JSON has no infinity.
        best = self._best if math.isfinite(self._best) else None
        return {"metric": self.metric, "best": [best, self._best_step, self._num_bad]}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue to count, if it is the same metric."""
        if state["metric"] == self.metric:
            best, self._best_step, self._num_bad = state["best"]
            self._best = -math.inf if best is None else best
