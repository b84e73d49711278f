"""The backend's methods as torch calls them.

Torch calls them by name, some in camel case (torch 2.15: Backend.hpp, PyBackend.hpp),
and documents what they do. Arguments that cannot work are refused before the operation
starts.
"""

# ruff: noqa: D102

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from mpi4py import MPI
from torch import Tensor

from mpitrain.backend.desync_report import connect
from mpitrain.backend.group import Group, default_communicator, subgroup_communicator
from mpitrain.backend.op_queue import CoalescedWork, PendingWork
from mpitrain.backend.reductions import Reduction, reduction_of
from mpitrain.backend.tensors import (
    HostTensors,
    Tensors,
    check_numel,
    check_one_dtype,
    split_evenly,
    split_rows,
)
from mpitrain.torch_compat import (
    AllgatherOptions,
    Backend,
    DistributedBackendOptions,
    PrefixStore,
    Store,
    foreach_copy,
    options_timeout,
    set_options_timeout,
)

NAME = "mpi4py"  # of the backend; ``mpi`` is torch's own

Work = PendingWork | CoalescedWork | None

# Module-level: with TORCH_DISTRIBUTED_DEBUG=DETAIL torch wraps a backend and keeps its
# C++ half alone (torch 2.15); without the Python half every method would be missing.
_alive: set[MpiBackend] = set()


