"""A training of the user's: what the function of ``--task`` returns."""

from __future__ import annotations

import inspect
import logging

import torch

from mpitrain.checkpoint.checkpointer import Checkpointer
from mpitrain.config import TASK_PREFIX, TrainConfig
from mpitrain.data.randomness import seed_all
from mpitrain.errors import UsageError
from mpitrain.mpi.collectives import all_or_none, world_comm
from mpitrain.mpi.shared_arrays import communicator
from mpitrain.mpi.world import World
from mpitrain.plugins import load_reference
from mpitrain.record.recorder import Recorder
from mpitrain.tasks.task import Task
from mpitrain.train.progress import EpochLines
from mpitrain.train.trainer import Trainer

logger = logging.getLogger("mpitrain")


def call_task(config: TrainConfig, world: World) -> Trainer | Task:
    """Call the user's function with its arguments; collective.

    Raises:
        UsageError: It returned something else, or a Trainer that ignores the flags.
    """
    made = all_or_none(
        world_comm(), lambda: _call(config, world), f"call --task {config.task}"
    )
    kind = "a Trainer" if isinstance(made, Trainer) else "a Task"
    what = f"what --task {config.task} returned"
    # What follows is collective, and differs between the two.
    communicator(world).check_equal(kind, what, "Expected the same on every rank")
    if isinstance(made, Task):
        return made
    # The command has such lines, too.
    made.callbacks = [it for it in made.callbacks if type(it) is not EpochLines]
    ignored = [name for name in ("data", "model", "weights") if name in config.changed]
    if ignored and world.is_rank_zero:
        logger.warning(
            "--task returned a Trainer, which has data and a model: no effect of --%s",
            " --".join(ignored),
        )
    made.world, made.uses_whole_config = world, True
    return made


def _call(config: TrainConfig, world: World) -> Trainer | Task:
    """Call the function, and check what it returns; local."""
    name = f"--task {config.task}"
    function = load_reference(config.task or "", "--task", "tasks")
    seed_all(config.seed)
    torch.manual_seed(config.seed)  # of GPUs, too
    arguments = {k.removeprefix(TASK_PREFIX): it for k, it in config.task_arguments}
    given = {"config": config, "world": world, **arguments}
    taken = inspect.signature(function).parameters.keys() & given.keys()
    made = function(**{name: given[name] for name in taken})
    if isinstance(made, Task):
        return made
    if not isinstance(made, Trainer):
        raise UsageError(
            f"{name} returned {type(made).__name__}; expected a Trainer, or a Task for "
            "the --model and --data of the command"
        )
    if made.config != config:
        raise UsageError(
            f"{name} returned a Trainer with another TrainConfig, which ignores the "
            "flags; expected the one that it is called with: "
            "def build(config): return Trainer(model, train_data, val_data, config)"
        )
    for callback in made.callbacks:
        if isinstance(callback, Recorder | Checkpointer):
            raise UsageError(
                f"{name} has a {type(callback).__name__}, and so has the command, for "
                "its run folder; expected none: add it in the script alone, under "
                "if __name__ == '__main__'"
            )
    return made
