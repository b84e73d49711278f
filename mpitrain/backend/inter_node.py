"""Collectives through MPI: between nodes, and where ranks share no memory.

All use MPI's non-blocking calls and test them until they are done: a rank sleeps
between tests, and can give up. Large tensors go in chunks, several at a time, so that
one is combined while others are on their way. Bytes go in messages below 2 GiB, which
every MPI library can count.

All methods are collective over the communicator. `deadline` is on the monotonic clock;
they raise a GroupError when it passes. Data that is not reduced is ``uint8 (N,)``.
"""

# ruff: noqa: D102 - the collectives are torch.distributed's

from __future__ import annotations

import collections
import os
import time
from collections.abc import Callable, Iterable, Iterator

import torch
from mpi4py import MPI
from torch import Tensor

from mpitrain.backend.op_queue import GroupError
from mpitrain.backend.reductions import Reduction
from mpitrain.backend.tensors import Tensors
from mpitrain.mpi.collectives import SPIN_SECONDS, abandon, raise_if_cancelled

MESSAGE_BYTES = 1 << 30  # largest message: counts of most MPI libraries have 31 bits
CHUNK_BYTES = 512 << 10  # of a tensor that is reduced or broadcast
CONCURRENT_CHUNKS = 4

BUSY_SECONDS = 0.00005  # a longer test moved data, which stalls where a rank sleeps
BUSY_SPIN_SECONDS = 0.1  # how long to test without sleep while tests are busy
_SLEEP_SECONDS = (0.00002, 0.001)  # between two tests, the first and the longest
_TAG = 0  # of collectives; p2p uses higher ones

Start = Callable[[Tensor], MPI.Request]  # starts an operation on a chunk
ByRank = Iterable[tuple[int, Tensor]]


def wait(
    request: MPI.Request,
    memory: object,
    deadline: float,
    name: str,
    status: MPI.Status | None = None,
) -> None:
    """Wait for a request, which reads and writes `memory`."""
    try:
        _test_until_done(request, deadline, name, status)
    except MPI.Exception as error:
        # MPI may still write there: the memory must outlive the request.
        abandon(request, memory)
        raise GroupError(f"{name} failed: {error}") from error
    except BaseException:  # Ctrl-C, too
        abandon(request, memory)
        raise


def _test_until_done(
    request: MPI.Request, deadline: float, name: str, status: MPI.Status | None
) -> None:
    began = tested = time.monotonic()
    first, longest = _SLEEP_SECONDS
    pause_seconds = first
    while not request.Test(status):
        now = time.monotonic()
        if now > deadline:
            raise GroupError(f"{name} was not done before its timeout ended")
        is_busy = now > tested + BUSY_SECONDS
        if is_busy:
            pause_seconds = first
        if now < began + (BUSY_SPIN_SECONDS if is_busy else SPIN_SECONDS):
            os.sched_yield()
        else:
            raise_if_cancelled()
            time.sleep(pause_seconds)
            pause_seconds = min(pause_seconds * 1.5, longest)
        tested = time.monotonic()


def as_mpi_buffer(data: Tensor) -> MPI.buffer:
    """Return a contiguous tensor's memory; the caller keeps the tensor."""
    # By its address, since numpy has no bfloat16.
    return MPI.buffer.fromaddress(
        data.data_ptr(), data.numel() * data.element_size(), readonly=False
    )


