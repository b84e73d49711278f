"""Memory shared by the ranks of one node, for one group: data slots and a barrier.

A rank writes its data into a slot, waits in the barrier, and reads what others wrote.
Each rank states its operation in the barrier, so that ranks in different operations get
an error that names them.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import os
import platform
import socket
import threading
import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor

from mpitrain.backend.op_queue import GroupError
from mpitrain.mpi.collectives import raise_if_cancelled
from mpitrain.mpi.shared_memory import share_memory
from mpitrain.mpi.topology import boot_id
from mpitrain.watchdog.process import is_gone

MAX_BUFFER_BYTES = 80 << 20  # for the ranks of a node, unless there are some 600
MAX_SLOT_BYTES = 4 << 20  # where ranks share cores: fewer barriers
MAX_SLOT_BYTES_IN_CACHE = 2 << 20  # where each rank has a core
MIN_SLOT_BYTES = 64 << 10
LIVENESS_SECONDS = 1.0  # how often a waiting rank looks whether the others live
# How often a rank with its own core polls before it sleeps: some 0.1 ms. A wake-up
# costs some 50 us.
MAX_SPINS = 200

_HALVES = 2
_HEADER_BYTES = 256  # of each rank's own header; ranks must not share a cache line
_FAILED = 3  # word of a header: whether its rank failed. Before: count, two codes
_TEXT_BYTES = 112
_TEXT_OFFSETS = (32, 32 + _TEXT_BYTES)  # at even and odd barriers
_MODULUS = 1 << 32
_MAX_CACHED_VIEWS = 64


class PeerGone(GroupError):
    """The process of a rank of the group has ended."""

    is_consequence = True


class OpSignature(NamedTuple):
    """An operation, which must be equal on all ranks: its text and a checksum of it."""

    text: bytes
    code: int


@functools.lru_cache(maxsize=1024)
def op_signature(name: str, *details: object) -> OpSignature:
    """Return the signature of an operation; `details` are its type, sizes, root."""
    text = " ".join([name, *map(str, details)]).encode()
    return OpSignature(_pad(text), zlib.crc32(text))


def _pad(text: bytes) -> bytes:
    return text[:_TEXT_BYTES].ljust(_TEXT_BYTES, b"\0")


class SharedBuffer:
    """Shared memory of the ranks of one node, for one group.

    Data goes into two halves in turn; a half may be overwritten after the barrier of
    the other one, since all ranks have read it by then. All ranks map `memory`, one
    file. `pids` are those of their processes; empty: whether they live is not known.
    """

    def __init__(
        self,
        memory: mmap.mmap,
        local_rank: int,
        names: list[str],
        pids: list[int],
        slot_bytes: int,
    ) -> None:
        self.size = size = len(names)
        self.local_rank = local_rank
        self.slot_bytes = slot_bytes
        self.max_spins = 0  # before a rank sleeps
        self._names = names
        self._pids = pids
        self._view = memoryview(memory)
        self._words = self._view[: (size + 1) * _HEADER_BYTES].cast("I")
        self._headers = [rank * _HEADER_BYTES // 4 for rank in range(size)]
        self._own_header = self._headers[local_rank]
        self._released = FutexWord(self._view, size * _HEADER_BYTES)
        self._fence = _memory_fence()
        self._count = 0
        self._half = 0
        whole = torch.frombuffer(
            memory,
            dtype=torch.uint8,
            count=_HALVES * (size + 1) * slot_bytes,
            offset=_data_offset(size),
        )
        halves = whole.view(_HALVES, size + 1, slot_bytes).unbind(0)
        self._whole = [half[:size].view(-1) for half in halves]
        self._slots = [half.unbind(0) for half in halves]
        self._typed: dict[tuple[int, torch.dtype, int], list[Tensor]] = {}

    def next_slots(self) -> Sequence[Tensor]:
        """Return where to write next: a slot of each rank, and one for a result."""
        self._half ^= 1
        return self._slots[self._half]

    def next_whole(self) -> Tensor:
        """Return where to write next: the slots of all ranks as one tensor."""
        self._half ^= 1
        return self._whole[self._half]

    def next_typed_slots(self, dtype: torch.dtype, count: int) -> list[Tensor]:
        """Return `next_slots` as tensors of `dtype`, ``(count,)``.

        Views are cached: to make one takes as long as to copy some kilobytes.
        """
        self._half ^= 1
        key = (self._half, dtype, count)
        found = self._typed.get(key)
        if found is None:
            if len(self._typed) >= _MAX_CACHED_VIEWS:
                self._typed.clear()
            length = count * dtype.itemsize
            found = [slot[:length].view(dtype) for slot in self._slots[self._half]]
            self._typed[key] = found
        return found

    def barrier(self, signature: OpSignature, deadline: float) -> None:
        """Wait until all ranks of the node have arrived. Collective over the node.

        Raises a GroupError if some did not arrive in time, have ended, or are in
        another operation; in the last case on every rank.
        """
        count = self._count = (self._count + 1) % _MODULUS
        parity = count & 1  # nobody is ahead by more than one barrier
        begin = self._own_header * 4 + _TEXT_OFFSETS[parity]
        self._view[begin : begin + _TEXT_BYTES] = signature.text
        self._words[self._own_header + 1 + parity] = signature.code
        # Whoever sees the count must see the text and the code.
        self._fence()
        self._words[self._own_header] = count
        # A processor may read before its write is seen: of the last two ranks, neither
        # might see the other, and both would sleep.
        self._fence()
        if self._all_arrived(count):
            # Several ranks may write it, all the same number: without this rank nobody
            # is in the next barrier.
            self._released.word.value = count
            self._released.wake()
        else:
            self._wait(count, deadline)
        # What others wrote before the barrier is read after it.
        self._fence()
        for header in self._headers:
            if self._words[header + 1 + parity] != signature.code:
                self._raise_mismatch(parity)

    def mark_failed(self, reason: str) -> None:
        """Tell the others that this rank comes to no more barriers."""
        parity = (self._words[self._own_header] + 1) & 1  # nobody compares that text
        begin = self._own_header * 4 + _TEXT_OFFSETS[parity]
        self._view[begin : begin + _TEXT_BYTES] = _pad(reason.encode())
        self._fence()
        self._words[self._own_header + _FAILED] = 1
        self._released.wake()

    def _all_arrived(self, count: int) -> bool:
        words = self._words
        return all((words[h] - count) % _MODULUS < _MODULUS // 2 for h in self._headers)

    def _is_released(self, count: int) -> bool:
        return (self._released.word.value - count) % _MODULUS < _MODULUS // 2

    def _wait(self, count: int, deadline: float) -> None:
        for _ in range(self.max_spins):
            if self._is_released(count):
                return
            os.sched_yield()
        check_at = time.monotonic() + LIVENESS_SECONDS
        while not self._is_released(count):
            # Read first: after a release from here on `sleep_while` returns at once.
            before = self._released.word.value
            if self._is_released(count):
                return
            now = time.monotonic()
            if self._all_arrived(count):  # two came at once and did not see each other
                self._released.word.value = count
                self._released.wake()
                return
            if now > deadline:
                self._raise_timeout(count)
            self._raise_if_failed(count, check_alive=now > check_at)
            if now > check_at:
                check_at = now + LIVENESS_SECONDS
            raise_if_cancelled()
            # Not for long: a rank that fails does not change this word, so that its
            # wake-up may be missed.
            self._released.sleep_while(before, min(0.1, max(deadline - now, 0.001)))

    def _missing(self, count: int) -> list[int]:
        behind = [(self._words[h] - count) % _MODULUS for h in self._headers]
        return [rank for rank, it in enumerate(behind) if it >= _MODULUS // 2]

    def _raise_timeout(self, count: int) -> NoReturn:
        missing = self._missing(count)
        raise GroupError(
            f"{', '.join(self._names[rank] for rank in missing)} did not arrive at "
            f"{self._text(self.local_rank)} before its timeout ended. Last operation: "
            + "; ".join(f"{self._names[r]}: {self._text(r)}" for r in missing)
        )

    def _raise_if_failed(self, count: int, *, check_alive: bool) -> None:
        for rank in self._missing(count):
            name, waiting = self._names[rank], self._text(self.local_rank)
            if self._words[self._headers[rank] + _FAILED]:
                parity = (self._words[self._headers[rank]] + 1) & 1
                raise GroupError(
                    f"{name} failed, while others wait for it in {waiting}: "
                    f"{self._text(rank, parity)}"
                )
            if check_alive and self._pids and is_gone(self._pids[rank]):
                raise PeerGone(
                    f"{name} is gone: its process {self._pids[rank]} has ended, while "
                    f"others wait for it in {waiting}"
                )

    def _raise_mismatch(self, parity: int) -> NoReturn:
        ranks: dict[str, list[str]] = {}
        for rank, name in enumerate(self._names):
            ranks.setdefault(self._text(rank, parity), []).append(name)
        raise GroupError(
            "the ranks are in different operations:\n"
            + "\n".join(f"  {', '.join(n)}: {text}" for text, n in ranks.items())
            + "\nExpected the same calls, with the same shapes and types, in the same "
            "order on all ranks of the group."
        )

    def _text(self, rank: int, parity: int | None = None) -> str:
        """Return a rank's operation; without `parity` the last one that it entered."""
        if parity is None:
            parity = self._words[self._headers[rank]] & 1
        begin = self._headers[rank] * 4 + _TEXT_OFFSETS[parity]
        text = bytes(self._view[begin : begin + _TEXT_BYTES]).rstrip(b"\0")
        return text.decode(errors="replace") or "no operation yet"


