"""The state of one process group: its communicator, transport, queue and messages."""

from __future__ import annotations

import logging
import zlib
from collections.abc import Sequence
from typing import cast

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor

from mpitrain.backend.desync_report import desync_report
from mpitrain.backend.inter_node import MpiCollectives
from mpitrain.backend.on_node import NodeCollectives
from mpitrain.backend.op_queue import GroupError, OpQueue
from mpitrain.backend.p2p import P2P
from mpitrain.backend.shared_buffer import create_shared_buffer
from mpitrain.backend.tensors import flatten
from mpitrain.errors import TopologyError
from mpitrain.mpi.collectives import NUM_TAGS, num_abandoned, world_comm
from mpitrain.mpi.implementation import has_thread_multiple
from mpitrain.torch_compat import Store

logger = logging.getLogger("mpitrain")


class Group:
    """The ranks of one group. Creating it is collective over `comm`, which it frees.

    `ranks` are its members in the default group. `transport` is shared memory if all
    are on one node, or else MPI; `all_reduce_transport` may join both.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        name: str,
        ranks: Sequence[int],
        timeout_seconds: float,
        store: Store,
    ) -> None:
        self.rank: int = comm.rank
        self.size: int = comm.size
        self.name = name
        has_threads = has_thread_multiple()
        if not has_threads and self.rank == 0:
            logger.warning(
                "MPI was started without MPI_THREAD_MULTIPLE: asynchronous operations "
                "block until they are done"
            )
        self.comm = comm
        self._comms = [comm]
        self._num_abandoned = num_abandoned()
        self._mpi = MpiCollectives(comm)
        self.queue = OpQueue(
            f"group {name}",
            timeout_seconds,
            has_thread=has_threads,
            on_failure=self._on_failure,
        )
        self._store = store
        self._names = [f"rank {rank}" for rank in ranks]
        self.p2p = P2P(comm, self._names, has_thread=has_threads)
        self._node = self._create_node_collectives(comm)
        self.transport: NodeCollectives | MpiCollectives = self._mpi
        if self._node is not None and self._node.size == self.size:
            self.transport = self._node
        self.all_reduce_transport = self._node or self._mpi

    def _create_node_collectives(self, comm: MPI.Intracomm) -> NodeCollectives | None:
        """Create the nodes' shared memory; ``None`` on every rank: use MPI alone."""
        memory = create_shared_buffer(
            comm.allgather, self.rank, self._names, logger.warning
        )
        if memory is None:
            return None
        buffer, node_sizes = memory
        if len(node_sizes) == 1:
            return NodeCollectives(buffer)
        # The nth reducer of each node combines the same piece of a tensor: there are as
        # many as the smallest node has ranks.
        num_reducers = min(node_sizes)
        is_reducer = buffer.local_rank < num_reducers
        color = buffer.local_rank if is_reducer else MPI.UNDEFINED
        # All ranks call it, those without a part too: a split is collective.
        reducers = cast("MPI.Intracomm", comm.Split(color, key=self.rank))
        inter_node_reduce = None
        if reducers != MPI.COMM_NULL:
            self._comms.append(reducers)
            inter_node_reduce = MpiCollectives(reducers).all_reduce_wide
        return NodeCollectives(
            buffer, num_reducers=num_reducers, inter_node_reduce=inter_node_reduce
        )

    def all_reduce_sparse(self, given: Tensor, deadline: float) -> Tensor:
        """Return the sum of a coalesced sparse tensor over all ranks."""
        indices, values = given.indices().contiguous(), given.values().contiguous()
        counts = torch.empty(self.size, dtype=torch.int64)
        self.transport.all_gather(
            list(counts.view(torch.uint8).chunk(self.size)),
            torch.tensor([indices.shape[1]]).view(torch.uint8),
            deadline,
        )
        found = []
        for part in (indices.t().contiguous(), values):
            parts = [part.new_empty((n, *part.shape[1:])) for n in counts.tolist()]
            self.transport.all_gather(
                [flatten(one).view(torch.uint8) for one in parts],
                flatten(part).view(torch.uint8),
                deadline,
            )
            found.append(torch.cat(parts))
        total = torch.sparse_coo_tensor(
            found[0].t(), found[1], given.shape, check_invariants=True
        )
        return total.coalesce()

    def _on_failure(self, error: BaseException, number: int) -> str:
        """Tell the others of the node; between nodes return the ranks' positions."""
        text = str(error) or type(error).__name__
        if self._node is not None:
            self._node.buffer.mark_failed(text)
        # On one node the buffer's error names the ranks that are missing already.
        if self.transport is self._node or not isinstance(error, GroupError):
            return ""
        position = f"operation {number} of the group: {text.splitlines()[0]}"
        return desync_report(self._store, self.rank, self._names, position)

    def close(self) -> None:
        """Finish submitted operations within `CLOSE_SECONDS`, and free everything."""
        # A thread that is still in an operation uses the memory and communicators.
        if self.queue.close():
            self.abort()

    def abort(self) -> None:
        """Free memory and communicators without waiting for anybody.

        MPI calls `Free` collective; Open MPI and MPICH do it without the others.
        """
        self.queue.abort()
        self._node = None
        self.transport = self.all_reduce_transport = self._mpi
        if num_abandoned() > self._num_abandoned:
            return  # MPI may still use the communicators
        for comm in self._comms:
            if comm != MPI.COMM_NULL and not MPI.Is_finalized():
                comm.Free()


def default_communicator(rank: int, size: int) -> MPI.Intracomm:
    """Create the communicator of the default group. Collective over all ranks."""
    world = world_comm()
    if world.size != size:
        raise TopologyError(
            f"torch.distributed was told of {size} ranks, MPI knows {world.size}.\n"
            "Expected the mpi4py backend in a program that mpirun has started, with a "
            "group of all its ranks: mpirun -np 4 python -m mpitrain run script.py"
        )
    comm = cast("MPI.Intracomm", world.Split(0, key=rank))
    ranks = comm.allgather(rank)
    if ranks != list(range(size)):
        comm.Free()
        raise TopologyError(
            f"torch.distributed was told that the ranks are {sorted(ranks)}; expected "
            f"each of 0 to {size - 1} once. Look at the variable RANK on each."
        )
    return comm


def subgroup_communicator(
    default: MPI.Intracomm | None, ranks: Sequence[int], name: str
) -> MPI.Intracomm:
    """Create the communicator of some ranks of the default group.

    Collective over these ranks alone; the name separates groups created at one time.
    `default` is the default group's, ``None`` where that has another backend.
    """
    if default is None:
        default = world_comm()
        in_torch = dist.get_rank(), dist.get_world_size()
        in_mpi = default.rank, default.size
        if in_torch != in_mpi:
            raise TopologyError(
                f"torch.distributed was told that this is rank {in_torch[0]} of "
                f"{in_torch[1]}, MPI knows it as rank {in_mpi[0]} of {in_mpi[1]}.\n"
                "Expected both to be equal: "
                "mpirun -np 4 python -m mpitrain run script.py"
            )
    members = default.Get_group().Incl(list(ranks))
    try:
        # Not `hash`: that of a text differs between processes.
        return default.Create_group(members, tag=zlib.crc32(name.encode()) % NUM_TAGS)
    finally:
        members.Free()
