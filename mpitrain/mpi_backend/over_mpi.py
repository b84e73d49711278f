"""Collectives through MPI: between nodes, and where ranks share no memory.

All are MPI's non-blocking ones, tested until they are done: a rank sleeps between
tests, and can give up. Large tensors are combined, and given to all, in chunks, some at
a time, so that one is combined while others are on their way. Bytes are carried as
bytes, in messages below 2 GiB, which every MPI can.

Collective over the communicator, all of them; `deadline` is on the monotonic clock;
they raise a GroupError where it passes.
"""

from __future__ import annotations

import collections
import json
import os
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from mpi4py import MPI

from mpitrain.mpi_backend.failures import GroupError
from mpitrain.mpi_backend.reductions import Reduction

MESSAGE_BYTES = 1 << 30
"""Most bytes of one message: counts of most MPI libraries have 31 bits."""

CHUNK_BYTES = 512 << 10
"""Of a tensor that is combined, or given to all."""

CHUNKS_AT_ONCE = 4

EAGER_SECONDS = 0.0005
"""How long a rank tests without sleeping."""

BUSY_SECONDS = 0.00005
"""A test that took longer has moved bytes, perhaps: who sleeps lets wires run dry."""

BUSY_EAGER_SECONDS = 0.1
"""How long a rank tests without sleeping where tests are busy; for each chunk anew."""

_SLEEP_SECONDS = (0.00002, 0.001)
"""Between two tests, the first and the longest."""

_TAG = 0
"""Of collectives; messages have others."""

_given_up: list[tuple[MPI.Request, object]] = []
"""What this process waits for no more, and its memory: MPI may still write into it."""


def wait(
    request: MPI.Request,
    memory: object,
    deadline: float,
    what: str,
    status: MPI.Status | None = None,
) -> None:
    """Wait for an operation of MPI.

    Args:
        request: It.
        memory: What it reads and writes.
        deadline: When to give up, on the monotonic clock.
        what: In words.
        status: Filled with what MPI says of it.

    Raises:
        GroupError: It was not done in time, or MPI says that it failed.
    """
    try:
        _test_until_done(request, deadline, what, status)
    except MPI.Exception as error:
        give_up(request, memory)
        raise GroupError(f"{what} failed: {error}") from error
    except BaseException:  # Ctrl-C, too
        give_up(request, memory)
        raise


def _test_until_done(
    request: MPI.Request, deadline: float, what: str, status: MPI.Status | None
) -> None:
    began = asked = time.monotonic()
    first, longest = _SLEEP_SECONDS
    pause_seconds = first
    while not request.Test(status):
        now = time.monotonic()
        if now > deadline:
            raise GroupError(f"{what} was not done before its timeout ended")
        is_busy = now > asked + BUSY_SECONDS
        if is_busy:
            pause_seconds = first
        if now < began + (BUSY_EAGER_SECONDS if is_busy else EAGER_SECONDS):
            os.sched_yield()
        else:
            time.sleep(pause_seconds)
            pause_seconds = min(pause_seconds * 1.5, longest)
        asked = time.monotonic()


def give_up(request: MPI.Request, memory: object) -> None:
    """Wait no more for an operation, and keep what it reads and writes."""
    if request != MPI.REQUEST_NULL:
        _given_up.append((request, memory))


def has_given_up() -> bool:
    """Whether MPI may still be busy with something: its communicator must stay."""
    return bool(_given_up)


def buffer(data: torch.Tensor) -> MPI.buffer:
    """Return a contiguous tensor's memory; the tensor must be kept for as long."""
    return MPI.buffer.fromaddress(
        data.data_ptr(), data.numel() * data.element_size(), readonly=False
    )


