"""One run, from a ready process group to the weights on disk."""

from __future__ import annotations

import logging
import os
import time
from dataclasses import asdict
from pathlib import Path

import psutil
import torch
from torch import nn

from mpitrain import schedulers
from mpitrain.data import sharding
from mpitrain.data.sources import Data, load_data
from mpitrain.record.console import batch_line, open_console, world_lines
from mpitrain.record.environment import describe
from mpitrain.record.folder import write_json
from mpitrain.record.recorder import Recorder, Silent, shown
from mpitrain.train.config import TrainConfig
from mpitrain.train.loop import train
from mpitrain.world import World

log = logging.getLogger("mpitrain")


def run_training(
    world: World, config: TrainConfig, path: Path, mpi_library: str
) -> None:
    """Train as asked, and leave the record in the run folder.

    Collective over the default group.

    Args:
        world: Where this process stands.
        config: What was asked.
        path: The run folder.
        mpi_library: The MPI library in its own words, for the record.
    """
    start_seconds = time.time() - psutil.Process().create_time()
    data = load_data(config.data, config.data_dir)
    if not world.is_rank_zero:
        train(world, config, data, Silent())
        return
    write_json(
        path / "environment.json",
        describe(world, schedulers.detect(os.environ), mpi_library, os.environ),
    )
    num_steps = sharding.num_steps(len(data.train), config.global_batch_size)
    console = open_console(config.progress, config.epochs, num_steps * config.epochs)
    for line in (*world_lines(world), *job_lines(world, config, data, path)):
        console.say(line)
    if config.global_batch_size < world.world_size:
        log.warning(
            "--global-batch-size %d is less than the %d ranks: %d of them have no "
            "sample in a step",
            *(config.global_batch_size, world.world_size),
            world.world_size - config.global_batch_size,
        )
    recorder = Recorder(path, world, console, start_seconds)
    model = train(world, config, data, recorder)
    save_model(model, path / "model.pt")
    recorder.finish()


def job_lines(world: World, config: TrainConfig, data: Data, path: Path) -> list[str]:
    """Say what is trained, on what, and the sums that follow."""
    size = config.global_batch_size
    largest = sharding.largest_shard(size, world.world_size)
    shards = (size // world.world_size, largest)
    micro = min(config.micro_batch_size or largest, largest)
    steps = sharding.num_steps(len(data.train), size)
    return [
        f"{config.model} on {config.data}: {len(data.train)} samples to train, "
        f"{len(data.val)} to validate, {data.num_classes} classes",
        batch_line(size, shards, micro, world.world_size),
        f"{steps * config.epochs} steps = {config.epochs} epochs x {steps}",
        f"run folder {shown(path)}",
    ]


def save_model(model: nn.Module, path: Path) -> None:
    """Write a plain ``state_dict``, on the CPU, whole or not at all."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    torch.save({name: t.cpu() for name, t in model.state_dict().items()}, beside)
    os.replace(beside, path)


def config_values(config: TrainConfig, path: Path) -> dict[str, object]:
    """Return a configuration as YAML holds it, with the name the run really has."""
    values = {**asdict(config), "name": path.name}
    return {k: str(v) if isinstance(v, Path) else v for k, v in values.items()}
