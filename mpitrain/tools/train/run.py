"""A training of the command line, from the ready process group to its end."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from mpitrain.checkpoint.checkpointer import Checkpointer
from mpitrain.checkpoint.preemption import PreemptionHandler
from mpitrain.config import TrainConfig
from mpitrain.console import say, shown
from mpitrain.errors import Stopped, UsageError
from mpitrain.files import replacing, write_json
from mpitrain.launch.job import heartbeat
from mpitrain.models.build import build_and_load, fetch_weights, is_cached
from mpitrain.models.summary import summary_line, summary_table
from mpitrain.mpi.shared_arrays import Communicator, communicator
from mpitrain.mpi.world import World
from mpitrain.plugins import is_reference
from mpitrain.record.environment import describe, node_lines
from mpitrain.record.fingerprints import Fingerprints
from mpitrain.record.health import HealthCheck
from mpitrain.record.loggers.callback import Loggers
from mpitrain.record.profiler import Profiler
from mpitrain.record.rank_times import RankTimes
from mpitrain.record.recorder import Recorder
from mpitrain.tasks.image_classification.datasets.named import Data, load_data
from mpitrain.tasks.image_classification.task import ImageClassification
from mpitrain.tasks.task import Task
from mpitrain.tools.train.own_task import call_task
from mpitrain.tools.train.prepare import PreparedRun
from mpitrain.train.callbacks import Callback
from mpitrain.train.early_stopping import EarlyStopping
from mpitrain.train.progress import choose_progress
from mpitrain.train.trainer import Trainer

logger = logging.getLogger("mpitrain")


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
    checkpointer = Checkpointer(
        run_dir,
        every_epochs=config.checkpoint_every_epochs,
        every_steps=config.checkpoint_every_steps,
        every_minutes=config.checkpoint_every_minutes,
        keep=config.keep_checkpoints,
        best_by=config.best_by,
        resume=config.resume,
    )
    if config.dry_run:
        handler.uninstall()
    else:
        checkpointer.open(world, run_id=run.folder.run_id, handler=handler)
    trainer, summary = _trainer(config, world, run_dir, checkpointer, shared_data)
    seconds_left, patience = handler.seconds_left, config.early_stopping
    named = "" if config.name else f" with --name {run_dir.name}"
    trainer.callbacks = [
        summary,
        Recorder(
            run_dir,
            start_seconds=start_seconds,
            seconds_left=seconds_left,
            resume_with=f"the same command{named}",
            is_open=True,
        ),
        RankTimes(run_dir, start_seconds),
        *([Loggers(config, run_dir, run.folder.run_id)] if config.log else []),
        HealthCheck(shown(run_dir)),
        choose_progress(config.progress, seconds_left),
        Fingerprints(run_dir, config.fingerprint),
        *([Profiler(run_dir, config.profile)] if config.profile else []),
        ModelFile(run_dir / "model.pt"),
        *trainer.callbacks,
        *callbacks,
        *([EarlyStopping(config.best_by, patience=patience)] if patience else []),
        *([] if config.dry_run else [checkpointer]),
    ]
    trainer.callbacks.sort(key=lambda callback: callback.runs_last)
    try:
        trainer.fit()
    except Stopped as stopped:
        return stopped.exit_status
    return 0


def _trainer(
    config: TrainConfig,
    world: World,
    run_dir: Path,
    checkpointer: Checkpointer,
    shared_data: Data | None,
) -> tuple[Trainer, RunSummary]:
    """Return the trainer of the command, or of ``--task``; collective."""
    task: Task | None = None
    if config.task is not None:
        heartbeat(f"calling {config.task}")
        made = call_task(config, world)
        if isinstance(made, Trainer):
            what = f"--task {config.task}"
            return made, RunSummary(config, run_dir, what, has_own_data=True)
        task = made
    ranks = communicator(world)
    heartbeat("loading the data")
    data = shared_data or load_data(config, seed=config.seed, world=world, ranks=ranks)
    checkpointer.data = {
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
    is_new = checkpointer.reader is None
    model, loaded = _build(config, data, ranks, with_weights=is_new)
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
        find_unused_parameters=is_reference(config.model) or task is not None,
    )
    trainer.uses_whole_config = True
    classes = "" if data.num_classes is None else f", {data.num_classes} classes"
    of_task = "" if task is None else f", --task {config.task}"
    what = f"{config.model} on {config.data}"
    return trainer, RunSummary(config, run_dir, what, classes + of_task, loaded)


def _build(
    config: TrainConfig, data: Data, ranks: Communicator, *, with_weights: bool
) -> tuple[nn.Module, str | None]:
    """Build the model, equal on all ranks; return it, and a line on its weights.

    Collective over all ranks. One rank per node downloads the weights.
    """
    name, weights = config.model, config.weights if with_weights else None
    if not all(ranks.allgather(is_cached(name, weights))):
        ranks.once_per_node(lambda: fetch_weights(name, weights), f"download {name}")
    return build_and_load(
        name,
        num_classes=data.num_classes,
        in_channels=data.in_channels,
        image_size=data.image_size,
        seed=config.seed,
        weights=weights,
    )


class ModelFile(Callback):
    """Saves the finished model's plain ``state_dict``."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def on_fit_end(self, trainer: Trainer) -> None:
        """Save it, completely or not at all."""
        heartbeat("writing the weights")
        state = trainer.state_dict()
        if trainer.engine.world.is_rank_zero:
            with replacing(self._path) as beside:
                torch.save(state, beside)


