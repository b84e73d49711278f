"""One run, from a ready process group to the weights on disk."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mpitrain import schedulers
from mpitrain.data.sources import Data, load_data
from mpitrain.launch import Job
from mpitrain.launch.shared import Ranks, all_ranks
from mpitrain.models.build import build_and_load
from mpitrain.models.fetch import cache_folder, fetch_weights, is_cached
from mpitrain.models.summary import summary_line, summary_table
from mpitrain.models.weights import LoadedWeights
from mpitrain.plugins import is_reference
from mpitrain.record.console import Bar, Console, open_console, world_lines
from mpitrain.record.environment import describe
from mpitrain.record.folder import write_json
from mpitrain.record.progress import Standing
from mpitrain.record.recorder import shown
from mpitrain.topology import mpi_library
from mpitrain.train.beginning import Beginning
from mpitrain.train.config import TrainConfig
from mpitrain.train.recording import Recording, open_recording
from mpitrain.train.resuming import (
    blind_hosts,
    checkpoint_to_load,
    keeper_of,
    say_going_on,
)
from mpitrain.train.setup import Setup
from mpitrain.train.stopping import CAN_GO_ON, Stopped, Stopper
from mpitrain.train.trainer import Trainer

logger = logging.getLogger("mpitrain")


def run_training(
    job: Job, begun: Beginning, stopper: Stopper, start_seconds: float
) -> int:
    """Train as asked, and leave the record in the run folder.

    Collective over all ranks.

    Args:
        job: The running job.
        begun: What was asked, and the run folder.
        stopper: Knows whether to stop.
        start_seconds: From the process's start to the ready process group.

    Returns:
        The exit status: 0, or `CAN_GO_ON` where the training stopped in time.

    Raises:
        MpitrainError: The data or the model cannot be had; raised on the ranks where
            that is so, of which the guard lets one speak.
    """
    world, config, run_dir = job.world, begun.config, begun.run_dir
    ranks = all_ranks(world)
    blind = blind_hosts(begun, world, ranks)
    loader = checkpoint_to_load(begun, world, ranks, blind, job.progress)
    before = None if loader is None else loader.facts["record"]
    if loader is not None and loader.facts["run"] != begun.run_id:
        before = None  # another run's: its record stays with it
    done = loader.facts["so_far"]["num_steps"] if loader is not None else 0
    recording = open_recording(job, begun, start_seconds, before, done)
    job.progress("loading the data")
    data = load_data(config, seed=config.seed, world=world, ranks=ranks)
    job.progress("building the model")
    model, loaded = build(config, data, ranks, with_weights=loader is None)
    trainer = Trainer(model, data.train, data.val, config, world=world)
    trainer.statistics = data.statistics
    trainer.num_classes = data.num_classes
    trainer.all_weights_used = not is_reference(config.model)
    trainer.progress = job.progress
    recording.listen_to(trainer)
    job.on_end(recording.times.cut)
    trainer.keeper = keeper_of(
        trainer, begun, world, ranks, stopper, recording.record, loader, data, blind
    )
    if trainer.keeper is None:
        stopper.stand_down()
    setup = trainer.set_up()
    recording.begin(trainer)
    recorder = recording.record
    if recorder is None:
        return trained_and_finished(trainer, data, recording, run_dir)

    environment = describe(
        world, schedulers.detect(os.environ), mpi_library(), os.environ
    )
    write_json(run_dir / "environment.json", environment)
    (run_dir / "model.txt").write_text(summary_table(model) + "\n")
    plan = setup.plan
    standing = Standing(plan.total_steps, done, stopper.seconds_left)
    with open_console(config.progress, plan.num_epochs, standing) as console:
        introduce(console, setup, data, model, config, run_dir)
        if loaded is not None:
            console.say(loaded.line())
        recorder.begin(
            total_steps=plan.total_steps,
            num_epochs=plan.num_epochs,
            steps_per_epoch=plan.steps_per_epoch,
            global_batch_size=config.global_batch_size,
        )
        if loader is not None:
            say_going_on(console, loader, begun, recorder)
        recorder.console = console
        if isinstance(console, Bar):
            trainer.each_step.append(console.step_done)
        recorder.seconds_left = stopper.seconds_left
        return trained_and_finished(trainer, data, recording, run_dir)


def trained_and_finished(
    trainer: Trainer, data: Data, recording: Recording, run_dir: Path
) -> int:
    """Train to the end, or until it is time to stop; return the exit status.

    Collective over all ranks.
    """
    try:
        with recording.under_way():
            trainer.fit()
    except Stopped as stopped:
        trainer.setup.close()
        data.close()
        named = "" if trainer.config.name else f" with --name {run_dir.name}"
        recording.stop(str(stopped), f"the same command{named}", trainer.progress)
        return CAN_GO_ON
    finish(trainer, data, recording, run_dir)
    return 0


def build(
    config: TrainConfig, data: Data, ranks: Ranks, *, with_weights: bool
) -> tuple[nn.Module, LoadedWeights | None]:
    """Build the model, equal on all ranks; one of each file system downloads weights.

    Collective over all ranks.

    Args:
        config: What was asked.
        data: What it shall fit.
        ranks: All of them.
        with_weights: Whether ``--weights`` are wanted; a checkpoint has its own.

    Returns:
        The model, and what of its weights was loaded, if any were.
    """
    name, weights = config.model, config.weights if with_weights else None
    if not all(ranks.tell_all(is_cached(name, weights))):
        ranks.once_per_file_system(
            cache_folder(name),
            lambda: fetch_weights(name, weights),
            f"download {name}",
        )
    return build_and_load(
        name,
        num_classes=data.num_classes,
        in_channels=data.in_channels,
        image_size=data.image_size,
        seed=config.seed,
        weights=weights,
    )


def finish(trainer: Trainer, data: Data, recording: Recording, run_dir: Path) -> None:
    """Write the finished model down, and judge it by the test set, if there is one.

    Collective over all ranks.
    """
    setup = trainer.setup
    trainer.progress("writing the weights")
    state = setup.whole_state()
    if recording.record is not None:
        save(state, run_dir / "model.pt")
    if data.test is not None:
        found = setup.evaluate(setup.feed_of(data.test), trainer.values)
        recording.test_done(found, setup.count_skipped())
    data.close()
    recording.finish(trainer.progress)


def introduce(
    console: Console,
    setup: Setup,
    data: Data,
    model: nn.Module,
    config: TrainConfig,
    run_dir: Path,
) -> None:
    """Say who is there, what is trained on what, and the sums that follow."""
    plan, world = setup.plan, setup.world
    for line in world_lines(world):
        console.say(line)
    train, val = (_counted(part.num_samples) for part in (data.train, data.val))
    classes = "" if data.num_classes is None else f", {data.num_classes} classes"
    console.say(
        f"{config.model} on {config.data}: {train} samples to train, "
        f"{val} to validate{classes}"
    )
    console.say(f"{summary_line(model)}; {setup.strategy}, {config.precision}")
    console.say(plan.batch_line())
    if config.dry_run:
        console.say("dry run: one step, one evaluation")
    elif plan.total_steps is None:
        console.say(f"{plan.num_epochs} epochs of unknown length")
    else:
        console.say(
            f"{plan.total_steps} steps = {plan.num_epochs} epochs x "
            f"{plan.steps_per_epoch}"
        )
    console.say(f"run folder {shown(run_dir)}")
    for setting in config.without_effect():
        logger.warning("without effect: %s", setting)
    if data.train.num_samples is not None:
        more = config.global_batch_size - data.train.num_samples
        if more > 0:
            logger.warning(
                "--global-batch-size %d is larger than the training set (%d samples): "
                "an epoch is one step",
                *(config.global_batch_size, data.train.num_samples),
            )
    idle = world.world_size - config.global_batch_size
    if idle > 0:
        logger.warning(
            "--global-batch-size %d on %d ranks: %d of them have no sample in a step",
            *(config.global_batch_size, world.world_size, idle),
        )


def save(state: dict[str, Any], path: Path) -> None:
    """Write a plain ``state_dict``, whole or not at all."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    torch.save(state, beside)
    os.replace(beside, path)


def _counted(num_samples: int | None) -> str:
    return "unknown number of" if num_samples is None else str(num_samples)
