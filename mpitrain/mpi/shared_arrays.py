"""Collectives for reading files, and arrays that the ranks of a node share.

Rank zero reads an array and sends it to one rank of each node; all ranks of the node
map it: a file in memory without a name (memfd_create), so that nothing is left of it
however its ranks end (docs/decisions/0008 says why it is no MPI window).
"""

from __future__ import annotations

import logging
import mmap
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
import numpy.typing as npt

from mpitrain.errors import DataError, MpitrainError
from mpitrain.mpi.collectives import all_or_none, barrier, on_rank_zero, world_comm
from mpitrain.mpi.shared_memory import share_memory
from mpitrain.mpi.world import World, list_hosts

if TYPE_CHECKING:
    from mpi4py import MPI

logger = logging.getLogger("mpitrain")

T = TypeVar("T")

Array = npt.NDArray[Any]

CHUNK_BYTES = 256 << 20  # sent at once between nodes


def refuse_differences(
    of_ranks: Mapping[int, str],
    what: str,
    expected: str = "Expected the same on every rank",
    kind: type[MpitrainError] = DataError,
) -> None:
    """Raise an error for the first rank that has something else than the lowest one."""
    first = next(iter(of_ranks))
    for rank, found in of_ranks.items():
        if found != of_ranks[first]:
            raise kind(
                f"{what} differs between ranks: {of_ranks[first]} on rank {first}, "
                f"{found} on rank {rank}.\n{expected}"
            ).on_all_ranks()


class Communicator:
    """The ranks of a job. All methods are collective over them."""

    def __init__(self, comm: MPI.Intracomm, world: World) -> None:
        self._comm = comm
        self._world = world

    def on_rank_zero(self, action: Callable[[], T], doing: str) -> T:
        """Return rank zero's (small) result of `action` on every rank."""
        return on_rank_zero(self._comm, action, doing)

    def allgather(self, mine: T) -> list[T]:
        """Return the objects of all ranks, by rank."""
        barrier(self._comm)  # asleep, where others are still busy
        return self._comm.allgather(mine)

    def gather(self, mine: T) -> list[T]:
        """Return the objects of all ranks on rank zero, nothing on the others."""
        barrier(self._comm)
        return self._comm.gather(mine) or []

    def load_shared(
        self, make: Callable[[], Mapping[str, Array]], doing: str
    ) -> dict[str, Array]:
        """Make arrays on rank zero and hold them once per node, for reading only."""
        made: dict[str, Array] = {}

        def outline() -> list[tuple[str, str, tuple[int, ...]]]:
            for name, array in make().items():
                made[name] = np.asarray(array, order="C")
            return [(name, a.dtype.str, a.shape) for name, a in made.items()]

        outlines = on_rank_zero(self._comm, outline, doing)
        shared: dict[str, Array] = {}
        reasons: list[str] = []
        for name, dtype, shape in outlines:
            num_bytes = int(np.dtype(dtype).itemsize * np.prod(shape, dtype=np.int64))
            # An empty array, too: a file of no bytes cannot be mapped.
            memory, is_first, reason = self._memory(max(num_bytes, 1))
            reasons += filter(None, [reason])
            buffer = np.frombuffer(memory, np.uint8, num_bytes)
            shared[name] = buffer.view(dtype).reshape(shape)
            if made:
                shared[name][...] = made[name]
            self._send_to_nodes(buffer, is_first)
        if reasons and self._world.is_rank_zero:
            logger.warning(
                "no shared memory for the data set (%s): each rank of that node holds "
                "a copy of its own",
                reasons[0],
            )
        return shared

    def check_same_on_nodes(self, look: Callable[[], str], what: str) -> None:
        """Refuse files that differ between nodes, by what one rank of each sees."""
        world = self._world
        if world.num_nodes == 1:
            return
        is_first = world.local_rank == 0
        seen = all_or_none(self._comm, lambda: look() if is_first else "", "compare")
        found: list[str] = self._comm.allgather(seen)
        strange = [n.hostname for n in world.nodes if found[n.ranks[0]] != found[0]]
        if strange:
            raise DataError(
                f"{what} are not the same on all nodes: {list_hosts(strange)} "
                f"{'sees' if len(strange) == 1 else 'see'} others than "
                f"{world.nodes[0].hostname}.\nExpected the same names and sizes: "
                "name a folder that all nodes share, or copy it to each"
            ).on_all_ranks()

    def check_equal(self, seen: str, what: str, expected: str) -> None:
        """Refuse what differs between ranks."""
        refuse_differences(dict(enumerate(self.allgather(seen))), what, expected)

    def once_per_node(self, action: Callable[[], object], doing: str) -> None:
        """Do something on rank zero, then on one rank of each other node.

        So that these find what rank zero has downloaded, if they share its folder.
        """
        is_first = self._world.local_rank == 0
        for does in (self._comm.rank == 0, is_first and self._comm.rank > 0):
            all_or_none(self._comm, action if does else lambda: None, doing)

    def _memory(self, num_bytes: int) -> tuple[mmap.mmap, bool, str]:
        """Map memory that the ranks of a node share; return it and whether to fill it.

        The third is why some node has no room: there each rank has memory of its own.
        """
        world, comm = self._world, self._comm
        here = world.nodes[world.node_rank].ranks
        memory, errors = share_memory(
            *(comm.allgather, comm.rank, here, num_bytes, "mpitrain-data"),
            is_allocated=True,
        )
        failed = next((rank for rank, error in enumerate(errors) if error), None)
        reason = ""
        if failed is not None:
            reason = f"{world.host_of(failed)}: {errors[failed]}"
        # One rank without it, and the whole node does without: each gets the bytes.
        if memory is None or any(errors[rank] for rank in here):
            return mmap.mmap(-1, num_bytes), True, reason
        return memory, comm.rank == here[0], reason

    def _send_to_nodes(self, buffer: Array, is_first: bool) -> None:
        """Send rank zero's bytes to the first rank of each block of memory."""
        comm = self._comm
        between = comm.Split(0 if is_first else 1, comm.rank)
        try:
            if is_first and between.size > 1:
                for start in range(0, len(buffer), CHUNK_BYTES):
                    between.Bcast(buffer[start : start + CHUNK_BYTES])
        finally:
            between.Free()
        barrier(comm)  # no rank reads before its node has the bytes


def communicator(world: World) -> Communicator:
    """Return all ranks that make up the world now; MPI has started."""
    return Communicator(world_comm(), world)
