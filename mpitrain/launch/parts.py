"""Some ranks of a job as a world of their own, while the others sleep.

So one job can train on 1, 2, 4 ... of its ranks, one after another: torch's default
process group and MPI's ranks are those of the part, for all that asks for them.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast

from mpitrain.launch import start
from mpitrain.launch.guard import Guard
from mpitrain.topology import as_world, wait_for_all
from mpitrain.watchdog.heartbeat import State
from mpitrain.world import Node, World

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")


class Parts:
    """The ranks of a job, of which some work at a time; to be entered with ``with``.

    Collective over all ranks, and so are its methods. Inside the block there is no
    process group but that of the part that works; after it that of all ranks stands
    again. Variables such as ``WORLD_SIZE`` stay those of the job.

    Args:
        guard: The guard that stands, with the store.
        world: Where this process stands among all.
        timeout_seconds: How long one collective may take.

    Attributes:
        making_seconds: How long this rank took to make each part that it was in.
        asleep_seconds: How long it has slept.
        asleep_cpu_seconds: What it took of a core in that time.
    """

    def __init__(self, guard: Guard, world: World, timeout_seconds: float) -> None:
        self.making_seconds: list[float] = []
        self.asleep_seconds = 0.0
        self.asleep_cpu_seconds = 0.0
        self._guard = guard
        self._world = world
        self._timeout_seconds = timeout_seconds
        self._comms: dict[int, MPI.Intracomm] = {}
        self._number = 0

    def __enter__(self) -> Parts:
        import torch.distributed as dist

        # Not the guard's: its own barrier, where a rank fails, shall wake nobody.
        self._all = self._guard.comm.Dup()
        wait_for_all(self._all)
        dist.destroy_process_group()
        forget_groups()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> Literal[False]:
        if error is None:
            from mpi4py import MPI

            for comm in (*self._comms.values(), self._all):
                if comm != MPI.COMM_NULL:
                    comm.Free()
            self._number += 1
            self._join(self._world)
        return False

    def work(
        self, num_ranks: int, action: Callable[[World], T], phase: str
    ) -> T | None:
        """Let some ranks do something as if there were no others.

        Args:
            num_ranks: How many; the nodes are filled one after another.
            action: What they do, with where each stands among them. It must leave
                nothing behind that needs the process group.
            phase: What it is, for the words of a hang: ``"training on 2 ranks"``.

        Returns:
            What `action` returned on this rank; ``None`` where it slept.
        """
        from mpi4py import MPI

        # Equal on all ranks, and never the same twice: what a group left in the store
        # would be taken for another's.
        self._number += 1
        ranks = in_node_order(self._world)[:num_ranks]
        is_in = self._world.rank in ranks
        if num_ranks not in self._comms:
            color = 0 if is_in else MPI.UNDEFINED
            key = ranks.index(self._world.rank) if is_in else 0
            split = self._guard.comm.Split(color, key)
            self._comms[num_ranks] = cast("MPI.Intracomm", split)
        if not is_in:
            self._sleep()
            return None
        try:
            result = self._work(self._comms[num_ranks], ranks, action, phase)
        except Exception as error:
            speaker = getattr(error, "speaker", None)
            if speaker is not None:  # as the part numbers them; the guard knows all
                error.speaker = ranks[speaker]  # type: ignore[attr-defined]
            raise
        wait_for_all(self._all)
        return result

    def _work(
        self,
        comm: MPI.Intracomm,
        ranks: Sequence[int],
        action: Callable[[World], T],
        phase: str,
    ) -> T:
        import torch.distributed as dist

        watched = self._guard.watched
        part = part_of(self._world, ranks)
        with as_world(comm):
            wait_for_all(comm)
            started = time.perf_counter()
            self._join(part)
            self.making_seconds.append(time.perf_counter() - started)
            if watched is not None:
                watched.expect_steps(phase)
            result = action(part)
            wait_for_all(comm)
            dist.destroy_process_group()
            forget_groups()
        return result

    def _join(self, world: World) -> None:
        from torch._C._distributed_c10d import PrefixStore

        assert self._guard.store is not None  # the start has opened it
        name = f"mpitrain/part/{self._number}/{world.world_size}"
        store = PrefixStore(name, self._guard.store)
        start.join(self._guard, world, self._timeout_seconds, store)

    def _sleep(self) -> None:
        watched = self._guard.watched
        began, cpu_began = time.perf_counter(), time.process_time()
        if watched is not None:
            watched.set_state(State.IDLE)
        wait_for_all(self._all)
        if watched is not None:
            watched.progress("awake again")
            watched.set_state(State.RUNNING)
        self.asleep_seconds += time.perf_counter() - began
        self.asleep_cpu_seconds += time.process_time() - cpu_began


def forget_groups() -> None:
    """Let torch forget process groups that are gone.

    What it has found out for sharded tensors it keeps by the shape of their mesh, with
    the names of that mesh's groups; and names are given anew (torch 2.15).
    """
    if "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor import _redistribute, debug

    clear: Any = debug._clear_sharding_prop_cache  # noqa: SLF001
    clear()
    _redistribute._gen_transform_infos.cache_clear()  # noqa: SLF001


def in_node_order(world: World) -> list[int]:
    """Return all ranks so that the first of them fill the first nodes.

    >>> two = (Node(hostname="a", ranks=(0, 2)), Node(hostname="b", ranks=(1, 3)))
    >>> in_node_order(
    ...     World(rank=3, world_size=4, local_rank=1, local_world_size=2, node_rank=1,
    ...           nodes=two)
    ... )
    [0, 2, 1, 3]
    """
    return [rank for node in world.nodes for rank in node.ranks]


def part_of(world: World, ranks: Sequence[int]) -> World:
    """Return where this process stands among some ranks; its device and threads stay.

    Args:
        world: Where it stands among all.
        ranks: Those of the part, in its order; this one among them.

    >>> two = (Node(hostname="a", ranks=(0, 2)), Node(hostname="b", ranks=(1, 3)))
    >>> whole = World(rank=1, world_size=4, local_rank=0, local_world_size=2,
    ...               node_rank=1, nodes=two)
    >>> part = part_of(whole, [0, 2, 1])
    >>> part.rank, part.world_size, part.local_world_size, part.num_nodes
    (2, 3, 1, 2)
    >>> [node.ranks for node in part.nodes]
    [(0, 1), (2,)]
    """
    nodes: list[Node] = []
    node_rank = local_rank = 0
    for node in world.nodes:
        kept = [at for at, rank in enumerate(node.ranks) if rank in ranks]
        if not kept:
            continue
        if world.rank in node.ranks:
            node_rank = len(nodes)
            local_rank = kept.index(node.ranks.index(world.rank))
        nodes.append(
            replace(
                node,
                ranks=tuple(ranks.index(node.ranks[at]) for at in kept),
                devices=tuple(node.devices[at] for at in kept if node.devices),
                gpus=tuple(node.gpus[at] for at in kept if node.gpus),
            )
        )
    return replace(
        world,
        rank=ranks.index(world.rank),
        world_size=len(ranks),
        local_rank=local_rank,
        local_world_size=len(nodes[node_rank].ranks),
        node_rank=node_rank,
        nodes=tuple(nodes),
    )
