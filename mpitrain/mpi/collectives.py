"""Collectives over MPI that sleep while they wait, and raise on all ranks or none.

A blocking call of MPI uses a whole core while it waits. So a collective begins here
with `barrier`, which sleeps between its tests; the blocking call after it finds all
ranks there.

all_or_none()    barrier, minimum of the ranks that failed; a text only if there is one
on_rank_zero()   all_or_none, then a broadcast of the result
merge_...()      barrier, then a reduction up a tree
"""

from __future__ import annotations

import contextlib
import math
import os
import pickle
import socket
import time
import traceback
import zlib
from array import array
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from mpitrain.errors import MpitrainError, RemoteError
from mpitrain.mpi.implementation import is_finalized, start_mpi
from mpitrain.mpi.world import rank_label

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")
K = TypeVar("K")
V = TypeVar("V")

SPIN_SECONDS = 0.0005  # how long a rank tests without sleeping
NUM_TAGS = 32768  # every MPI library has as many (MPI 4.1, 9.1.2)


class MpiProcess:
    """What this process has of MPI: its world, its waits, what MPI still uses."""

    def __init__(self) -> None:
        self.sub_worlds: list[MPI.Intracomm] = []  # the last one is the world now
        # The `SingleProcess` of a world of one without an MPI library.
        self.without_mpi: MPI.Intracomm | None = None
        self.cancel_checks: list[Callable[[], object]] = []
        self.abandoned: list[object] = []  # requests, with memory that they write to

    @contextlib.contextmanager
    def use_as_world(self, comm: MPI.Intracomm) -> Iterator[None]:
        """Let `world_comm` return `comm`, which includes this rank, in this block."""
        self.sub_worlds.append(comm)
        try:
            yield
        finally:
            self.sub_worlds.pop()

    @contextlib.contextmanager
    def cancel_waits_by(self, check: Callable[[], object]) -> Iterator[None]:
        """Call `check` again and again in waits for other ranks; it may raise.

        In every thread that waits, by MPI or in our backend; so `check` must be cheap.
        """
        self.cancel_checks.append(check)
        try:
            yield
        finally:
            self.cancel_checks.remove(check)


# The job's (`Job.mpi`). Module-level since MPI is one per process, and torch calls the
# backend without a job in hand, or where there is none.
MPI_PROCESS = MpiProcess()


def world_comm() -> MPI.Intracomm:
    """Return the ranks that make up the world now; starts MPI if need be."""
    if MPI_PROCESS.sub_worlds:
        return MPI_PROCESS.sub_worlds[-1]
    return MPI_PROCESS.without_mpi or start_mpi()


def raise_if_cancelled() -> None:
    """Raise what a check of `cancel_waits_by` raises; called in long waits."""
    for check in MPI_PROCESS.cancel_checks:
        check()


def abandon(request: MPI.Request | None, *memory: object) -> None:
    """Give up a request, and keep for ever the memory that MPI may still use."""
    if request:  # MPI.REQUEST_NULL is false: it is done
        MPI_PROCESS.abandoned.append((request, memory))


def num_abandoned() -> int:
    """Return how many requests MPI still has; their communicators stay."""
    return len(MPI_PROCESS.abandoned)


def barrier(comm: MPI.Intracomm, *, timeout_seconds: float | None = None) -> bool:
    """Wait, asleep, until every rank is here; return whether all came in time.

    Collective over `comm`. A blocking MPI call uses a whole core while it waits, and
    takes it from the ranks that it waits for where ranks share cores.
    """
    if is_finalized():
        return True  # MPI_Finalize, which a script called, has waited for all
    request = comm.Ibarrier()
    began = time.monotonic()
    end = math.inf if timeout_seconds is None else began + timeout_seconds
    pause_seconds = 0.0005
    while not request.Test():
        now = time.monotonic()
        if now > end:
            # MPI cannot take a barrier back: `comm` is of no use then. The callers that
            # have a timeout end the job.
            return False
        if now < began + SPIN_SECONDS:
            # Ranks that come at about the same time do not pay for a sleep.
            os.sched_yield()
            continue
        raise_if_cancelled()
        time.sleep(pause_seconds)
        pause_seconds = min(pause_seconds * 1.5, 0.02)
    return True