class MpiCollectives:
    """The collectives of one group; `comm` is for them alone."""

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm
        self.rank = comm.rank
        self.size = comm.size

    def barrier(self, deadline: float) -> None:
        wait(self.comm.Ibarrier(), None, deadline, "barrier")

    # --- reductions -------------------------------------------------------------------

    def all_reduce_wide(
        self, wide: Tensor, reduction: Reduction, deadline: float
    ) -> None:
        """Combine tensors of type `reduction.wide` in place, without `finish`."""
        datatype, operation = reduction.mpi_handles()

        def start(chunk: Tensor) -> MPI.Request:
            given = [as_mpi_buffer(chunk), chunk.numel(), datatype]
            return self.comm.Iallreduce(MPI.IN_PLACE, given, operation)

        self._in_chunks(start, wide, deadline, "all_reduce")

    def all_reduce(self, data: Tensor, reduction: Reduction, deadline: float) -> None:
        """Combine a tensor of every rank, in place; as `NodeCollectives.all_reduce`."""
        wide = data.to(reduction.wide)
        self.all_reduce_wide(wide, reduction, deadline)
        reduction.finish(wide)
        if wide is not data:
            data.copy_(wide)

    def reduce(
        self, data: Tensor, root: int, reduction: Reduction, deadline: float
    ) -> None:
        """Combine a tensor of every rank into that of `root`; the others are kept."""
        wide = data.to(reduction.wide, copy=True)
        datatype, operation = reduction.mpi_handles()

        def start(chunk: Tensor) -> MPI.Request:
            given = [as_mpi_buffer(chunk), chunk.numel(), datatype]
            if self.rank == root:
                return self.comm.Ireduce(MPI.IN_PLACE, given, operation, root)
            return self.comm.Ireduce(given, None, operation, root)

        self._in_chunks(start, wide, deadline, "reduce")
        if self.rank == root:
            reduction.finish(wide)
            data.copy_(wide)

    def reduce_scatter(
        self, out: Tensor, inputs: Tensors, reduction: Reduction, deadline: float
    ) -> None:
        """Combine, for every rank, the tensors that all have for it, in rank order."""
        parts = [torch.empty_like(out) for _ in inputs]
        self.all_to_all(
            [part.view(torch.uint8) for part in parts],
            [part.view(torch.uint8) for part in inputs],
            deadline,
        )
        wide = torch.empty(out.shape, dtype=reduction.wide)
        reduction.combine(parts, wide)
        reduction.finish(wide)
        out.copy_(wide)

    # --- bytes ------------------------------------------------------------------------

    def broadcast(self, data: Tensor, root: int, deadline: float) -> None:

        def start(chunk: Tensor) -> MPI.Request:
            return self.comm.Ibcast(as_mpi_buffer(chunk), root)

        self._in_chunks(start, data, deadline, "broadcast")

    def all_gather(self, outputs: Tensors, data: Tensor, deadline: float) -> None:
        """Give every rank the data of all; lengths may differ between ranks."""
        sizes = [out.numel() for out in outputs]
        # Iallgather wants equal lengths, and counts all of them in one number.
        if len(set(sizes)) > 1 or sum(sizes) > MESSAGE_BYTES:
            self.all_to_all(outputs, [data] * self.size, deadline)
            return
        found = torch.empty(sum(sizes), dtype=torch.uint8)
        request = self.comm.Iallgather(as_mpi_buffer(data), as_mpi_buffer(found))
        wait(request, (data, found), deadline, "all_gather")
        for out, part in zip(outputs, torch.split(found, sizes), strict=True):
            out.copy_(part)

    def gather(
        self, outputs: Tensors | None, data: Tensor, root: int, deadline: float
    ) -> None:
        self._exchange(enumerate(outputs or ()), [(root, data)], deadline, "gather")

    def scatter(
        self, out: Tensor, inputs: Tensors | None, root: int, deadline: float
    ) -> None:
        self._exchange([(root, out)], enumerate(inputs or ()), deadline, "scatter")

    def all_to_all(self, outputs: Tensors, inputs: Tensors, deadline: float) -> None:
        self._exchange(enumerate(outputs), enumerate(inputs), deadline, "all_to_all")

    def _in_chunks(
        self, start: Start, data: Tensor, deadline: float, name: str
    ) -> None:
        """Start an operation for each chunk of a tensor, and wait for all."""
        running = collections.deque[tuple[MPI.Request, Tensor]]()
        try:
            for chunk in _split(data, CHUNK_BYTES):
                if len(running) == CONCURRENT_CHUNKS:
                    wait(*running.popleft(), deadline, name)
                running.append((start(chunk), chunk))
            while running:
                wait(*running.popleft(), deadline, name)
        except BaseException:
            # `wait` has abandoned the one that failed.
            for request, memory in running:
                abandon(request, memory)
            raise

    def _exchange(
        self, outputs: ByRank, inputs: ByRank, deadline: float, name: str
    ) -> None:
        received, sent = list(outputs), list(inputs)
        memory = [data for _, data in [*received, *sent]]
        # Receives first: MPI copies a message that nobody has asked for yet.
        requests = [*self._start_each(received, self.comm.Irecv)]
        requests += self._start_each(sent, self.comm.Isend)
        try:
            for request in requests:
                wait(request, memory, deadline, name)
        except BaseException:
            for request in requests:
                abandon(request, memory)
            raise

    def _start_each(
        self, tensors: list[tuple[int, Tensor]], start: Callable[..., MPI.Request]
    ) -> Iterator[MPI.Request]:
        # From the next rank on, so that not all begin with rank zero.
        for rank, data in sorted(tensors, key=lambda t: (t[0] - self.rank) % self.size):
            for chunk in _split(data, MESSAGE_BYTES):
                yield start(as_mpi_buffer(chunk), rank, _TAG)


def _split(data: Tensor, max_bytes: int) -> Iterator[Tensor]:
    step = max_bytes // data.element_size()
    for begin in range(0, data.numel(), step):
        yield data[begin : begin + step]
