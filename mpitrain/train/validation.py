"""A validation of the training: at the end of an epoch, or within it."""

from __future__ import annotations

import time
from typing import Any


def validate_once(trainer: Any, *, is_epoch_end: bool) -> None:
    """Evaluate the model, unless the job before did after this step. Collective.

    Args:
        trainer: A `Trainer`, whose module imports this one.
        is_epoch_end: Whether all steps of the epoch are done.
    """
    engine, state = trainer.engine, trainer.state
    if state.is_validated:
        return
    began = time.perf_counter()
    with trainer.timer("evaluation"):
        found = engine.validate(
            trainer.validation_step, lambda: trainer.call("on_validation_batch_end")
        )
    state.skipped_samples += engine.data.take_skipped()
    state.val_seconds += time.perf_counter() - began
    state.metrics, state.val_samples = dict(found.values), found.num_samples
    trainer.results = found.results
    state.validated_step = state.step
    metrics = state.epoch_metrics(engine.stage.name, is_end=is_epoch_end)
    trainer.call("on_validation_end", metrics)