def all_or_none(comm: MPI.Intracomm, action: Callable[[], T], doing: str) -> T:
    """Do something local on every rank, and raise on every rank if it failed on one.

    Collective over `comm`; `action` must not communicate. ``doing`` is for the message,
    such as ``"import torch"``. Each rank that failed raises its own exception, the
    others a RemoteError; their `reporting_rank` is the lowest that failed.
    """
    error: Exception | None = None
    failure: tuple[int, str] | None = None
    try:
        result = action()
    # Not BaseException: Ctrl-C and sys.exit on one rank end the job by the exit guard.
    except Exception as raised:
        error = raised
        where = rank_label(comm.rank, comm.size, socket.gethostname())
        if isinstance(raised, MpitrainError):
            failure = (raised.exit_status, str(raised))
        else:
            text = "".join(traceback.format_exception_only(raised)).strip()
            failure = (1, f"could not {doing} on {where}: {text}")
    # Where no rank fails this one number is all that is sent.
    first = min_over_ranks(comm, comm.rank if failure else comm.size)
    if first == comm.size:
        return result
    found: tuple[int, str] = comm.bcast(failure, root=first)
    # Equal texts come from equal facts: then the message names no rank.
    is_collective = bool(min_over_ranks(comm, failure == found))
    if error is None:
        error = RemoteError(found[1])
        error.exit_status = found[0]
    with contextlib.suppress(Exception):  # a class that cannot be written to
        error.reporting_rank = first  # type: ignore[attr-defined]
        error.is_collective = is_collective  # type: ignore[attr-defined]
    raise error


def min_over_ranks(comm: MPI.Intracomm, number: int) -> int:
    """Return the minimum of all ranks' numbers, on every rank. Collective."""
    barrier(comm)  # Allreduce would wait awake
    if comm.size == 1:
        return number
    from mpi4py import MPI

    numbers = array("q", [number])
    comm.Allreduce(MPI.IN_PLACE, numbers, MPI.MIN)
    return numbers[0]


def merge_on_rank_zero(
    comm: MPI.Intracomm, mine: T, merge: Callable[[T, T], T]
) -> T | None:
    """Merge the values of all ranks, two by two; rank zero returns the result.

    Collective over `comm`. Up a tree: a rank receives at most log2(size) pickles, and
    what is equal on many ranks is merged on the way. `merge` may change its first
    argument; lower ranks come first.
    """
    barrier(comm)
    merged = comm.reduce(
        Compressed(mine), lambda one, two: Compressed(merge(one.value, two.value))
    )
    return merged.value if merged is not None else None


class Compressed(Generic[T]):
    """A value that is compressed where it is sent."""

    def __init__(self, value: T) -> None:
        self.value = value

    def __reduce__(self) -> tuple[Callable[[bytes], Compressed[T]], tuple[bytes]]:
        return _unpack, (zlib.compress(pickle.dumps(self.value), 1),)


# Another version's ranks read it by this name, before the start refuses them.
def _unpack(data: bytes) -> Compressed[Any]:
    return Compressed(pickle.loads(zlib.decompress(data)))


def merge_lists(left: dict[K, list[V]], right: dict[K, list[V]]) -> dict[K, list[V]]:
    """Merge dictionaries of lists, for `merge_on_rank_zero`."""
    for key, values in right.items():
        left.setdefault(key, []).extend(values)
    return left


def on_rank_zero(comm: MPI.Intracomm, action: Callable[[], T], doing: str) -> T:
    """Do something on rank zero alone and give its result to every rank.

    Collective over `comm`. The result is pickled and compressed. Where it fails every
    rank raises, as in `all_or_none`.
    """
    try:
        mine = all_or_none(comm, action if comm.rank == 0 else lambda: None, doing)
    except MpitrainError as error:
        error.is_collective = True  # rank zero did it for all, so none is named
        raise
    return comm.bcast(Compressed(mine)).value  # type: ignore[no-any-return]
