"""Some of a job's ranks as a world of their own, beside others.

So one job can train several models at a time: torch's default process group and
`world_comm` are those of the sub-world, for all that ask for them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import replace

from mpitrain.config import TIMEOUT_SECONDS
from mpitrain.launch.init import init_process_group
from mpitrain.launch.job import Job
from mpitrain.mpi.collectives import NUM_TAGS, barrier
from mpitrain.mpi.topology import place_on
from mpitrain.mpi.world import World


@contextlib.contextmanager
def sub_world(
    job: Job,
    world: World,
    ranks: Sequence[int],
    number: int,
    timeout_seconds: float = TIMEOUT_SECONDS,
) -> Iterator[World]:
    """Let some ranks be a world of their own in this block.

    Collective over these ranks alone; what the block leaves behind must not need the
    process group. Variables such as ``WORLD_SIZE`` stay those of the job.

    Args:
        job: Its process group is destroyed.
        world: All ranks of the job.
        ranks: Those of the sub-world, in its order; this rank is one of them.
        number: Equal on these ranks, and not used before in this job.
        timeout_seconds: How long one collective may take.
    """
    from mpitrain.torch_compat import PrefixStore, destroy_process_group

    assert job.store is not None  # the start has opened it
    # Create_group, not Split: the ranks outside of it are busy, and do not come.
    members = job.comm.Get_group().Incl(list(ranks))
    mine = job.comm.Create_group(members, tag=number % NUM_TAGS)
    members.Free()
    part = sub_world_of(world, ranks)
    # What a sub-world before left in the store would be taken for this one's.
    store = PrefixStore(f"mpitrain/sub_world/{number}", job.store)
    with job.mpi.use_as_world(mine):
        init_process_group(job, part, timeout_seconds, store)
        try:
            yield part
            barrier(mine)
        finally:
            destroy_process_group()
    mine.Free()  # not after an error: MPI may still use it


def sub_world_of(world: World, ranks: Sequence[int]) -> World:
    """Return the world of some ranks, in this order; this rank is one of them."""
    nodes = []
    for node in world.nodes:
        kept = [at for at, rank in enumerate(node.ranks) if rank in ranks]
        if kept:
            of_kept = replace(
                node,
                ranks=tuple(ranks.index(node.ranks[at]) for at in kept),
                devices=tuple(node.devices[at] for at in kept if node.devices),
                gpus=tuple(node.gpus[at] for at in kept if node.gpus),
            )
            nodes.append(of_kept)
    return replace(world, **place_on(tuple(nodes), ranks.index(world.rank)))
