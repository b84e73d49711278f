"""Features of a frozen backbone: computed once, then only the head is trained."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import psutil
import torch
import torch.distributed as dist
from torch import Tensor, nn

from mpitrain.data.memory import InMemory
from mpitrain.data.sharding import Share, bounds_of, largest_shard
from mpitrain.launch.shared import Alone, Ranks
from mpitrain.models.head import split_head
from mpitrain.record.events import Progress
from mpitrain.train.feed import Feed
from mpitrain.world import World

MEMORY_SHARE = 0.25
"""How much of a node's free memory features may take."""


@torch.no_grad()
def features_of(
    model: nn.Module,
    feeds: Sequence[Feed],
    world: World,
    ranks: Ranks | Alone,
    progress: Progress,
    batch_size: int,
) -> list[InMemory] | None:
    """Compute what a model's head receives for every sample of some sets.

    Collective over all ranks. Each computes its share; a node holds all, once.

    Args:
        model: On this rank's device; not spread. Called in the precision that stands.
        feeds: The sets, with nothing random.
        world: Where this process stands.
        ranks: All of them.
        progress: Told of every batch.
        batch_size: Samples that a rank computes at once.

    Returns:
        A set of features and targets for each feed; ``None`` where they do not fit into
        memory, a set does not know its length, or the model does more after its head.
    """
    if any(feed.samples.num_samples is None or feed.samples.may_lack for feed in feeds):
        return None
    model.eval()
    first = feeds[0].example()
    split = split_head(model, first.inputs)
    if split is None:
        return None
    backbone, _ = split
    feature = backbone(first.inputs)[0]
    num_all = sum(feed.samples.num_samples or 0 for feed in feeds)
    wanted = num_all * feature.numel() * kept_as(feature.dtype).itemsize
    free = ranks.on_rank_zero(
        lambda: psutil.virtual_memory().available, "ask for memory"
    )
    if wanted > MEMORY_SHARE * free:
        return None
    return [
        _computed(backbone, feed, feature, world, ranks, progress, batch_size)
        for feed in feeds
    ]


def kept_as(dtype: torch.dtype) -> torch.dtype:
    """Return the type in which features are kept: NumPy's memory knows no bf16."""
    return torch.float32 if dtype.itemsize == 2 else dtype


def _computed(
    backbone: nn.Module,
    feed: Feed,
    feature: Tensor,
    world: World,
    ranks: Ranks | Alone,
    progress: Progress,
    batch_size: int,
) -> InMemory:
    num = feed.samples.num_samples
    assert num is not None
    example = feed.example()
    kinds = {"features": kept_as(feature.dtype), "targets": example.targets.dtype}
    shapes = {"features": feature.shape, "targets": example.targets.shape[1:]}
    held = ranks.hold(
        lambda: {
            name: torch.zeros((num, *shapes[name]), dtype=kinds[name]).numpy()
            for name in kinds
        },
        "make room for features",
    )
    whole = {name: torch.from_numpy(array) for name, array in held.items()}
    share = Share(
        rank=world.rank,
        world_size=world.world_size,
        global_batch_size=batch_size * world.world_size,
        order=np.arange(num, dtype=np.int64),
    )
    done = 0
    for step in feed.steps(share, epoch=0):
        for batch in step.microsteps:
            progress("features")
            mine = {"features": backbone(batch.inputs), "targets": batch.targets}
            for name, rows in mine.items():
                found = _gathered(rows[: len(batch)], step.num_samples, world)
                # By every rank: each may hold memory of its own, else it is the same.
                whole[name][done : done + step.num_samples] = found.cpu()
        done += step.num_samples
    dist.barrier()
    return InMemory(whole["features"], whole["targets"])


def _gathered(rows: Tensor, num: int, world: World) -> Tensor:
    """Put the shares of all ranks one behind the other: `(num, ...)`."""
    if world.world_size == 1:
        return rows
    longest = largest_shard(num, world.world_size)
    padded = rows.new_zeros((longest, *rows.shape[1:]))
    padded[: len(rows)] = rows
    found = [torch.empty_like(padded) for _ in range(world.world_size)]
    dist.all_gather(found, padded)
    cuts = (bounds_of(num, rank, world.world_size) for rank in range(world.world_size))
    return torch.cat(
        [it[: stop - start] for it, (start, stop) in zip(found, cuts, strict=True)]
    )
