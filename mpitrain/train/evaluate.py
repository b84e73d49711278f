"""Exact evaluation: every sample once, sums over all ranks, then one division."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from mpitrain.data.sharding import shard_of
from mpitrain.data.sources import Samples
from mpitrain.record.events import Progress
from mpitrain.world import World

BATCH_SIZE = 256
"""Samples that one rank evaluates at once; does not change any result."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """How good a model is on a set of samples. Equal on all ranks."""

    loss: float
    """Mean cross-entropy per sample, in nats."""
    accuracy: float
    """Share of the samples whose class was found, 0 to 1."""
    num_samples: int
    """How many samples that was."""


@torch.no_grad()
def evaluate(
    model: nn.Module,
    samples: Samples,
    world: World,
    dtype: torch.dtype,
    progress: Progress,
) -> Evaluation:
    """Judge a model on every sample exactly once.

    Collective over the default group.

    Args:
        model: Maps inputs `(N, ...)` to scores `(N, num_classes)`; not wrapped.
        samples: What to judge it by.
        world: Where this process stands.
        dtype: Floating point of the inputs.
        progress: Told of every batch.

    Returns:
        Sums over all ranks, divided by the count over all ranks.
    """
    model.eval()
    for buffer in model.buffers():
        dist.broadcast(buffer, src=0)  # batch norm's, which each rank has of its own
    sums = torch.zeros(3, dtype=torch.float64, device=world.device)
    mine = shard_of(np.arange(len(samples)), world.rank, world.world_size)
    for start in range(0, len(mine), BATCH_SIZE):
        progress("evaluation")
        inputs, labels = samples.batch(mine[start : start + BATCH_SIZE])
        inputs = inputs.to(world.device, dtype)
        labels = labels.to(world.device)
        scores = model(inputs)
        sums[0] += F.cross_entropy(scores, labels, reduction="sum").double()
        sums[1] += (scores.argmax(dim=1) == labels).sum()
        sums[2] += len(labels)
    dist.all_reduce(sums)
    loss, correct, count = sums.tolist()
    return Evaluation(
        loss=loss / count, accuracy=correct / count, num_samples=int(count)
    )