class MpiBackend(Backend):
    """The backend of one group; its operations are collective over its ranks."""

    def __init__(
        self, group: Group, options: Backend.Options, store: Store, *, is_default: bool
    ) -> None:
        super().__init__(group.rank, group.size)
        self.is_default = is_default
        self._group = group
        self._options = options
        self._store = store
        self._coalesced: list[PendingWork] | None = None
        self._num_collectives = 0
        _alive.add(self)

    @property
    def comm(self) -> MPI.Intracomm:
        """The communicator of the group, for creating others."""
        return self._group.comm

    # --- the backend ------------------------------------------------------------------

    def getBackendName(self) -> str:
        return NAME

    @property
    def options(self) -> Backend.Options:
        return self._options

    supports_splitting = True
    supports_coalescing = True
    supports_shrinking = False
    supports_reconfigure = False
    supports_window = False
    _supports_time_estimate = False

    def _set_sequence_number_for_group(self) -> None:
        pass  # all ranks count from 0

    def _get_sequence_number_for_group(self) -> int:
        return self._num_collectives  # torch compares it over ranks

    def set_timeout(self, timeout: timedelta) -> None:
        """Set how long an operation may take, from the next one on."""
        self._group.queue.timeout_seconds = timeout.total_seconds()

    def shutdown(self) -> None:
        """Finish submitted operations, in a moment, and free the communicators."""
        self._group.close()
        _alive.discard(self)

    def abort(self) -> None:
        """Free everything without waiting for others."""
        self._group.abort()
        _alive.discard(self)

    def eager_connect_single_device(self, device: torch.device | None) -> None:
        """Do nothing: all ranks of a group are connected."""

    def split(
        self, _: object, ranks: Sequence[int], options: Backend.Options | None
    ) -> MpiBackend | None:
        """Create a group of some of these ranks; return ``None`` on the others."""
        ranks = list(ranks)
        if self.rank() not in ranks:
            return None
        parents = list(self._options.global_ranks_in_group) or list(range(self.size()))
        if options is None:
            seconds = self._group.queue.timeout_seconds
            options = Backend.Options(NAME, timeout=timedelta(seconds=seconds))
        options.global_ranks_in_group = [parents[rank] for rank in ranks]
        name = options.group_name or f"{self._group.name} split"
        store, rank = PrefixStore(name, self._store), ranks.index(self.rank())
        return _connect(store, rank, options.global_ranks_in_group, name, options)

    # --- reductions -------------------------------------------------------------------

    def allreduce(self, tensors: Tensors, opts: dist.AllreduceOptions) -> Work:
        if tensors[0].is_sparse:
            return self.allreduce_sparse(tensors, opts)
        check_one_dtype(tensors, "all_reduce")
        reduction = self._reduction(opts, tensors[0])
        # Here, not in the queue's thread: a copy from a GPU must follow what is queued
        # on the caller's stream.
        host = HostTensors(tensors)

        def action(deadline: float) -> None:
            for flat in host.flat:
                self._all_reduce(flat, reduction, deadline)
            host.write_back()

        return self._start(action, tensors, opts)

    def allreduce_coalesced(
        self, tensors: Tensors, opts: dist.AllreduceCoalescedOptions
    ) -> Work:
        """All-reduce many tensors as if they were one."""
        check_one_dtype(tensors, "all_reduce")
        reduction = self._reduction(opts, tensors[0])
        host = HostTensors(tensors)

        def action(deadline: float) -> None:
            joined = torch.cat(host.flat)
            self._all_reduce(joined, reduction, deadline)
            parts = torch.split(joined, [flat.numel() for flat in host.flat])
            foreach_copy(host.flat, list(parts))  # all in one call
            host.write_back()

        return self._start(action, tensors, opts)

    def allreduce_sparse(self, tensors: Tensors, opts: dist.AllreduceOptions) -> Work:
        (tensor,) = tensors
        if self._reduction(opts, tensor).name != "SUM":
            raise ValueError("mpi4py: sparse tensors can only be summed")
        coalesced = tensor.coalesce()

        def action(deadline: float) -> None:
            tensor.copy_(self._group.all_reduce_sparse(coalesced, deadline))

        return self._start(action, tensors, opts)

    def reduce(self, tensors: Tensors, opts: dist.ReduceOptions) -> Work:
        reduction = self._reduction(opts, tensors[0])
        host, root = HostTensors(tensors), opts.rootRank
        (flat,) = host.flat

        def action(deadline: float) -> None:
            given = reduction.scaled(flat)
            self._group.transport.reduce(given, root, reduction, deadline)
            if self.rank() == root:
                if given is not flat:
                    flat.copy_(given)
                host.write_back()

        return self._start(action, tensors, opts)

    def reduce_scatter(
        self, outputs: Tensors, inputs: list[Tensors], opts: dist.ReduceScatterOptions
    ) -> Work:
        self._check_length(inputs[0], "reduce_scatter")
        parts = [HostTensors(inputs[0]).flat]
        return self._reduce_scatter(outputs, inputs[0], parts, opts)

    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any) -> Work:
        return self.reduce_scatter_single_coalesced([output], [input], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: dist.ReduceScatterOptions
    ) -> Work:
        flat = HostTensors(inputs).flat
        parts = [split_evenly(f, self.size(), "reduce_scatter") for f in flat]
        return self._reduce_scatter(outputs, inputs, parts, opts)

    def _reduce_scatter(
        self, outputs: Tensors, inputs: Tensors, parts: list[list[Tensor]], opts: Any
    ) -> Work:
        check_one_dtype([*outputs, *inputs], "reduce_scatter")
        reduction = self._reduction(opts, outputs[0])
        out = HostTensors(outputs, read=False)
        for output, by_rank in zip(outputs, parts, strict=True):
            check_numel(output, by_rank[self.rank()].numel(), "reduce_scatter")

        def action(deadline: float) -> None:
            for flat, by_rank in zip(out.flat, parts, strict=True):
                given = [reduction.scaled(part) for part in by_rank]
                self._group.transport.reduce_scatter(flat, given, reduction, deadline)
            out.write_back()

        return self._start(action, outputs, opts)

    def _all_reduce(self, flat: Tensor, reduction: Reduction, deadline: float) -> None:
        given = reduction.scaled(flat)
        self._group.all_reduce_transport.all_reduce(given, reduction, deadline)
        if given is not flat:
            flat.copy_(given)

    # --- bytes ------------------------------------------------------------------------

    def broadcast(self, tensors: Tensors, opts: dist.BroadcastOptions) -> Work:
        root = opts.rootRank
        host = HostTensors(tensors, read=self.rank() == root)

        def action(deadline: float) -> None:
            for flat in host.bytes:
                self._group.transport.broadcast(flat, root, deadline)
            if self.rank() != root:
                host.write_back()

        return self._start(action, tensors, opts)

    def allgather(self, outputs: list[Tensors], inputs: Tensors, opts: Any) -> Work:
        return self._all_gather(outputs, inputs, outputs[0], opts)

    def allgather_coalesced(
        self, outputs: list[Tensors], inputs: Tensors, opts: AllgatherOptions
    ) -> Work:
        """All-gather several tensors; the outer list is over ranks."""
        by_tensor: list[Tensors] = [list(row) for row in zip(*outputs, strict=True)]
        results = [tensor for tensors in outputs for tensor in tensors]
        return self._all_gather(by_tensor, inputs, results, opts)

    def _all_gather(
        self, outputs: list[Tensors], inputs: Tensors, results: Tensors, opts: Any
    ) -> Work:
        for tensors in outputs:
            self._check_length(tensors, "all_gather")
        out = [HostTensors(tensors, read=False) for tensors in outputs]
        given = HostTensors(inputs)

        def action(deadline: float) -> None:
            for host, flat in zip(out, given.bytes, strict=True):
                self._group.transport.all_gather(host.bytes, flat, deadline)
                host.write_back()

        return self._start(action, results, opts)

    def all_gather_single(
        self, output: Tensor, input: Tensor, opts: AllgatherOptions
    ) -> Work:
        return self.all_gather_single_coalesced([output], [input], opts)

    def all_gather_single_coalesced(
        self, outputs: Tensors, inputs: Tensors, opts: AllgatherOptions
    ) -> Work:
        out, given = HostTensors(outputs, read=False), HostTensors(inputs)
        parts = [split_evenly(f, self.size(), "all_gather") for f in out.bytes]

        def action(deadline: float) -> None:
            for by_rank, flat in zip(parts, given.bytes, strict=True):
                self._group.transport.all_gather(by_rank, flat, deadline)
            out.write_back()

        return self._start(action, outputs, opts)

    def gather(
        self, outputs: list[Tensors], inputs: Tensors, opts: dist.GatherOptions
    ) -> Work:
        root, given = opts.rootRank, HostTensors(inputs)
        is_root = self.rank() == root
        if is_root:
            self._check_length(outputs[0], "gather")
        out = HostTensors(outputs[0], read=False) if is_root else None

        def action(deadline: float) -> None:
            found = out.bytes if out else None
            self._group.transport.gather(found, given.bytes[0], root, deadline)
            if out:
                out.write_back()

        return self._start(action, outputs[0] if is_root else [], opts)

    def scatter(
        self, outputs: Tensors, inputs: list[Tensors], opts: dist.ScatterOptions
    ) -> Work:
        root, out = opts.rootRank, HostTensors(outputs, read=False)
        is_root = self.rank() == root
        if is_root:
            self._check_length(inputs[0], "scatter")
        given = HostTensors(inputs[0]) if is_root else None

        def action(deadline: float) -> None:
            parts = given.bytes if given else None
            self._group.transport.scatter(out.bytes[0], parts, root, deadline)
            out.write_back()

        return self._start(action, outputs, opts)

    def alltoall(
        self, outputs: Tensors, inputs: Tensors, opts: dist.AllToAllOptions
    ) -> Work:
        self._check_length(inputs, "all_to_all")
        self._check_length(outputs, "all_to_all")
        out, given = HostTensors(outputs, read=False), HostTensors(inputs)

        def action(deadline: float) -> None:
            self._group.transport.all_to_all(out.bytes, given.bytes, deadline)
            out.write_back()

        return self._start(action, outputs, opts)

    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_sizes: Sequence[int],
        input_sizes: Sequence[int],
        opts: dist.AllToAllOptions,
    ) -> Work:
        out, given = HostTensors([output], read=False), HostTensors([input])
        size = self.size()
        received = split_rows(out.flat[0], output.shape, output_sizes, size)
        sent = split_rows(given.flat[0], input.shape, input_sizes, size)

        def action(deadline: float) -> None:
            self._group.transport.all_to_all(
                [part.view(torch.uint8) for part in received],
                [part.view(torch.uint8) for part in sent],
                deadline,
            )
            out.write_back()

        return self._start(action, [output], opts)

    # --- messages, barriers, coalescing -----------------------------------------------

    def send(self, tensors: Tensors, to: int, tag: int) -> Work:
        seconds = self._group.queue.timeout_seconds
        return self._coalesce(self._group.p2p.send(tensors[0], to, tag, seconds))

    def recv_anysource(self, tensors: Tensors, tag: int) -> Work:
        return self.recv(tensors, None, tag)

    def recv(self, tensors: Tensors, source: int | None, tag: int) -> Work:
        seconds = self._group.queue.timeout_seconds
        return self._coalesce(self._group.p2p.receive(tensors[0], source, tag, seconds))

    def barrier(self, opts: dist.BarrierOptions) -> Work:
        return self._start(self._group.transport.barrier, [], opts)

    def monitored_barrier(
        self, opts: dist.BarrierOptions, wait_all_ranks: bool = False
    ) -> None:
        """Wait for all ranks, and name those that are missing."""
        del wait_all_ranks  # all that are missing are named in any case
        queue = self._group.queue
        seconds: float = opts.timeout.total_seconds()  # with 0, all must be there now
        seconds = seconds if seconds >= 0 else queue.timeout_seconds
        queue.run(self._group.transport.barrier, seconds)

    def start_coalescing(self) -> None:
        self._coalesced = []

    def end_coalescing(self) -> Work:
        works, self._coalesced = self._coalesced or [], None
        return CoalescedWork(works)

    def _start(
        self, action: Callable[[float], None], results: Tensors, opts: Any
    ) -> Work:
        self._num_collectives += 1
        queue = self._group.queue
        seconds: float = opts.timeout.total_seconds()
        if seconds <= 0:
            seconds = queue.timeout_seconds
        # A blocking call within a coalescing block, too, is a part of its work.
        if opts.asyncOp or self._coalesced is not None:
            return self._coalesce(queue.submit(action, results, seconds))
        queue.run(action, seconds)
        return None

    def _coalesce(self, work: PendingWork) -> PendingWork:
        if self._coalesced is not None:
            self._coalesced.append(work)
        return work

    def _reduction(self, opts: Any, tensor: Tensor) -> Reduction:
        return reduction_of(opts.reduceOp, tensor.dtype, self.size())

    def _check_length(self, tensors: Tensors, name: str) -> None:
        if len(tensors) != self.size():
            raise ValueError(
                f"mpi4py: {name}: {len(tensors)} tensors for {self.size()} ranks; "
                "expected one for each"
            )


