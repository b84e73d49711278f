"""A training of the user's: what the function of ``--task`` returns."""

from __future__ import annotations

import inspect
import logging

from mpitrain.checkpoint.checkpointer import Checkpointer
from mpitrain.config import TrainConfig
from mpitrain.data.randomness import seed_all
from mpitrain.errors import UsageError
from mpitrain.mpi.collectives import all_or_none, world_comm
from mpitrain.mpi.world import World
from mpitrain.plugins import load_reference
from mpitrain.record.recorder import Recorder
from mpitrain.tasks.task import Task
from mpitrain.train.progress import EpochLines
from mpitrain.train.trainer import Trainer

logger = logging.getLogger("mpitrain")

MADE_HERE = Recorder, Checkpointer  # of a run folder


def call_task(config: TrainConfig, world: World) -> Trainer | Task:
    """Call the user's function with its arguments; collective.

    Raises:
        UsageError: It returned something else, or a Trainer that ignores the flags.
    """
    made = all_or_none(
        world_comm(), lambda: _call(config, world), f"call --task {config.task}"
    )
    if isinstance(made, Task):
        return made
    if not isinstance(made, Trainer):
        raise UsageError(
            f"--task {config.task} returned {type(made).__name__}; expected a Trainer, "
            "or a Task for the --model and --data of the command"
        ).on_all_ranks()
    if made.config != config:
        raise UsageError(
            f"--task {config.task} returned a Trainer with another TrainConfig, which "
            "ignores the flags; expected the one that it is called with: "
            "def build(config): return Trainer(model, train_data, val_data, config)"
        ).on_all_ranks()
    for callback in made.callbacks:
        if isinstance(callback, MADE_HERE):
            raise UsageError(
                f"--task {config.task} has a {type(callback).__name__}, and so has the "
                "command, for its run folder; expected none: add it in the script "
                "alone, if __name__ == '__main__'"
            ).on_all_ranks()
    made.callbacks = [it for it in made.callbacks if not isinstance(it, EpochLines)]
    ignored = [name for name in ("data", "model", "weights") if name in config.changed]
    if ignored and world.is_rank_zero:
        logger.warning(
            "--task returned a Trainer, which has data and a model: no effect of --%s",
            " --".join(ignored),
        )
    made.world, made.uses_whole_config = world, True
    return made


def _call(config: TrainConfig, world: World) -> object:
    function = load_reference(config.task or "", "--task")
    seed_all(config.seed)
    given = {"config": config, "world": world, **dict(config.task_arguments)}
    return function(**{name: given[name] for name in _names(function) & given.keys()})


def _names(function: object) -> set[str]:
    return {*inspect.signature(function).parameters}  # type: ignore[arg-type]
