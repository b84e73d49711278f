"""Distributed gradients against those of one process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from mpitrain.mpi.world import World

if TYPE_CHECKING:
    from mpitrain.launch.job import Job

TOLERANCES = {"ddp": 1e-12, "fsdp": 1e-4}
"""By strategy: of gradients of the order of one, in float64 with DDP, in float32 with
FSDP, which asks for averages only there."""

_SEED = 20261121


def share_of(rank: int) -> int:
    """Return how many samples a rank has of the trial's batch: unequal ones.

    >>> [share_of(rank) for rank in range(6)]
    [1, 3, 2, 4, 1, 3]
    """
    return 1 + (rank * 2) % 4 + (rank // 2) % 2


def largest_difference(job: Job, world: World, strategy: str) -> float:
    """Compare the gradients of all ranks with those that this process computes alone.

    Collective over all ranks.

    Args:
        job: The running job.
        world: Where this process stands, with its device.
        strategy: ``ddp`` or ``fsdp``.

    Returns:
        The largest difference of this rank's, absolute.
    """
    job.progress(f"check: gradients by {strategy}")
    dtype = torch.float64 if strategy == "ddp" else torch.float32
    counts = [share_of(rank) for rank in range(world.world_size)]
    first, num_samples = sum(counts[: world.rank]), sum(counts)
    random = torch.Generator().manual_seed(_SEED)
    samples = torch.randn(num_samples, 16, generator=random, dtype=torch.float64)
    samples = samples.to(world.device, dtype)

    alone = _model(world.device, dtype)
    _loss(alone, samples).div(num_samples).backward()  # type: ignore[no-untyped-call]

    together = _model(world.device, dtype)
    parallel: nn.Module = together
    if strategy == "ddp":
        parallel = DistributedDataParallel(together)
    else:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        kind = torch.device(world.device).type
        fully_shard(together, mesh=init_device_mesh(kind, (world.world_size,)))
    mine = samples[first : first + counts[world.rank]]
    # Both average over ranks; the mean over samples is what one process has.
    scale = world.world_size / num_samples
    _loss(parallel, mine).mul(scale).backward()  # type: ignore[no-untyped-call]

    largest = 0.0
    for ours, its in zip(together.parameters(), alone.parameters(), strict=True):
        gradient: Any = ours.grad
        if strategy == "fsdp":
            gradient = gradient.full_tensor()
        largest = max(largest, float((gradient - its.grad).abs().max()))
    return largest


def _model(device: str, dtype: torch.dtype) -> nn.Module:
    """Make the same small network in every process."""
    random = torch.Generator().manual_seed(_SEED + 1)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)).to(dtype)
    with torch.no_grad():
        for weight in model.parameters():
            drawn = torch.randn(weight.shape, generator=random, dtype=torch.float64)
            weight.copy_(drawn / 4)
    return model.to(device)


def _loss(model: nn.Module, samples: Tensor) -> Tensor:
    """Return the sum of the losses of some samples, a scalar."""
    found: Tensor = model(samples)
    return found.square().sum()