class OverMpi:
    """The collectives of one group.

    Args:
        comm: Its ranks; for these collectives alone.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm
        self.rank = comm.rank
        self.size = comm.size

    def barrier(self, deadline: float) -> None:
        """Wait for all."""
        wait(self.comm.Ibarrier(), None, deadline, "barrier")

    def tell_all(self, value: object, deadline: float) -> list[Any]:
        """Give every rank what each has, as far as JSON can carry it."""
        text = bytearray(json.dumps(value).encode())
        counts = torch.empty(self.size, dtype=torch.int64)
        own = torch.tensor([len(text)]).view(torch.uint8)
        self.all_gather(counts.view(torch.uint8).chunk(self.size), own, deadline)
        longest = int(counts.max())
        found = torch.empty(self.size, longest, dtype=torch.uint8)
        padded = torch.frombuffer(text.ljust(longest), dtype=torch.uint8)
        self.all_gather(found.unbind(0), padded, deadline)
        return [json.loads(bytes(row.tolist())) for row in found]

    # --- reductions -------------------------------------------------------------------

    def across(self, wide: torch.Tensor, reduction: Reduction, deadline: float) -> None:
        """Combine a tensor of every rank in place, without what comes at the end.

        Args:
            wide: Of the reduction's wide type, contiguous, ``(N,)``.
            reduction: How.
            deadline: When to give up.
        """
        datatype, operation = reduction.of_mpi()

        def start(chunk: torch.Tensor) -> MPI.Request:
            given = [buffer(chunk), chunk.numel(), datatype]
            return self.comm.Iallreduce(MPI.IN_PLACE, given, operation)

        self._some_at_a_time(start, wide, deadline, "all_reduce")

    def all_reduce(
        self, data: torch.Tensor, reduction: Reduction, world_size: int, deadline: float
    ) -> None:
        """Combine a tensor of every rank, in place; as `OnNode.all_reduce`."""
        wide = data.to(reduction.wide)
        self.across(wide, reduction, deadline)
        reduction.finish(wide, world_size)
        if wide is not data:
            data.copy_(wide)

    def reduce(
        self,
        data: torch.Tensor,
        root: int,
        reduction: Reduction,
        world_size: int,
        deadline: float,
    ) -> None:
        """Combine a tensor of every rank into that of one; the others' stay."""
        wide = data.to(reduction.wide, copy=True)
        datatype, operation = reduction.of_mpi()

        def start(chunk: torch.Tensor) -> MPI.Request:
            given = [buffer(chunk), chunk.numel(), datatype]
            if self.rank == root:
                return self.comm.Ireduce(MPI.IN_PLACE, given, operation, root)
            return self.comm.Ireduce(given, None, operation, root)

        self._some_at_a_time(start, wide, deadline, "reduce")
        if self.rank == root:
            reduction.finish(wide, world_size)
            data.copy_(wide)

    def reduce_scatter(
        self,
        out: torch.Tensor,
        inputs: Sequence[torch.Tensor],
        reduction: Reduction,
        deadline: float,
    ) -> None:
        """Combine, for every rank, the tensors that all others have for it.

        As `OnNode.reduce_scatter`. The tensors are exchanged and combined here, in the
        order of the ranks.
        """
        found = [torch.empty_like(out) for _ in inputs]
        self.all_to_all(
            [part.view(torch.uint8) for part in found],
            [part.view(torch.uint8) for part in inputs],
            deadline,
        )
        wide = torch.empty(out.shape, dtype=reduction.wide)
        reduction.combine(found, wide)
        reduction.finish(wide, self.size)
        out.copy_(wide)

    # --- what is not changed on its way -----------------------------------------------

    def broadcast(self, data: torch.Tensor, root: int, deadline: float) -> None:
        """Give every rank the bytes of one, ``uint8 (N,)``."""

        def start(chunk: torch.Tensor) -> MPI.Request:
            return self.comm.Ibcast(buffer(chunk), root)

        self._some_at_a_time(start, data, deadline, "broadcast")

    def all_gather(
        self, outputs: Sequence[torch.Tensor], data: torch.Tensor, deadline: float
    ) -> None:
        """Give every rank the bytes of all; ``uint8``, each of its own length."""
        sizes = [out.numel() for out in outputs]
        if len(set(sizes)) > 1 or sum(sizes) > MESSAGE_BYTES:
            self.all_to_all(outputs, [data] * self.size, deadline)
            return
        found = torch.empty(sum(sizes), dtype=torch.uint8)
        request = self.comm.Iallgather(buffer(data), buffer(found))
        wait(request, (data, found), deadline, "all_gather")
        for out, part in zip(outputs, torch.split(found, sizes), strict=True):
            out.copy_(part)

    def gather(
        self,
        outputs: Sequence[torch.Tensor] | None,
        data: torch.Tensor,
        root: int,
        deadline: float,
    ) -> None:
        """Give one rank the bytes of all, ``uint8 (N,)`` from each."""
        received = list(enumerate(outputs or ()))
        self._exchange(received, [(root, data)], deadline, "gather")

    def scatter(
        self,
        out: torch.Tensor,
        inputs: Sequence[torch.Tensor] | None,
        root: int,
        deadline: float,
    ) -> None:
        """Give every rank its bytes from one, ``uint8 (N,)`` to each."""
        sent = list(enumerate(inputs or ()))
        self._exchange([(root, out)], sent, deadline, "scatter")

    def all_to_all(
        self,
        outputs: Sequence[torch.Tensor],
        inputs: Sequence[torch.Tensor],
        deadline: float,
    ) -> None:
        """Give every rank the bytes that each other has for it; as `OnNode`'s."""
        received, sent = list(enumerate(outputs)), list(enumerate(inputs))
        self._exchange(received, sent, deadline, "all_to_all")

    def _some_at_a_time(
        self,
        start: Callable[[torch.Tensor], MPI.Request],
        data: torch.Tensor,
        deadline: float,
        what: str,
    ) -> None:
        """Start an operation for each chunk of a tensor, and wait for all."""
        going: collections.deque[tuple[MPI.Request, torch.Tensor]] = collections.deque()
        try:
            for chunk in _cut(data, CHUNK_BYTES):
                if len(going) == CHUNKS_AT_ONCE:
                    wait(*going.popleft(), deadline, what)
                going.append((start(chunk), chunk))
            while going:
                wait(*going.popleft(), deadline, what)
        except BaseException:
            for request, memory in going:
                give_up(request, memory)
            raise

    def _exchange(
        self,
        received: Sequence[tuple[int, torch.Tensor]],
        sent: Sequence[tuple[int, torch.Tensor]],
        deadline: float,
        what: str,
    ) -> None:
        """Receive from some ranks and send to some, all at once."""
        memory = [data for _, data in [*received, *sent]]
        requests = [*self._each(received, self.comm.Irecv)]
        requests += self._each(sent, self.comm.Isend)
        try:
            for request in requests:
                wait(request, memory, deadline, what)
        except BaseException:
            for request in requests:
                give_up(request, memory)
            raise

    def _each(
        self,
        tensors: Sequence[tuple[int, torch.Tensor]],
        start: Callable[..., MPI.Request],
    ) -> Iterator[MPI.Request]:
        # Beginning with the next rank, so that not all begin with rank zero.
        for rank, data in sorted(tensors, key=lambda t: (t[0] - self.rank) % self.size):
            for chunk in _cut(data, MESSAGE_BYTES):
                yield start(buffer(chunk), rank, _TAG)


def _cut(data: torch.Tensor, most_bytes: int) -> Iterator[torch.Tensor]:
    """Cut a tensor into chunks; nothing of an empty one."""
    step = most_bytes // data.element_size()
    for begin in range(0, data.numel(), step):
        yield data[begin : begin + step]
