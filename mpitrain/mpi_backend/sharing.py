"""How the ranks of each node come to share memory.

All ranks of a group tell each other where they are; the first of each node makes a
file, the others open it. It has no name any more when they go on: nothing is left of a
group that was made, however its ranks end.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mpitrain.mpi_backend.board import Board, board_bytes

FOLDER = Path("/dev/shm")
"""A file system in memory."""

ROOM_BYTES = 80 << 20
"""Most room for data of all ranks of a node together, of one group."""

MOST_PER_RANK = 4 << 20
"""Fewer meetings, where ranks wait for a core at each of them."""

MOST_WITH_CORES = 2 << 20
"""The same where each rank has a core: what is on its way stays in the cache."""

LEAST_PER_RANK = 64 << 10

SPARE = 2.0
"""How much of the file system must be free, as a multiple of what a board may take."""

AMPLE = 16
"""Where so many boards would fit, memory is taken as it is used; else all at once."""

TellAll = Callable[[Any], list[Any]]
"""Gives every rank what each has (what JSON can carry); collective over the group."""


@dataclass(frozen=True)
class Shared:
    """What a rank has in common with those of its node.

    Attributes:
        board: The memory.
        sizes: Number of ranks on each node, in the order of their first ranks.
        num_cores: Cores that the node's ranks may use, together.
    """

    board: Board
    sizes: list[int]
    num_cores: int


def share_memory(
    tell_all: TellAll, rank: int, names: list[str], say: Callable[[str], object]
) -> Shared | None:
    """Make the shared memory of every node.

    Collective over the group.

    Args:
        tell_all: Tells the others.
        rank: This process in the group.
        names: Each rank of the group in words, for messages.
        say: Called with why a node has none, on its first rank.

    Returns:
        What this node's ranks share; ``None`` on every rank of the group, where some
        node has no room, or no node has two ranks.
    """
    places = tell_all([_machine(), _namespace(), os.getpid(), _usable_cores()])
    nodes: dict[tuple[str, ...], list[int]] = {}
    for other, (machine, *_) in enumerate(places):
        nodes.setdefault(tuple(machine), []).append(other)
    sizes = [len(ranks) for ranks in nodes.values()]
    if max(sizes) == 1:
        return None
    here = nodes[tuple(places[rank][0])]
    num_cores = len(frozenset[int]().union(*(places[other][3] for other in here)))
    memory: mmap.mmap | None = None
    path, per_rank, why = "", 0, ""
    if rank == here[0]:
        try:
            most = MOST_WITH_CORES if num_cores >= len(here) else MOST_PER_RANK
            path, per_rank, memory = _create(len(here), most)
        except OSError as error:
            why = str(error)
    try:
        offers = tell_all([path, per_rank, why])
        path, per_rank, why = offers[here[0]]
        if not why and memory is None:
            try:
                memory = _open(path, board_bytes(len(here), per_rank))
            except OSError as error:
                why = str(error)
        reasons = tell_all(why)
    finally:
        if path and rank == here[0]:
            with contextlib.suppress(OSError):
                os.unlink(path)  # noqa: PTH108 - all have it open
    found = [reasons[other] for other in here if reasons[other]]
    if found and rank == here[0]:
        say(
            f"no shared memory on {socket.gethostname()} ({found[0]}): ranks talk "
            "through MPI alone, which is slower for large tensors"
        )
    if memory is None or any(reasons):
        return None
    board = Board(
        memory,
        here.index(rank),
        [names[other] for other in here],
        _visible_pids([places[other] for other in here]),
        per_rank,
    )
    # Chunks must be the same on all nodes, and one may have had less room.
    board.per_rank = min(offers[ranks[0]][1] for ranks in nodes.values())
    return Shared(board, sizes, num_cores)


def room_per_rank(size: int, free_bytes: int, most: int = MOST_PER_RANK) -> int:
    """Return how many bytes of room each rank gets in each half.

    Args:
        size: Number of ranks.
        free_bytes: Of the file system.
        most: Not more.

    Raises:
        OSError: That is too little.

    >>> room_per_rank(8, 1 << 40) >> 10, room_per_rank(64, 1 << 40) >> 10
    (4096, 512)
    >>> room_per_rank(8, 64 << 20) >> 10  # what a container has
    1024
    """
    per_rank = most
    while per_rank >= LEAST_PER_RANK:
        total = board_bytes(size, per_rank)
        if total <= ROOM_BYTES and SPARE * total <= free_bytes:
            return per_rank
        per_rank //= 2
    needed = int(SPARE * board_bytes(size, LEAST_PER_RANK))
    raise OSError(f"{free_bytes >> 20} MiB are free, expected {needed >> 20} MiB")


def _create(size: int, most: int) -> tuple[str, int, mmap.mmap]:
    free = os.statvfs(FOLDER)
    try:
        per_rank = room_per_rank(size, free.f_bavail * free.f_frsize, most)
    except OSError as error:
        raise OSError(f"{FOLDER}: {error}") from None
    length = board_bytes(size, per_rank)
    descriptor, path = tempfile.mkstemp(prefix="mpitrain-", dir=FOLDER)
    try:
        os.ftruncate(descriptor, length)
        if free.f_bavail * free.f_frsize < AMPLE * length:
            # Taken now: a page that cannot be had later ends the process (SIGBUS).
            os.posix_fallocate(descriptor, 0, length)
        return path, per_rank, mmap.mmap(descriptor, length)
    except OSError:
        os.unlink(path)  # noqa: PTH108
        raise
    finally:
        os.close(descriptor)


def _open(path: str, length: int) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    try:
        return mmap.mmap(descriptor, length)
    finally:
        os.close(descriptor)


def _machine() -> list[str]:
    """Return what is equal on ranks that find each other's files in the folder.

    Containers of one host each have their own; the boot id tells hosts of one name
    apart (proc(5), random/boot_id).
    """
    boot = device = ""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    with contextlib.suppress(OSError):
        device = str(FOLDER.stat().st_dev)
    return [socket.gethostname(), boot, device]


def _visible_pids(places: list[Any]) -> list[int]:
    """Return process ids; empty where processes do not see each other."""
    namespaces = {namespace for _, namespace, _, _ in places}
    return [pid for _, _, pid, _ in places] if len(namespaces) == 1 else []


def _namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")  # noqa: PTH115
    except OSError:
        return socket.gethostname()


def _usable_cores() -> list[int]:
    try:
        return sorted(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        return list(range(os.cpu_count() or 1))
