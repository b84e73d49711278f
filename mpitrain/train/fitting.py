"""The largest microstep that fits into memory: ``--micro-batch-size auto``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import psutil
import torch
from torch import Tensor, nn

from mpitrain.data.nests import rows_of
from mpitrain.data.sharding import largest_shard
from mpitrain.launch.shared import Alone, Ranks
from mpitrain.train.feed import Batch, Feed
from mpitrain.train.strategy import casting
from mpitrain.world import World

if TYPE_CHECKING:
    from mpitrain.train.trainer import Trainer

SHARE = 0.6
"""How much of what is free may be taken: the rest is for gradients, the optimizer and
what others do."""


def largest_micro_batch(
    trainer: Trainer, model: nn.Module, feed: Feed, world: World, ranks: Ranks | Alone
) -> int:
    """Return how many samples a rank can take at once.

    Collective over all ranks.

    What a forward pass keeps for the backward pass is counted for one sample and for
    two; no pass is tried that would not fit, since on a CPU that kills the rank. A step
    of one's own that keeps more, such as of two passes, is not asked.

    Args:
        trainer: Has the loss.
        model: On this rank's device.
        feed: Of the training data.
        world: Where this process stands.
        ranks: All of them.

    Returns:
        A power of two, or the whole share; the least of all ranks.
    """
    example = feed.example()
    with casting(trainer.config, world):
        one, two = (_kept_bytes(trainer, model, _repeated(example, n)) for n in (1, 2))
    per_sample = max(two - one, 1)
    if world.device == "cpu":
        free = psutil.virtual_memory().available / world.local_world_size
    else:
        free, _ = torch.cuda.mem_get_info(world.device)
    weights = sum(w.numel() * w.element_size() for w in model.parameters())
    # Gradients, and as much twice again for the optimizer.
    room = SHARE * (free - 3 * weights) - max(one - per_sample, 0)
    fits = max(1, int(room // per_sample))
    share = largest_shard(trainer.config.global_batch_size, world.world_size)
    size = share if fits >= share else 1 << (fits.bit_length() - 1)
    return min(ranks.tell_all(size))


def _kept_bytes(trainer: Trainer, model: nn.Module, batch: Batch) -> int:
    """Count what one forward pass keeps, without the weights themselves."""
    weights = {weight.data_ptr() for weight in model.parameters()}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    was_training = model.training
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    model.train()
    alive: list[Any] = []
    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        alive.append(trainer.loss(model(batch.inputs), batch.targets))
    model.train(was_training)
    with torch.no_grad():
        for buffer, before in buffers:
            buffer.copy_(before)
    return sum(kept.values())


def _repeated(batch: Batch, num: int) -> Batch:
    """Return a batch of so many times one sample, at least two for batch norm."""
    rows = torch.zeros(num + 1, dtype=torch.int64)
    inputs, targets = (rows_of(it, rows) for it in (batch.inputs, batch.targets))
    return Batch(inputs, targets, np.zeros(0, np.int64))
