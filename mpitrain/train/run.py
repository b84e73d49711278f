"""One run, from a ready process group to the weights on disk."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import torch
from torch import nn

from mpitrain import schedulers
from mpitrain.data.sources import Data, load_data
from mpitrain.launch import Job
from mpitrain.models import build_model
from mpitrain.record.console import Console, open_console, world_lines
from mpitrain.record.environment import describe
from mpitrain.record.folder import write_json
from mpitrain.record.recorder import Recorder, Silent, shown
from mpitrain.topology import mpi_library
from mpitrain.train.config import TrainConfig
from mpitrain.train.loop import DTYPES, train
from mpitrain.train.plan import Plan
from mpitrain.world import World

logger = logging.getLogger("mpitrain")


def run_training(
    job: Job, config: TrainConfig, run_dir: Path, start_seconds: float
) -> None:
    """Train as asked, and leave the record in the run folder.

    Collective over all ranks.

    Args:
        job: The running job.
        config: What was asked.
        run_dir: The run folder.
        start_seconds: From the process's start to the ready process group.

    Raises:
        MpitrainError: The data or the model cannot be had; raised on the ranks where
            that is so, of which the guard lets one speak.
    """
    world = job.world
    # Agreed, so that no rank fails, and writes so, before the record has begun.
    recorder = job.all_or_none(
        lambda: Recorder(run_dir, world, start_seconds) if world.is_rank_zero else None,
        "begin the record",
    )
    data = load_data(config.data, config.data_dir)
    model = build(config, data, world)
    plan = Plan(num_samples=len(data.train), world_size=world.world_size, config=config)
    if recorder is None:
        train(world, plan, model, data, Silent(), job.progress)
        return

    environment = describe(
        world, schedulers.detect(os.environ), mpi_library(), os.environ
    )
    write_json(run_dir / "environment.json", environment)
    with open_console(config.progress, plan.num_epochs, plan.total_steps) as console:
        introduce(console, world, plan, data, run_dir)
        recorder.console = console
        train(world, plan, model, data, recorder, job.progress)
        job.progress("writing the weights")
        save_model(model, run_dir / "model.pt")
        recorder.finish()


def build(config: TrainConfig, data: Data, world: World) -> nn.Module:
    """Build the model on this rank's device, in the precision asked for."""
    model = build_model(
        config.model,
        num_classes=data.num_classes,
        in_channels=data.in_channels,
        image_size=data.image_size,
        seed=config.seed,
    )
    return model.to(world.device, DTYPES[config.precision])


def introduce(
    console: Console, world: World, plan: Plan, data: Data, run_dir: Path
) -> None:
    """Say who is there, what is trained on what, and the sums that follow."""
    config = plan.config
    for line in world_lines(world):
        console.say(line)
    console.say(
        f"{config.model} on {config.data}: {len(data.train)} samples to train, "
        f"{len(data.val)} to validate, {data.num_classes} classes"
    )
    console.say(plan.batch_line())
    console.say(
        "dry run: one step, one evaluation"
        if config.dry_run
        else f"{plan.total_steps} steps = {plan.num_epochs} epochs x "
        f"{plan.steps_per_epoch}"
    )
    console.say(f"run folder {shown(run_dir)}")
    for setting in config.without_effect():
        logger.warning("without effect: %s", setting)
    idle = world.world_size - config.global_batch_size
    if idle > 0:
        logger.warning(
            "--global-batch-size %d on %d ranks: %d of them have no sample in a step",
            *(config.global_batch_size, world.world_size, idle),
        )


def save_model(model: nn.Module, path: Path) -> None:
    """Write a plain ``state_dict``, on the CPU, whole or not at all."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    state = {
        name: value.cpu() if isinstance(value, torch.Tensor) else value
        for name, value in model.state_dict().items()
    }
    torch.save(state, beside)
    os.replace(beside, path)
