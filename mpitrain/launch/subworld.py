"""Some of a job's ranks as a world of their own, while the others sleep.

So one job can train on 1, 2, 4 ... of its ranks, one after another: torch's default
process group and `world_comm` are those of the sub-world, for all that ask for them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from mpitrain.launch import init
from mpitrain.launch.exit_guard import ExitGuard
from mpitrain.mpi.collectives import barrier, use_as_world
from mpitrain.mpi.world import World
from mpitrain.watchdog.heartbeat import State

T = TypeVar("T")


class SubWorlds:
    """The ranks of a job, of which some work at a time; to be entered with ``with``.

    Collective over all ranks, and so are its methods. Inside the block there is no
    process group but that of the ranks that work; after it that of all ranks stands
    again. Variables such as ``WORLD_SIZE`` stay those of the job.
    """

    def __init__(self, guard: ExitGuard, world: World, timeout_seconds: float) -> None:
        self._guard = guard
        self._world = world
        self._timeout_seconds = timeout_seconds
        self._number = 0

    def __enter__(self) -> SubWorlds:
        # Not the guard's: its own barrier, where a rank fails, shall wake nobody.
        self._all = self._guard.comm.Dup()
        barrier(self._all)
        _destroy_process_group()
        return self

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if error is None:
            self._all.Free()
            self._number += 1
            self._init_process_group(self._world)

    def run(self, num_ranks: int, action: Callable[[World], T], phase: str) -> T | None:
        """Run `action` on some ranks as a world of their own; the others sleep.

        `action` must leave nothing behind that needs the process group.
        """
        from mpi4py import MPI

        # Equal on all ranks, and never the same twice: what a group left in the store
        # would be taken for another's.
        self._number += 1
        ranks = in_node_order(self._world)[:num_ranks]
        if self._world.rank not in ranks:
            self._guard.comm.Split(MPI.UNDEFINED)
            watched = self._guard.watched
            watched.set_state(State.IDLE)
            barrier(self._all)
            watched.progress("awake again")
            watched.set_state(State.RUNNING)
            return None
        comm = self._guard.comm.Split(0, ranks.index(self._world.rank))
        assert isinstance(comm, MPI.Intracomm)
        try:
            with use_as_world(comm):
                barrier(comm)
                world = sub_world(self._world, ranks)
                self._init_process_group(world)
                self._guard.watched.expect_steps(phase)
                result = action(world)
                barrier(comm)
                _destroy_process_group()
        except Exception as error:
            rank = getattr(error, "reporting_rank", None)
            if rank is not None:  # as the sub-world numbers them; the guard knows all
                error.reporting_rank = ranks[rank]  # type: ignore[attr-defined]
            raise
        comm.Free()
        barrier(self._all)
        return result

    def _init_process_group(self, world: World) -> None:
        from torch._C._distributed_c10d import PrefixStore

        assert self._guard.store is not None  # the start has opened it
        name = f"mpitrain/sub_world/{self._number}/{world.world_size}"
        store = PrefixStore(name, self._guard.store)
        init.init_process_group(self._guard, world, self._timeout_seconds, store)


def _destroy_process_group() -> None:
    """Destroy all groups, and torch's caches for sharded tensors (torch 2.15).

    These hold names of groups, which the next sub-world uses again.
    """
    import torch.distributed as dist

    dist.destroy_process_group()
    if "torch.distributed.tensor" in sys.modules:
        from torch.distributed.tensor import _redistribute, debug

        clear: Any = debug._clear_sharding_prop_cache  # noqa: SLF001
        clear()
        _redistribute._gen_transform_infos.cache_clear()  # noqa: SLF001


def in_node_order(world: World) -> list[int]:
    """Return all ranks so that the first of them fill the first nodes."""
    return [rank for node in world.nodes for rank in node.ranks]


def sub_world(world: World, ranks: Sequence[int]) -> World:
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
    rank = ranks.index(world.rank)
    node_rank = next(i for i, node in enumerate(nodes) if rank in node.ranks)
    return replace(
        world,
        rank=rank,
        world_size=len(ranks),
        local_rank=nodes[node_rank].ranks.index(rank),
        local_world_size=len(nodes[node_rank].ranks),
        node_rank=node_rank,
        nodes=tuple(nodes),
    )
