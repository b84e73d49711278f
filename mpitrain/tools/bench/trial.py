"""One round of one row: a training of a few steps, on the ranks that take part."""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from mpitrain.data.memory import InMemory
from mpitrain.data.sharding import Indices
from mpitrain.data.sources import Data
from mpitrain.launch.shared import all_ranks
from mpitrain.plugins import is_reference
from mpitrain.record.events import Pace, Silent, StepRow
from mpitrain.tools.bench.cells import Cell
from mpitrain.tools.bench.config import BenchScalingConfig
from mpitrain.train.config import TrainConfig
from mpitrain.train.trainer import Trainer
from mpitrain.world import World

LEARNING_RATE = 1e-3
"""So small that losses stay numbers, whatever the model."""

REDUCTION_SECONDS = 0.05
"""As many all-reduces in a row as fit into this are timed, one at least."""

MOST_REDUCTIONS = 50


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What a round of a row came to. Equal on all ranks of the part."""

    step_seconds: float
    """Of a step, on the rank that took longest."""
    all_reduce_seconds: float
    """Of a step, from when the last rank had its own gradients until they had met; and,
    where the model has buffers, taking rank zero's (ddp)."""
    wait_seconds: float
    """Of a step, waiting for that rank: mean of the ranks."""
    losses: tuple[float, ...]
    """Of every step, those to warm up among them."""


class Again(InMemory):
    """Samples that come again and again, for epochs of any length.

    Args:
        samples: That are there.
        num_samples: In each epoch, from the first.
    """

    def __init__(self, samples: InMemory, num_samples: Sequence[int]) -> None:
        super().__init__(samples.inputs, samples.targets)
        self._lengths = num_samples

    def to(self, device: torch.device | str) -> Again:
        """Return the same on another device."""
        return Again(super().to(device), self._lengths)

    def order(self, seed: int, epoch: int) -> Indices:
        """Return the order of an epoch."""
        return np.resize(super().order(seed, epoch), self._lengths[epoch - 1])


class Heard(Silent):
    """Listens to a training."""

    def __init__(self) -> None:
        self.rows: list[StepRow] = []
        self.paces: list[Pace] = []

    def rows_done(self, rows: Sequence[StepRow]) -> None:
        """Keep them."""
        self.rows += rows

    def pace_done(self, pace: Pace) -> None:
        """Keep it."""
        self.paces.append(pace)


def try_steps(
    part: World, cell: Cell, config: BenchScalingConfig, model: nn.Module, data: Data
) -> Trial:
    """Train for an epoch to warm up, and for one that counts.

    Collective over the default group.

    Args:
        part: Where this process stands among those that take part.
        cell: What is timed.
        config: What was asked for.
        model: Copied, so that each round begins anew.
        data: What is trained on, in memory.
    """
    assert isinstance(data.train, InMemory)
    assert isinstance(data.val, InMemory)
    steps = (config.warmup_steps, config.steps)
    trainer = Trainer(
        copy.deepcopy(model),
        Again(data.train, [num * cell.global_batch_size for num in steps]),
        InMemory(data.val.inputs[:1], data.val.targets[:1]),  # not timed
        TrainConfig(
            model=config.model,
            data=config.data,
            image_size=data.image_size,
            precision=config.precision,
            strategy=cell.strategy,
            global_batch_size=cell.global_batch_size,
            epochs=len(steps),
            lr=LEARNING_RATE,
            schedule="constant",
            warmup_epochs=0.0,
        ),
        world=part,
    )
    trainer.statistics = data.statistics
    trainer.all_weights_used = not is_reference(config.model)
    trainer.listener = heard = Heard()
    trainer.pace_seconds = 0.0  # no pace of both epochs
    trainer.fit()
    counted = [pace for pace in heard.paces if pace.epoch == len(steps)]
    del trainer
    gc.collect()  # DDP and its hooks hold each other, and the device's memory
    if part.device != "cpu":
        torch.cuda.empty_cache()
    return Trial(
        step_seconds=sum(pace.seconds for pace in counted) / config.steps,
        all_reduce_seconds=sum(pace.communication_seconds for pace in counted)
        / config.steps,
        wait_seconds=sum(pace.wait_seconds for pace in counted) / config.steps,
        losses=tuple(row.loss for row in heard.rows),
    )


def all_reduce_seconds(part: World, num_bytes: int) -> float:
    """Time an all-reduce of so many bytes, on the slowest rank.

    Collective over the default group.
    """
    tensor = torch.zeros(-(-num_bytes // 4), device=part.device)

    def synchronize() -> None:
        if part.device != "cpu":
            torch.cuda.synchronize(part.device)

    def time_of(count: int) -> float:
        dist.all_reduce(tensor)  # whose end all leave together
        synchronize()
        started = time.perf_counter()
        for _ in range(count):
            dist.all_reduce(tensor)
        synchronize()
        seconds = (time.perf_counter() - started) / count
        return max(all_ranks(part).tell_all(seconds))

    once = time_of(1)
    return time_of(max(1, min(MOST_REDUCTIONS, int(REDUCTION_SECONDS / once))))
