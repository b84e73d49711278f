"""Start and run PyTorch training with mpirun, on anything.

    mpirun -np 8 --oversubscribe python -m mpitrain

trains on every slot. For a script of your own:

    import mpitrain

    with mpitrain.init() as world:
        print(world.rank, world.world_size, world.device)

Importing this starts no MPI and imports no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

from mpitrain._version import __version__

if TYPE_CHECKING:
    from mpitrain.checkpoint.checkpointer import Checkpointer
    from mpitrain.checkpoint.run_checkpoints import CheckpointError
    from mpitrain.config import LaunchConfig, TrainConfig
    from mpitrain.data.data_loader import DataLoader
    from mpitrain.data.loader import Batch
    from mpitrain.errors import (
        DataError,
        LaunchError,
        MpitrainError,
        NonFiniteError,
        Stopped,
        TopologyError,
        UsageError,
    )
    from mpitrain.launch.init import init
    from mpitrain.launch.job import Job
    from mpitrain.models.weights import load_weights
    from mpitrain.mpi.world import Node, World
    from mpitrain.record.cost import Costs
    from mpitrain.record.health import HealthCheck
    from mpitrain.record.loggers.callback import Loggers
    from mpitrain.record.profiler import Profiler
    from mpitrain.record.rank_times import RankTimes
    from mpitrain.record.recorder import Recorder
    from mpitrain.tasks.image_classification.task import ImageClassification
    from mpitrain.tasks.stages import Stage
    from mpitrain.tasks.task import Task
    from mpitrain.tools.train.callbacks import default_callbacks
    from mpitrain.train.callbacks import Callback, StopRequested
    from mpitrain.train.early_stopping import EarlyStopping
    from mpitrain.train.evaluate import Evaluation
    from mpitrain.train.metrics import TrainState
    from mpitrain.train.progress import EpochLines
    from mpitrain.train.strategy.base import Strategy
    from mpitrain.train.trainer import Trainer

__all__ = [
    "Batch",
    "Callback",
    "CheckpointError",
    "Checkpointer",
    "Costs",
    "DataError",
    "DataLoader",
    "EarlyStopping",
    "EpochLines",
    "Evaluation",
    "HealthCheck",
    "ImageClassification",
    "Job",
    "LaunchConfig",
    "LaunchError",
    "Loggers",
    "MpitrainError",
    "Node",
    "NonFiniteError",
    "Profiler",
    "RankTimes",
    "Recorder",
    "Stage",
    "StopRequested",
    "Stopped",
    "Strategy",
    "Task",
    "TopologyError",
    "TrainConfig",
    "TrainState",
    "Trainer",
    "UsageError",
    "World",
    "__version__",
    "default_callbacks",
    "init",
    "load_weights",
]

# Modules by name; what is not here is in `errors`.
_HOMES = {
    "init": "launch.init",
    "Batch": "data.loader",
    "ImageClassification": "tasks.image_classification.task",
    "Job": "launch.job",
    **dict.fromkeys(("World", "Node"), "mpi.world"),
    **dict.fromkeys(("Callback", "StopRequested"), "train.callbacks"),
    "CheckpointError": "checkpoint.run_checkpoints",
    "Checkpointer": "checkpoint.checkpointer",
    "Costs": "record.cost",
    "DataLoader": "data.data_loader",
    "EarlyStopping": "train.early_stopping",
    "EpochLines": "train.progress",
    "Evaluation": "train.evaluate",
    "HealthCheck": "record.health",
    "Loggers": "record.loggers.callback",
    "Profiler": "record.profiler",
    "RankTimes": "record.rank_times",
    "Recorder": "record.recorder",
    **dict.fromkeys(("LaunchConfig", "TrainConfig"), "config"),
    "Stage": "tasks.stages",
    "Strategy": "train.strategy.base",
    "Task": "tasks.task",
    "TrainState": "train.metrics",
    "Trainer": "train.trainer",
    "default_callbacks": "tools.train.callbacks",
    "load_weights": "models.weights",
}


def __getattr__(name: str) -> object:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    home = importlib.import_module(f"mpitrain.{_HOMES.get(name, 'errors')}")
    return getattr(home, name)


def __dir__() -> list[str]:
    return sorted(__all__)
