"""A training of the command line, from the ready process group to its end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from mpitrain.checkpoint.preemption import PreemptionHandler
from mpitrain.config import TrainConfig
from mpitrain.errors import Stopped, UsageError
from mpitrain.launch.job import heartbeat
from mpitrain.models.build import build_and_load, check_takes, fetch_weights, is_cached
from mpitrain.mpi.shared_arrays import Communicator, communicator
from mpitrain.mpi.world import World
from mpitrain.plugins import is_reference
from mpitrain.record.recorder import Recorder
from mpitrain.tasks.image_classification.datasets.named import Data, load_data
from mpitrain.tasks.image_classification.task import ImageClassification
from mpitrain.tasks.task import Task
from mpitrain.tools.train.callbacks import (
    RunSummary,
    callbacks_of_run,
    early_stopping,
    make_checkpointer,
)
from mpitrain.tools.train.own_task import call_task
from mpitrain.tools.train.prepare import PreparedRun
from mpitrain.train.callbacks import Callback
from mpitrain.train.trainer import Trainer


def run_training(
    world: World,
    run: PreparedRun,
    handler: PreemptionHandler,
    start_seconds: float,
    *,
    callbacks: Sequence[Callback] = (),
    shared_data: Data | None = None,
) -> int:
    """Train; return the exit status: 0, or 75 if it was stopped and can be resumed.

    Collective over all ranks. ``callbacks`` come after the recorder, and before the
    checkpointer. ``shared_data`` stand for those of the configuration, and stay open.
    """
    config, run_dir = run.config, run.run_dir
    checkpointer = make_checkpointer(config, run_dir)
    if config.dry_run:
        # It writes no checkpoint: a signal ends it as any process.
        handler.uninstall()
    else:
        checkpointer.open(world, run_id=run.folder.run_id, handler=handler)
    is_new = checkpointer.reader is None
    trainer, summary, checkpointer.data = build_trainer(
        config, world, run_dir, shared_data, with_weights=is_new
    )
    named = "" if config.name else f" with --name {run_dir.name}"
    recorder = Recorder(
        run_dir,
        start_seconds=start_seconds,
        seconds_left=handler.seconds_left,
        resume_with=f"the same command{named}",
        is_open=True,
    )
    trainer.callbacks = [
        *callbacks_of_run(
            config,
            recorder,
            summary,
            handler.seconds_left,
            run_id=run.folder.run_id,
            start_seconds=start_seconds,
        ),
        *trainer.callbacks,
        *callbacks,
        *early_stopping(config),
        *([] if config.dry_run else [checkpointer]),
    ]
    try:
        trainer.fit()
    except Stopped as stopped:
        return stopped.exit_status
    return 0


def build_trainer(
    config: TrainConfig,
    world: World,
    run_dir: Path,
    shared_data: Data | None = None,
    *,
    with_weights: bool,
) -> tuple[Trainer, RunSummary, dict[str, Any] | None]:
    """Return the trainer of the command, or of ``--task``; collective.

    ``with_weights``: not those of a checkpoint, which follow. Also returns its summary,
    and what checkpoints tell `export` of the data.
    """
    task: Task | None = None
    if config.task is not None:
        heartbeat(f"calling {config.task}")
        made = call_task(config, world)
        if isinstance(made, Trainer):
            what = f"--task {config.task}"
            return made, RunSummary(run_dir, what), None
        task = made
    ranks = communicator(world)
    heartbeat("loading the data")
    data = shared_data or load_data(
        config,
        seed=config.seed,
        world=world,
        ranks=ranks,
        takes_images=task is None and not is_reference(config.model),
    )
    facts = {
        "num_classes": data.num_classes,
        "in_channels": data.in_channels,
        "image_size": data.image_size,
    }
    if isinstance(task, ImageClassification):
        task.mean_std = task.mean_std or data.statistics
        task.num_classes = task.num_classes or data.num_classes
    elif task and data.statistics and type(task).transform is Task.transform:
        raise UsageError(
            f"--task {config.task} returned a Task without a transform, and --data "
            f"{config.data} has images of bytes; expected one that inherits "
            "ImageClassification, or that scales them in transform"
        ).on_all_ranks()
    heartbeat("building the model")
    model, loaded = _build(config, data, ranks, with_weights=with_weights)
    trainer = Trainer(
        model,
        data.train,
        data.val,
        config,
        world=world,
        task=task,
        callbacks=(),
        test_data=data.test,
        mean_std=None if task else data.statistics,
        num_classes=None if task else data.num_classes,
        # DDP raises for weights without a gradient; no named model has such.
        find_unused_parameters=is_reference(config.model) or task is not None,
    )
    trainer.uses_whole_config = True
    more = "" if data.num_classes is None else f", {data.num_classes} classes"
    more += "" if task is None else f", --task {config.task}"
    what = f"{config.model} on {config.data}"
    summary = RunSummary(run_dir, what, more, loaded, has_own_data=False)
    return trainer, summary, facts


def _build(
    config: TrainConfig, data: Data, ranks: Communicator, *, with_weights: bool
) -> tuple[nn.Module, str | None]:
    """Build the model, equal on all ranks; return it, and a line on its weights.

    Collective over all ranks. One rank per node downloads the weights.
    """
    name, weights = config.model, config.weights if with_weights else None
    # One answer for all: what follows is collective.
    if not all(ranks.allgather(is_cached(name, weights))):
        ranks.once_per_node(lambda: fetch_weights(name, weights), f"download {name}")
    model, loaded = build_and_load(
        name,
        num_classes=data.num_classes,
        in_channels=data.in_channels,
        image_size=data.image_size,
        seed=config.seed,
        weights=weights,
    )
    shape = tuple(getattr(data.train.example().inputs, "shape", ()))[1:]
    if len(shape) == 3 and config.image_size is None:
        check_takes(name, model, shape)
    return model, loaded