class RunSummary(Callback):
    """Prints what is trained on which ranks, and writes it into the run folder."""

    def __init__(
        self,
        config: TrainConfig,
        run_dir: Path,
        what: str,
        more: str = "",
        loaded: str | None = None,
        *,
        has_own_data: bool = False,
    ) -> None:
        """``what`` is trained; ``more`` of it; a line on the ``loaded`` weights."""
        self._config, self._run_dir = config, run_dir
        self._has_own_data = has_own_data
        self._what, self._more, self._loaded = what, more, loaded

    def on_fit_start(self, trainer: Trainer) -> None:
        """Print and write."""
        world, config = trainer.engine.world, self._config
        if not world.is_rank_zero:
            return
        write_json(self._run_dir / "environment.json", describe(world))
        table = summary_table(trainer.engine.model)
        (self._run_dir / "model.txt").write_text(table + "\n")
        for line in (*node_lines(world.nodes), *self._training_lines(trainer)):
            say(line)
        for setting in config.without_effect(has_own_data=self._has_own_data):
            logger.warning("has no effect here: %s", setting)
        num = trainer.engine.data.train.num_samples
        if num is not None and config.global_batch_size > num:
            logger.warning(
                "--global-batch-size %d is larger than the training set (%d samples): "
                "an epoch is one step",
                *(config.global_batch_size, num),
            )
        idle = world.world_size - config.global_batch_size
        if idle > 0:
            logger.warning(
                "--global-batch-size %d on %d ranks: %d of them have no sample in a "
                "step",
                *(config.global_batch_size, world.world_size, idle),
            )

    def _training_lines(self, trainer: Trainer) -> Sequence[str]:
        config, data, plan = self._config, trainer.engine.data, trainer.engine.plan
        train, *val = map(_count, data.num_samples.values())
        if config.dry_run:
            steps = "dry run: one step, one evaluation"
        elif plan.total_steps is None:
            steps = f"{plan.length} of unknown length"
        elif plan.max_steps is not None:
            steps = f"{plan.length}, of epochs of {plan.steps_per_epoch or 'unknown'}"
        else:
            steps = (
                f"{plan.total_steps} steps = {plan.num_epochs} epochs x "
                f"{plan.steps_per_epoch}"
            )
        world = trainer.engine.world
        threads = f"{world.num_threads} thread{'s' * (world.num_threads != 1)}"
        return [
            f"backend {world.backend}, rendezvous at {world.master_addr}:"
            f"{world.master_port}, {threads} per rank",
            f"{self._what}: {train} samples to train, "
            f"{' and '.join(val) or 'none'} to validate{self._more}",
            f"{summary_line(trainer.engine.model)}; {trainer.engine.strategy.name}, "
            f"{config.precision}",
            trainer.engine.strategy.batch_line(),
            steps,
            f"run folder {shown(self._run_dir)}",
            *([self._loaded] if self._loaded is not None else []),
        ]


def _count(num_samples: int | None) -> str:
    return "unknown number of" if num_samples is None else str(num_samples)
