"""Distributed gradients against those of one process."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mpitrain.world import World

if TYPE_CHECKING:
    from mpitrain.launch import Job

TOLERANCE = 1e-12
"""Of float64 gradients of the order of one."""

_SEED = 20261121


def share_of(rank: int) -> int:
    """Return how many samples a rank has of the trial's batch: unequal ones.

    >>> [share_of(rank) for rank in range(6)]
    [1, 3, 2, 4, 1, 3]
    """
    return 1 + (rank * 2) % 4 + (rank // 2) % 2


def largest_difference(job: Job, world: World) -> float:
    """Compare DDP's gradients with those that this process computes alone.

    Collective over all ranks.

    Args:
        job: The running job.
        world: Where this process stands, with its device.

    Returns:
        The largest difference of this rank's, absolute.
    """
    job.progress("check: gradients")
    counts = [share_of(rank) for rank in range(world.world_size)]
    first, num_samples = sum(counts[: world.rank]), sum(counts)
    random = torch.Generator().manual_seed(_SEED)
    samples = torch.randn(num_samples, 16, generator=random, dtype=torch.float64)
    samples = samples.to(world.device)

    alone = _model(world.device)
    _loss(alone, samples).div(num_samples).backward()  # type: ignore[no-untyped-call]

    together = _model(world.device)
    parallel = DistributedDataParallel(together)
    mine = samples[first : first + counts[world.rank]]
    # DDP averages over ranks; the mean over samples is what one process has.
    scale = world.world_size / num_samples
    _loss(parallel, mine).mul(scale).backward()  # type: ignore[no-untyped-call]

    pairs = zip(together.parameters(), alone.parameters(), strict=True)
    return max(float((ours.grad - its.grad).abs().max()) for ours, its in pairs)  # type: ignore[operator]


def _model(device: str) -> nn.Module:
    """Make the same small network in every process."""
    random = torch.Generator().manual_seed(_SEED + 1)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)).double()
    with torch.no_grad():
        for weight in model.parameters():
            drawn = torch.randn(weight.shape, generator=random, dtype=torch.float64)
            weight.copy_(drawn / 4)
    return model.to(device)


def _loss(model: nn.Module, samples: Tensor) -> Tensor:
    """Return the sum of the losses of some samples: float64, a scalar."""
    found: Tensor = model(samples)
    return found.square().sum()