def buffer_bytes(size: int, slot_bytes: int) -> int:
    """Return how much memory a buffer of `size` ranks takes."""
    return _data_offset(size) + _HALVES * (size + 1) * slot_bytes


def _data_offset(size: int) -> int:
    """Return where the data begins: behind the headers, on a page."""
    headers = (size + 1) * _HEADER_BYTES
    return -(-headers // mmap.PAGESIZE) * mmap.PAGESIZE


def create_shared_buffer(
    allgather: Callable[[Any], list[Any]],
    rank: int,
    names: list[str],
    warn: Callable[[str], object],
) -> tuple[SharedBuffer, list[int]] | None:
    """Create the shared memory of every node. Collective over the group.

    Returns this node's, and the number of ranks on each node; ``None`` on every rank if
    some node has no memory, or no node has two ranks.
    """
    # One exchange: each rank decides by the same facts, and so alike.
    mine = (_machine_id(), os.getpid(), frozenset(os.sched_getaffinity(0)))
    machines, pids, cores = zip(*allgather(mine), strict=True)
    nodes: dict[tuple[str, ...], list[int]] = {}
    for other, machine in enumerate(machines):
        nodes.setdefault(machine, []).append(other)
    if max(map(len, nodes.values())) == 1:
        return None
    here = nodes[machines[rank]]

    def has_cores(ranks: Sequence[int]) -> bool:
        return len(frozenset[int]().union(*(cores[it] for it in ranks))) >= len(ranks)

    slots = {
        machine: choose_slot_bytes(
            len(ranks), MAX_SLOT_BYTES_IN_CACHE if has_cores(ranks) else MAX_SLOT_BYTES
        )
        for machine, ranks in nodes.items()
    }
    own_slot = slots[machines[rank]]
    # Not allocated now: most groups never use all of it.
    length = buffer_bytes(len(here), own_slot)
    memory, errors = share_memory(
        allgather, rank, here, length, "mpitrain-group", is_allocated=False
    )
    found = [errors[other] for other in here if errors[other]]
    if found and rank == here[0]:
        warn(
            f"no shared memory on {socket.gethostname()} ({found[0]}): its ranks "
            "communicate through MPI alone, which is slower for large tensors"
        )
    if memory is None or any(errors):
        return None
    local_names, local_pids = [names[it] for it in here], [pids[it] for it in here]
    buffer = SharedBuffer(memory, here.index(rank), local_names, local_pids, own_slot)
    # Chunks must be equal on all nodes, whose ranks may be more, or share cores.
    buffer.slot_bytes = min(slots.values())
    # A rank without its own core would take it from those it waits for.
    buffer.max_spins = MAX_SPINS if has_cores(here) else 2
    return buffer, [len(ranks) for ranks in nodes.values()]


def choose_slot_bytes(size: int, max_bytes: int = MAX_SLOT_BYTES) -> int:
    """Return the size of each rank's slot.

    >>> choose_slot_bytes(8) >> 10, choose_slot_bytes(64) >> 10
    (4096, 512)
    """
    slot_bytes = max_bytes
    while slot_bytes > MIN_SLOT_BYTES and (
        buffer_bytes(size, slot_bytes) > MAX_BUFFER_BYTES
    ):
        slot_bytes //= 2
    return slot_bytes


def _machine_id() -> tuple[str, ...]:
    """Return what is equal on ranks that see each other's files in /proc.

    Containers of one host may have a namespace of processes each; the boot id tells
    hosts apart.
    """
    try:
        namespace = os.readlink("/proc/self/ns/pid")  # noqa: PTH115
    except OSError:
        namespace = ""
    return socket.gethostname(), boot_id(), namespace


_FUTEX_CALL = {"x86_64": 202, "ppc64le": 221, "s390x": 238}.get(platform.machine(), 98)
"""Number of the system call; 98 in the kernel's generic table, such as on aarch64."""

# Without FUTEX_PRIVATE_FLAG, since several processes use the word.
_FUTEX_WAIT, _FUTEX_WAKE, _ALL_WAITERS = 0, 1, 0x7FFFFFFF


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class FutexWord:
    """A 32-bit word of shared memory on which processes sleep (futex(2)).

    A rank that spins would take the core from the rank it waits for.
    """

    def __init__(self, memory: memoryview, offset: int) -> None:
        self.word = ctypes.c_uint32.from_buffer(memory, offset)
        self._address = ctypes.c_void_p(ctypes.addressof(self.word))
        # Not PyDLL: other threads run while this one sleeps.
        self._syscall = ctypes.CDLL(None).syscall
        self._number = ctypes.c_long(_FUTEX_CALL)

    def wake(self) -> None:
        """Wake all who sleep on it."""
        self._syscall(self._number, self._address, _FUTEX_WAKE, _ALL_WAITERS, None)

    def sleep_while(self, value: int, seconds: float) -> None:
        """Sleep while it has this value, at most `seconds`; may wake up early."""
        timeout = _Timespec(int(seconds), int(seconds % 1 * 1e9))
        self._syscall(
            *(self._number, self._address, _FUTEX_WAIT, value & 0xFFFFFFFF),
            ctypes.byref(timeout),
        )


def _memory_fence() -> Callable[[], object]:
    """Return a function that is a full memory barrier of this processor."""
    if platform.machine() in ("x86_64", "AMD64"):
        # Taking a lock is a `lock cmpxchg`, a full barrier; stores become visible in
        # their order anyway (Intel SDM 3A, 9.2.2).
        lock = threading.Lock()

        def fence() -> None:
            lock.acquire(blocking=False)
            lock.release()

        return fence
    from mpi4py import MPI

    return MPI.Win.Create(None, comm=MPI.COMM_SELF).Sync
