"""The collectives and messages of a group, by the names and lists that torch calls.

See torch 2.15, Backend.hpp. What can be refused is refused before the operation begins.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import AllgatherOptions, Backend

from mpitrain.mpi_backend.group import Group
from mpitrain.mpi_backend.reductions import reduction_of
from mpitrain.mpi_backend.tensors import (
    InHostMemory,
    check_alike,
    check_size,
    split_evenly,
    split_rows,
)
from mpitrain.mpi_backend.works import Operation, Together

Tensors = list[torch.Tensor]
Work = Operation | Together | None


class Operations(Backend):
    """What a group of ranks can do.

    Collective over the group, all that torch calls collectives.

    Args:
        group: The ranks and what they have in common.
    """

    def __init__(self, group: Group) -> None:
        super().__init__(group.rank, group.size)
        self._group = group
        self._together: list[Operation] | None = None
        self._num_collectives = 0

    # --- reductions -------------------------------------------------------------------

    def allreduce(self, tensors: Tensors, opts: dist.AllreduceOptions) -> Work:
        """Combine each tensor over all ranks, in place."""
        if tensors[0].is_sparse:
            return self.allreduce_sparse(tensors, opts)
        check_alike(tensors, "all_reduce")
        reduction = reduction_of(opts.reduceOp, tensors[0].dtype)
        host = InHostMemory(tensors)

        def action(deadline: float) -> None:
            for flat in host.flat:
                self._group.all_reduce(flat, reduction, deadline)
            host.write_back()

        return self._start(action, tensors, opts)

    def allreduce_coalesced(
        self, tensors: Tensors, opts: dist.AllreduceCoalescedOptions
    ) -> Work:
        """Combine many tensors over all ranks, in place, as if they were one."""
        check_alike(tensors, "all_reduce")
        reduction = reduction_of(opts.reduceOp, tensors[0].dtype)
        host = InHostMemory(tensors)

        def action(deadline: float) -> None:
            whole = torch.cat(host.flat)
            self._group.all_reduce(whole, reduction, deadline)
            parts = torch.split(whole, [flat.numel() for flat in host.flat])
            for flat, part in zip(host.flat, parts, strict=True):
                flat.copy_(part)
            host.write_back()

        return self._start(action, tensors, opts)

    def allreduce_sparse(self, tensors: Tensors, opts: dist.AllreduceOptions) -> Work:
        """Add sparse tensors over all ranks, in place."""
        (tensor,) = tensors
        if reduction_of(opts.reduceOp, tensor.dtype).name != "SUM":
            raise ValueError("mpi4py: sparse tensors can only be summed")
        own = tensor.coalesce()

        def action(deadline: float) -> None:
            total = self._group.add_sparse(own, deadline)
            tensor.copy_(total)

        return self._start(action, tensors, opts)

    def reduce(self, tensors: Tensors, opts: dist.ReduceOptions) -> Work:
        """Combine a tensor over all ranks into that of one."""
        reduction = reduction_of(opts.reduceOp, tensors[0].dtype)
        host, root = InHostMemory(tensors), opts.rootRank

        def action(deadline: float) -> None:
            self._group.reduce(host.flat[0], root, reduction, deadline)
            if self.rank() == root:
                host.write_back()

        return self._start(action, tensors, opts)

    def reduce_scatter(
        self,
        outputs: Tensors,
        inputs: list[Tensors],
        opts: dist.ReduceScatterOptions,
    ) -> Work:
        """Combine a list's tensors over all ranks; each rank keeps its own."""
        check_alike([*outputs, *inputs[0]], "reduce_scatter")
        reduction = reduction_of(opts.reduceOp, outputs[0].dtype)
        out, given = InHostMemory(outputs, read=False), InHostMemory(inputs[0])
        self._check_length(inputs[0], "reduce_scatter")
        check_size(outputs[0], inputs[0][self.rank()].numel(), "reduce_scatter")

        def action(deadline: float) -> None:
            self._group.reduce_scatter(out.flat[0], given.flat, reduction, deadline)
            out.write_back()

        return self._start(action, outputs, opts)

    def reduce_scatter_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: Any
    ) -> Work:
        """Combine a tensor over all ranks; each rank keeps its part."""
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: dist.ReduceScatterOptions
    ) -> Work:
        """Combine tensors over all ranks; each rank keeps its part of each."""
        check_alike([*outputs, *inputs], "reduce_scatter")
        reduction = reduction_of(opts.reduceOp, outputs[0].dtype)
        out, given = InHostMemory(outputs, read=False), InHostMemory(inputs)
        parts = [split_evenly(f, self.size(), "reduce_scatter") for f in given.flat]
        for output, of_ranks in zip(outputs, parts, strict=True):
            check_size(output, of_ranks[0].numel(), "reduce_scatter")

        def action(deadline: float) -> None:
            for flat, of_ranks in zip(out.flat, parts, strict=True):
                self._group.reduce_scatter(flat, of_ranks, reduction, deadline)
            out.write_back()

        return self._start(action, outputs, opts)

    # --- what is not changed on its way -----------------------------------------------

    def broadcast(self, tensors: Tensors, opts: dist.BroadcastOptions) -> Work:
        """Give all ranks the tensors of one."""
        root = opts.rootRank
        host = InHostMemory(tensors, read=self.rank() == root)

        def action(deadline: float) -> None:
            for flat in host.bytes:
                self._group.road.broadcast(flat, root, deadline)
            if self.rank() != root:
                host.write_back()

        return self._start(action, tensors, opts)

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> Work:
        """Give all ranks the tensors of all, as lists."""
        return self._all_gather(outputs, inputs, outputs[0], opts)

    def allgather_coalesced(
        self, outputs: list[Tensors], inputs: Tensors, opts: AllgatherOptions
    ) -> Work:
        """Give all ranks the tensors of all; the outer list is that of the ranks."""
        by_tensor = [list(tensors) for tensors in zip(*outputs, strict=True)]
        return self._all_gather(
            by_tensor, inputs, [t for tensors in outputs for t in tensors], opts
        )

    def all_gather_single(
        self, output: torch.Tensor, input: torch.Tensor, opts: AllgatherOptions
    ) -> Work:
        """Give all ranks the tensors of all, one behind the other."""
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: AllgatherOptions
    ) -> Work:
        """Give all ranks several tensors of all, each one behind the other."""
        out, given = InHostMemory(outputs, read=False), InHostMemory(inputs)
        parts = [split_evenly(f, self.size(), "all_gather") for f in out.bytes]

        def action(deadline: float) -> None:
            for of_ranks, flat in zip(parts, given.bytes, strict=True):
                self._group.road.all_gather(of_ranks, flat, deadline)
            out.write_back()

        return self._start(action, outputs, opts)

    def _all_gather(
        self, outputs: list[Tensors], inputs: Tensors, results: Tensors, opts: Any
    ) -> Work:
        for tensors in outputs:
            self._check_length(tensors, "all_gather")
        out, given = (
            [InHostMemory(tensors, read=False) for tensors in outputs],
            InHostMemory(inputs),
        )

        def action(deadline: float) -> None:
            for host, flat in zip(out, given.bytes, strict=True):
                self._group.road.all_gather(host.bytes, flat, deadline)
                host.write_back()

        return self._start(action, results, opts)

    def gather(
        self, outputs: list[Tensors], inputs: Tensors, opts: dist.GatherOptions
    ) -> Work:
        """Give one rank the tensors of all."""
        root, given = opts.rootRank, InHostMemory(inputs)
        is_root = self.rank() == root
        if is_root:
            self._check_length(outputs[0], "gather")
        out = InHostMemory(outputs[0], read=False) if is_root else None

        def action(deadline: float) -> None:
            found = out.bytes if out else None
            self._group.road.gather(found, given.bytes[0], root, deadline)
            if out:
                out.write_back()

        return self._start(action, outputs[0] if is_root else [], opts)

    def scatter(
        self, outputs: Tensors, inputs: list[Tensors], opts: dist.ScatterOptions
    ) -> Work:
        """Give each rank one tensor of a list that one rank has."""
        root, out = opts.rootRank, InHostMemory(outputs, read=False)
        is_root = self.rank() == root
        if is_root:
            self._check_length(inputs[0], "scatter")
        given = InHostMemory(inputs[0]) if is_root else None

        def action(deadline: float) -> None:
            parts = given.bytes if given else None
            self._group.road.scatter(out.bytes[0], parts, root, deadline)
            out.write_back()

        return self._start(action, outputs, opts)

    def alltoall(
        self, outputs: Tensors, inputs: Tensors, opts: dist.AllToAllOptions
    ) -> Work:
        """Give each rank the tensor that each other has for it."""
        self._check_length(inputs, "all_to_all")
        self._check_length(outputs, "all_to_all")
        out, given = InHostMemory(outputs, read=False), InHostMemory(inputs)

        def action(deadline: float) -> None:
            self._group.road.all_to_all(out.bytes, given.bytes, deadline)
            out.write_back()

        return self._start(action, outputs, opts)

    def all_to_all_single(
        self,
        output: torch.Tensor,
        input: torch.Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        opts: dist.AllToAllOptions,
    ) -> Work:
        """Give each rank the rows that each other has for it."""
        out, given = InHostMemory([output], read=False), InHostMemory([input])
        size = self.size()
        received = split_rows(out.flat[0], output.shape, output_sizes, size)
        sent = split_rows(given.flat[0], input.shape, input_sizes, size)

        def action(deadline: float) -> None:
            self._group.road.all_to_all(
                [part.view(torch.uint8) for part in received],
                [part.view(torch.uint8) for part in sent],
                deadline,
            )
            out.write_back()

        return self._start(action, [output], opts)

    # --- messages ---------------------------------------------------------------------

    def send(self, tensors: Tensors, to: int, tag: int) -> Work:
        """Send a tensor to one rank."""
        return self._collect(self._group.points.send(tensors[0], to, tag))

    def recv(self, tensors: Tensors, source: int, tag: int) -> Work:
        """Receive a tensor from one rank."""
        return self._collect(self._group.points.receive(tensors[0], source, tag))

    def recv_anysource(self, tensors: Tensors, tag: int) -> Work:
        """Receive a tensor from any rank."""
        return self._collect(self._group.points.receive(tensors[0], None, tag))

    # --- waiting ----------------------------------------------------------------------

    def barrier(self, opts: dist.BarrierOptions) -> Work:
        """Wait for all ranks."""
        return self._start(self._group.road.barrier, [], opts)

    def monitored_barrier(
        self, opts: dist.BarrierOptions, wait_all_ranks: bool = False
    ) -> None:
        """Wait for all ranks, and name those that do not come."""
        del wait_all_ranks  # all that are missing are named in any case
        seconds: float = opts.timeout.total_seconds()  # with 0, all must be there now
        self._group.line.do(self._group.road.barrier, seconds if seconds >= 0 else None)

    def _set_sequence_number_for_group(self) -> None:
        """Begin to count; all ranks count from 0."""

    def _get_sequence_number_for_group(self) -> int:
        """Return how many collectives were asked for; torch compares it over ranks."""
        return self._num_collectives

    def start_coalescing(self) -> None:
        """Make one work of all operations up to `end_coalescing`."""
        self._together = []

    def end_coalescing(self) -> Work:
        """Return the work of all operations since `start_coalescing`."""
        operations, self._together = self._together or [], None
        return Together(operations)

    def _start(
        self, action: Callable[[float], None], results: Tensors, opts: Any
    ) -> Work:
        """Do it now, or have it done, as torch wishes."""
        self._num_collectives += 1
        seconds = _seconds(opts)
        if opts.asyncOp or self._together is not None:
            return self._collect(self._group.line.add(action, results, seconds))
        self._group.line.do(action, seconds)
        return None

    def _collect(self, operation: Operation) -> Operation:
        if self._together is not None:
            self._together.append(operation)
        return operation

    def _check_length(self, tensors: Tensors, what: str) -> None:
        if len(tensors) != self.size():
            raise ValueError(
                f"mpi4py: {what}: {len(tensors)} tensors for {self.size()} ranks; "
                "expected one for each"
            )


def _seconds(opts: Any) -> float | None:
    """Return how long an operation may take; ``None`` where nobody said."""
    seconds: float = opts.timeout.total_seconds()
    return seconds if seconds > 0 else None
