"""What the ranks of one torch group have in common."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any, cast

import torch
from mpi4py import MPI
from torch._C._distributed_c10d import Store

from mpitrain.mpi_backend.failures import GroupError
from mpitrain.mpi_backend.line import Line
from mpitrain.mpi_backend.on_node import OnNode
from mpitrain.mpi_backend.over_mpi import OverMpi, has_given_up
from mpitrain.mpi_backend.points import Points
from mpitrain.mpi_backend.reductions import Reduction
from mpitrain.mpi_backend.sharing import share_memory
from mpitrain.mpi_backend.tensors import in_line
from mpitrain.mpi_backend.whereabouts import tell
from mpitrain.topology import has_thread_multiple

SPINS = 200
"""How often a rank with a core of its own looks before it sleeps: some 0.1 ms, in which
it sees the others at once; to be woken costs some 50 us."""

logger = logging.getLogger("mpitrain")


class Group:
    """The ranks of one group: their communicator, their memory, their operations.

    Collective over `comm`.

    Args:
        comm: The ranks, in the group's order; freed by `close`.
        name: Torch's name of the group.
        ranks: Those of its members in the default group, for messages.
        timeout_seconds: How long an operation may take.
        store: Torch's of this group, to say who is missing.

    Attributes:
        road: By which bytes go: shared memory where all ranks are on one node.
        line: The order of operations.
        points: Messages between two ranks.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        name: str,
        ranks: Sequence[int],
        timeout_seconds: float,
        store: Store,
    ) -> None:
        self.comm = comm
        self.rank: int = comm.rank
        self.size: int = comm.size
        self.name = name
        has_threads = has_thread_multiple()
        if not has_threads and self.rank == 0:
            logger.warning(
                "MPI was started without MPI_THREAD_MULTIPLE: asynchronous operations "
                "are done where they are asked for"
            )
        self._mpi = OverMpi(comm)
        self.line = Line(
            f"group {name}",
            timeout_seconds,
            has_thread=has_threads,
            on_failure=self._say_what_failed,
        )
        self._store = store
        self._names = names = [f"rank {rank}" for rank in ranks]
        self.points = Points(comm, names, timeout_seconds, has_thread=has_threads)
        self._across: OverMpi | None = None
        self._node = self._share_memory(names, timeout_seconds)
        is_one_node = self._node is not None and self._node.size == self.size
        self.road: OnNode | OverMpi = self._mpi
        if self._node is not None and is_one_node:
            self.road = self._node

    def _share_memory(self, names: list[str], seconds: float) -> OnNode | None:
        """Make the nodes' boards, and join those ranks that reduce over nodes.

        Collective over the group.

        Returns:
            What ranks of a node do together; ``None`` on every rank where some node has
            no memory to share, or no node has two ranks.
        """
        deadline = time.monotonic() + seconds

        def tell_all(value: object) -> list[Any]:
            return self._mpi.tell_all(value, deadline)

        shared = share_memory(tell_all, self.rank, names, logger.warning)
        if shared is None:
            return None
        board = shared.board
        # A rank without a core of its own would take it from those it waits for.
        board.spins = SPINS if shared.num_cores >= board.size else 2
        if len(shared.sizes) == 1:
            return OnNode(board)
        num_pieces = min(shared.sizes)
        reduces = board.local_rank < num_pieces
        color = board.local_rank if reduces else MPI.UNDEFINED
        joined = cast("MPI.Intracomm", self.comm.Split(color, key=self.rank))
        across = None
        if joined != MPI.COMM_NULL:
            self._across = OverMpi(joined)
            across = self._across.across
        return OnNode(board, num_pieces=num_pieces, across=across)

    def all_reduce(
        self, flat: torch.Tensor, reduction: Reduction, deadline: float
    ) -> None:
        """Combine a tensor over all ranks, in place; ``(N,)``.

        Collective over the group.
        """
        reduction.prepare(flat)
        road = self._node or self._mpi
        road.all_reduce(flat, reduction, self.size, deadline)

    def reduce(
        self, flat: torch.Tensor, root: int, reduction: Reduction, deadline: float
    ) -> None:
        """Combine a tensor over all ranks into that of one; ``(N,)``.

        Collective over the group.
        """
        if reduction.factor is not None:
            own = flat.clone()
            reduction.prepare(own)
            self.road.reduce(own, root, reduction, self.size, deadline)
            if self.rank == root:
                flat.copy_(own)
        else:
            self.road.reduce(flat, root, reduction, self.size, deadline)

    def reduce_scatter(
        self,
        out: torch.Tensor,
        inputs: Sequence[torch.Tensor],
        reduction: Reduction,
        deadline: float,
    ) -> None:
        """Combine, for every rank, the tensors that all others have for it.

        Collective over the group.
        """
        if reduction.factor is not None:
            inputs = [part.clone() for part in inputs]
            for part in inputs:
                reduction.prepare(part)
        self.road.reduce_scatter(out, inputs, reduction, deadline)

    def add_sparse(self, own: torch.Tensor, deadline: float) -> torch.Tensor:
        """Return the sum of a sparse tensor over all ranks.

        Collective over the group.
        """
        indices, values = own.indices().contiguous(), own.values().contiguous()
        counts = torch.empty(self.size, dtype=torch.int64)
        self.road.all_gather(
            list(counts.view(torch.uint8).chunk(self.size)),
            torch.tensor([indices.shape[1]]).view(torch.uint8),
            deadline,
        )
        found = []
        for part in (indices.t().contiguous(), values):
            parts = [part.new_empty((n, *part.shape[1:])) for n in counts.tolist()]
            self.road.all_gather(
                [in_line(one).view(torch.uint8) for one in parts],
                in_line(part).view(torch.uint8),
                deadline,
            )
            found.append(torch.cat(parts))
        total = torch.sparse_coo_tensor(
            found[0].t(), found[1], own.shape, check_invariants=True
        )
        return total.coalesce()

    def _say_what_failed(self, error: BaseException, number: int) -> str:
        """Tell the others; return what they say, where MPI does not know them."""
        why = str(error) or type(error).__name__
        if self._node is not None:
            self._node.board.leave(why)
        if self.road is self._node or not isinstance(error, GroupError):
            return ""
        where = f"operation {number} of the group: {why.splitlines()[0]}"
        return tell(self._store, self.rank, self._names, where)

    @property
    def timeout_seconds(self) -> float:
        """How long an operation may take."""
        return self.line.timeout_seconds

    def set_timeout(self, seconds: float) -> None:
        """Set how long an operation may take."""
        self.line.timeout_seconds = self.points.timeout_seconds = seconds

    def close(self) -> None:
        """Finish what was asked for, in a moment, and free communicators and memory.

        What is not done by then keeps them: others may never come for it.
        """
        if self.line.close():
            self.abandon()

    def abandon(self) -> None:
        """Free memory and communicators; waits for nobody.

        MPI calls `Free` collective; Open MPI and MPICH do it without others.
        """
        self.line.leave()
        self.line.end()
        self._node = None
        self.road = self._mpi
        if has_given_up():
            return  # MPI may not be done with them
        comms = [self.comm, *([self._across.comm] if self._across else [])]
        for comm in comms:
            if comm != MPI.COMM_NULL and not MPI.Is_finalized():
                comm.Free()
