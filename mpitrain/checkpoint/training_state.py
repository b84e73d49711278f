"""What a checkpoint of a `Trainer` holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict
from typing import Any, NamedTuple

from torch import Tensor

from mpitrain.checkpoint.format import check_json
from mpitrain.checkpoint.resume import check_same_data, warn_of_other_samples
from mpitrain.checkpoint.storage import CheckpointReader
from mpitrain.checkpoint.tensors import (
    load_model,
    schedules_to_save,
    split_state,
    tensors_to_save,
)
from mpitrain.errors import UsageError
from mpitrain.train.callbacks import Callback
from mpitrain.train.evaluate import score_of
from mpitrain.train.metrics import TrainState, best_by_of
from mpitrain.train.trainer import Trainer


class Snapshot(NamedTuple):
    """The arguments of `CheckpointManager.save`."""

    tensors: Mapping[str, Tensor]  # of this rank; no copies
    metadata: dict[str, Any]
    step: int
    epoch: int
    is_validated: bool


def collect(
    trainer: Trainer,
    run_id: str,
    name: str,
    data: Mapping[str, Any] | None,
    best_by: str | None,
) -> Snapshot:
    """Return what to save of a training now; its metrics are synced.

    ``name`` is the run folder's, ``data`` what `mpitrain export` reads of the data.
    """
    state, engine = trainer.state, trainer.engine
    metric = score_of(state.metrics, best_by) if state.is_validated else None
    tensors = tensors_to_save(
        engine.model,
        engine.strategy.model,
        [it.local for it in engine.optimizer.optimizers],
        engine.optimizer.ema_values,
        engine.part.prefix,
        engine.world,
    )
    metadata = {
        "run": run_id,
        "step": state.step,
        "world_size": engine.world.world_size,
        "extra_state": split_state(engine.model)[1],
        "model_config": engine.model_config if engine.world.is_rank_zero else None,
        "metric": metric,
        # Also where no validation is new: a resume from it compares with older ones.
        "best_by": best_by_of(state.metrics, best_by) if state.metrics else None,
        "user_state": None,
        "trainer": {
            "config": config_of(trainer, name),
            "num_samples": engine.data.num_samples,
            "first_samples": engine.data.first_digests,
            "data": data,
            "inputs": trainer.task.inputs,
            "stage": engine.stage.name,
            "trainable": engine.stage.trainable,
            "strategy": engine.strategy.name,
            "state": asdict(state),
            "finished_by": _finishers(trainer) if trainer.should_stop else [],
            "places": engine.data.places(),
            "loss_scale": engine.optimizer.scale.state(),
            "optimizers": schedules_to_save(engine.optimizer),
            "callbacks": callback_states(trainer),
        },
    }
    epoch = 0 if state.epoch_step else state.epoch - 1  # that was just evaluated
    return Snapshot(tensors, metadata, state.step, epoch, state.is_validated)


def restore_trainer(
    reader: CheckpointReader,
    trainer: Trainer,
    callbacks: Iterable[Callback],
    *,
    is_own: bool = False,
) -> None:
    """Load model, state and callbacks of a checkpoint into a `Trainer`; collective.

    In `Callback.setup`. What belongs to a stage follows, by `load_stage`.
    """
    found, path = reader.metadata["trainer"], reader.checkpoint.path
    data, classes = trainer.engine.data, trainer.task.inputs.get("classes")
    check_same_data(found, data.num_samples, classes, path)
    # With another seed random transforms make others of them.
    is_same_seed = found["config"]["seed"] == trainer.config.seed
    if is_same_seed and trainer.engine.world.is_rank_zero:
        warn_of_other_samples(found, data.first_digests, path)
    trainer.resumed_from = path.name
    load_model(reader, trainer.engine.model)
    trainer.state = TrainState(**found["state"])
    data.places_before = found.get("places", {})
    for callback in callbacks:
        state = found["callbacks"].get(type(callback).__name__)
        if state is not None:
            callback.load_state_dict(state)
    # The run stays finished while the callback that had a reason has one: not with more
    # patience. A stop without a reason, as by a budget of a job, is of that job alone.
    before = set(found.get("finished_by", ()))
    if is_own and not before.isdisjoint(_finishers(trainer)):
        trainer.should_stop = True


def _finishers(trainer: Trainer) -> list[str]:
    """Return the classes of the callbacks that say why the training is finished."""
    return [type(it).__name__ for it in trainer.callbacks if it.finish_reason()]


def check_same_best(reader: CheckpointReader, best_by: str | None) -> None:
    """Refuse another metric of the best checkpoint than that of the run before."""
    before = reader.metadata.get("best_by")  # not in older checkpoints
    now = best_by_of(reader.metadata["trainer"]["state"]["metrics"], best_by)
    if before is not None and now != before:
        path = reader.checkpoint.path
        raise UsageError(
            f"{path} was written with best_by={before!r}; found best_by={now!r}: the "
            "scores of two metrics cannot be compared. Expected the same, or a new "
            f"folder, with resume={str(path)!r}"
        ).on_all_ranks()


def config_of(trainer: Trainer, name: str) -> dict[str, Any]:
    """Return the configuration that a resumed training must have, too."""
    stages: Any = trainer.stages and [it.as_plain() for it in trainer.stages]
    return {**trainer.config.as_plain(name), "stages": stages}


def callback_states(trainer: Trainer) -> dict[str, dict[str, Any]]:
    """Return the states of the callbacks that have any, by their class."""
    found = {}
    for callback in trainer.callbacks:
        name, state = type(callback).__name__, dict(callback.state_dict())
        check_json(state, f"{name}.state_dict()")
        if state:
            found[name] = state
    return found
