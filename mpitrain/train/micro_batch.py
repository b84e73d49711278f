"""The largest micro-batch that fits into memory: ``--micro-batch-size auto``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor, nn

from mpitrain.config import TrainConfig
from mpitrain.data.pytree import select_rows
from mpitrain.data.sharding import max_shard_size
from mpitrain.mpi.shared_arrays import Communicator
from mpitrain.mpi.world import World
from mpitrain.train.loader import Batch
from mpitrain.train.parallel import autocast

MEMORY_FRACTION = 0.6
"""Of the free memory that activations may take: gradients and the optimizer follow."""


def largest_micro_batch(
    loss_fn: Callable[[Any, Any], Tensor],
    model: nn.Module,
    example: Batch,
    config: TrainConfig,
    world: World,
    ranks: Communicator,
) -> int:
    """Return the number of samples that fit into this rank's memory at once.

    Collective over all ranks. The memory that a forward pass keeps for the backward
    pass is measured for one sample and for two; no pass is tried that would not fit,
    since on a CPU that kills the rank.

    Args:
        loss_fn: Maps outputs and targets to losses.
        model: On this rank's device, not parallelized.
        example: A batch of one row.
        config: Precision and global batch size.
        world: This process's place in the job.
        ranks: The collectives.

    Returns:
        A power of two, or the whole shard of a step; the minimum over ranks.
    """
    with autocast(config, world):
        one, two = (_saved_bytes(loss_fn, model, _repeat(example, n)) for n in (1, 2))
    per_sample = max(two - one, 1)
    if world.device == "cpu":
        free = psutil.virtual_memory().available / world.local_world_size
    else:
        free, _ = torch.cuda.mem_get_info(world.device)
    weights = sum(w.numel() * w.element_size() for w in model.parameters())
    # Gradients, and twice as much for the optimizer.
    room = MEMORY_FRACTION * (free - 3 * weights) - max(one - per_sample, 0)
    fits = max(1, int(room // per_sample))
    shard = max_shard_size(config.global_batch_size, world.world_size)
    size = shard if fits >= shard else 1 << (fits.bit_length() - 1)
    return min(ranks.allgather(size))


def _saved_bytes(
    loss_fn: Callable[[Any, Any], Tensor], model: nn.Module, batch: Batch
) -> int:
    """Count what one forward pass saves, without the weights."""
    weights = {weight.data_ptr() for weight in model.parameters()}
    saved: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    was_training = model.training
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    model.train()
    alive: list[Any] = []
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        alive.append(loss_fn(model(batch.inputs), batch.targets))
    model.train(was_training)
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)
    return sum(saved.values())


def _repeat(batch: Batch, num: int) -> Batch:
    """Return a batch of `num` times one sample, and one row more for batch norm."""
    rows = torch.zeros(num + 1, dtype=torch.int64)
    inputs, targets = (
        select_rows(part, rows) for part in (batch.inputs, batch.targets)
    )
    return Batch(inputs, targets, np.zeros(0, np.int64))