def create(given: DistributedBackendOptions, options: object) -> MpiBackend:
    """Create the backend of a group, for torch. Collective over the group."""
    if not isinstance(options, Backend.Options):
        options = Backend.Options(NAME, timeout=given.timeout)
    set_options_timeout(options, given.timeout)
    options.global_ranks_in_group = given.global_ranks_in_group
    options.group_name = name = given.group_id
    ranks = list(given.global_ranks_in_group)
    # Torch lists no ranks for the default group.
    is_default = not ranks
    ranks = ranks or list(range(given.group_size))
    return _connect(given.store, given.group_rank, ranks, name, options, is_default)


def _connect(
    store: Store,
    rank: int,
    ranks: list[int],
    name: str,
    options: Backend.Options,
    is_default: bool = False,
) -> MpiBackend:
    """Create a backend once all its ranks have arrived. Collective over them."""
    seconds = options_timeout(options).total_seconds()
    # First: MPI's calls below cannot time out, and name nobody who is missing.
    connect(store, rank, ranks, name, seconds)
    if is_default:
        comm = default_communicator(rank, len(ranks))
    else:
        default = next((it.comm for it in _alive if it.is_default), None)
        comm = subgroup_communicator(default, ranks, name)
    group = Group(comm, name, ranks, seconds, store)
    return MpiBackend(group, options, store, is_default=is_default)
