"""Features of a frozen backbone: computed once, then only the head is trained."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn

from mpitrain.data.in_memory import InMemory
from mpitrain.data.loader import BatchLoader
from mpitrain.data.sharding import RankShard, max_shard_size, shard_bounds
from mpitrain.launch.job import heartbeat
from mpitrain.models.layers import features_before_head
from mpitrain.mpi.shared_arrays import Communicator
from mpitrain.mpi.world import World

MAX_MEMORY_FRACTION = 0.25  # of a node's free memory that features may take


@torch.no_grad()
def features_of(
    model: nn.Module,
    loaders: Sequence[BatchLoader],
    world: World,
    ranks: Communicator,
    batch_size: int,
) -> list[InMemory] | None:
    """Compute the inputs of a model's head for every sample of some data sets.

    Collective over all ranks. Each computes its shard; a node holds all, once. ``None``
    where they do not fit into memory, or the model computes more after its head.
    """
    model.eval()
    first = loaders[0].example()
    backbone = features_before_head(model, first.inputs)
    if backbone is None:
        return None
    feature = backbone(first.inputs)[0]
    dtype = torch.float32 if feature.dtype.itemsize == 2 else feature.dtype
    feature = feature.to(dtype)  # NumPy has no bf16
    num_all = sum(loader.samples.num_samples or 0 for loader in loaders)
    wanted = num_all * feature.numel() * dtype.itemsize
    free = ranks.on_rank_zero(
        lambda: psutil.virtual_memory().available, "ask for memory"
    )
    # Rank zero's answer for all: one that computed features alone would wait forever.
    if wanted > MAX_MEMORY_FRACTION * free:
        return None
    return [
        _compute(backbone, loader, feature, world, ranks, batch_size)
        for loader in loaders
    ]


def _compute(
    backbone: Callable[[Tensor], Tensor],
    loader: BatchLoader,
    feature: Tensor,
    world: World,
    ranks: Communicator,
    batch_size: int,
) -> InMemory:
    num = loader.samples.num_samples
    assert num is not None
    rows = {"features": feature, "targets": loader.example().targets[0]}
    held = ranks.load_shared(
        lambda: {
            name: torch.zeros((num, *row.shape), dtype=row.dtype).numpy()
            for name, row in rows.items()
        },
        "make room for features",
    )
    whole = {name: torch.from_numpy(array) for name, array in held.items()}
    rank_shard = RankShard(
        rank=world.rank,
        world_size=world.world_size,
        global_batch_size=batch_size * world.world_size,
        order=np.arange(num, dtype=np.int64),
    )
    done = 0
    for step in loader.steps(rank_shard, epoch=0):
        for batch in step.micro_batches:
            heartbeat("features")
            mine = {"features": backbone(batch.inputs), "targets": batch.targets}
            for name, values in mine.items():
                found = _gather(values[: len(batch)], step.num_samples, world)
                # By every rank: each may hold memory of its own, else it is the same.
                whole[name][done : done + step.num_samples] = found.cpu()
        done += step.num_samples
    dist.barrier()
    return InMemory(whole["features"], whole["targets"])


def _gather(rows: Tensor, num: int, world: World) -> Tensor:
    if world.world_size == 1:
        return rows
    # all_gather wants equal sizes, and shards differ by one.
    longest = max_shard_size(num, world.world_size)
    padded = rows.new_zeros((longest, *rows.shape[1:]))
    padded[: len(rows)] = rows
    found = [torch.empty_like(padded) for _ in range(world.world_size)]
    dist.all_gather(found, padded)
    bounds = (shard_bounds(num, rank, len(found)) for rank in range(len(found)))
    return torch.cat(
        [part[: stop - at] for part, (at, stop) in zip(found, bounds, strict=True)]
    )
