"""Creates the shared memory of the ranks of each node.

The first rank of a node creates a file in /dev/shm, and the others open it. It is
unlinked before they continue, so nothing is left behind however the ranks end.
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

from mpitrain.mpi.topology import boot_id
from mpitrain.mpi_backend.shared_buffer import SharedBuffer, buffer_bytes

FOLDER = Path("/dev/shm")
"""A file system in memory."""

MAX_BUFFER_BYTES = 80 << 20
"""For all ranks of a node together, of one group."""

MAX_SLOT_BYTES = 4 << 20
"""Large where ranks share cores: fewer barriers, at each of which they wait for one."""

MAX_SLOT_BYTES_IN_CACHE = 2 << 20
"""Where each rank has a core: the data in flight stays in the cache."""

MIN_SLOT_BYTES = 64 << 10

REQUIRED_FREE_FACTOR = 2.0
"""How much of the file system must be free, as a multiple of a buffer."""

AMPLE_FREE_FACTOR = 16
"""With more than this free, memory is allocated as it is used; else all at once."""


@dataclass(frozen=True)
class NodeMemory:
    """What a rank shares with the others of its node."""

    buffer: SharedBuffer
    node_sizes: list[int]
    """Ranks on each node, in the order of their first ranks."""
    num_cores: int
    """Cores that the ranks of this node may use, together."""


def create_shared_buffer(
    allgather: Callable[[Any], list[Any]],
    rank: int,
    names: list[str],
    warn: Callable[[str], object],
) -> NodeMemory | None:
    """Create the shared memory of every node.

    Collective over the group; `allgather` exchanges JSON values over it.

    Returns:
        The memory of this node; ``None`` on every rank of the group if some node has
        none, or no node has two ranks.
    """
    ranks_info = allgather(
        [_machine_id(), _pid_namespace(), os.getpid(), sorted(os.sched_getaffinity(0))]
    )
    nodes: dict[tuple[str, ...], list[int]] = {}
    for other, (machine, *_) in enumerate(ranks_info):
        nodes.setdefault(tuple(machine), []).append(other)
    node_sizes = [len(ranks) for ranks in nodes.values()]
    if max(node_sizes) == 1:
        return None
    here = nodes[tuple(ranks_info[rank][0])]
    _, namespaces, pids, cores = zip(*(ranks_info[r] for r in here), strict=True)
    num_cores = len(frozenset[int]().union(*cores))
    memory: mmap.mmap | None = None
    path, slot_bytes, error = "", 0, ""
    if rank == here[0]:
        try:
            has_cores = num_cores >= len(here)
            limit = MAX_SLOT_BYTES_IN_CACHE if has_cores else MAX_SLOT_BYTES
            path, slot_bytes, memory = _create_file(len(here), limit)
        except OSError as raised:
            error = str(raised)
    try:
        offers = allgather([path, slot_bytes, error])
        path, slot_bytes, error = offers[here[0]]
        if not error and memory is None:
            try:
                memory = _open_file(path, buffer_bytes(len(here), slot_bytes))
            except OSError as raised:
                error = str(raised)
        errors = allgather(error)
    finally:
        if path and rank == here[0]:
            with contextlib.suppress(OSError):
                os.unlink(path)  # noqa: PTH108 - all have it open
    found = [errors[other] for other in here if errors[other]]
    if found and rank == here[0]:
        warn(
            f"no shared memory on {socket.gethostname()} ({found[0]}): its ranks "
            "communicate through MPI alone, which is slower for large tensors"
        )
    if memory is None or any(errors):
        return None
    visible_pids = list(pids) if len(set(namespaces)) == 1 else []
    local_names = [names[other] for other in here]
    buffer = SharedBuffer(
        memory, here.index(rank), local_names, visible_pids, slot_bytes
    )
    # Chunks must be equal on all nodes, and one may have had less memory.
    buffer.slot_bytes = min(offers[ranks[0]][1] for ranks in nodes.values())
    return NodeMemory(buffer, node_sizes, num_cores)


def choose_slot_bytes(
    size: int, free_bytes: int, max_bytes: int = MAX_SLOT_BYTES
) -> int:
    """Return the size of each rank's slot, for `size` ranks of a node.

    Raises:
        OSError: There is too little memory.

    >>> choose_slot_bytes(8, 1 << 40) >> 10, choose_slot_bytes(64, 1 << 40) >> 10
    (4096, 512)
    >>> choose_slot_bytes(8, 64 << 20) >> 10  # the default of a container
    1024
    """
    slot_bytes = max_bytes
    while slot_bytes >= MIN_SLOT_BYTES:
        total = buffer_bytes(size, slot_bytes)
        if total <= MAX_BUFFER_BYTES and REQUIRED_FREE_FACTOR * total <= free_bytes:
            return slot_bytes
        slot_bytes //= 2
    needed = int(REQUIRED_FREE_FACTOR * buffer_bytes(size, MIN_SLOT_BYTES))
    raise OSError(f"{free_bytes >> 20} MiB are free, expected {needed >> 20} MiB")


def _create_file(size: int, max_bytes: int) -> tuple[str, int, mmap.mmap]:
    status = os.statvfs(FOLDER)
    free_bytes = status.f_bavail * status.f_frsize
    try:
        slot_bytes = choose_slot_bytes(size, free_bytes, max_bytes)
    except OSError as error:
        raise OSError(f"{FOLDER}: {error}") from None
    length = buffer_bytes(size, slot_bytes)
    descriptor, path = tempfile.mkstemp(prefix="mpitrain-", dir=FOLDER)
    try:
        os.ftruncate(descriptor, length)
        if free_bytes < AMPLE_FREE_FACTOR * length:
            # Now: a page that cannot be had later ends the process (SIGBUS).
            os.posix_fallocate(descriptor, 0, length)
        return path, slot_bytes, mmap.mmap(descriptor, length)
    except OSError:
        os.unlink(path)  # noqa: PTH108
        raise
    finally:
        os.close(descriptor)


def _open_file(path: str, length: int) -> mmap.mmap:
    descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    try:
        return mmap.mmap(descriptor, length)
    finally:
        os.close(descriptor)


def _machine_id() -> list[str]:
    """Return what is equal on ranks that find each other's files in the folder.

    Containers of one host have a folder each; the boot id tells hosts apart.
    """
    device = ""
    with contextlib.suppress(OSError):
        device = str(FOLDER.stat().st_dev)
    return [socket.gethostname(), boot_id(), device]


def _pid_namespace() -> str:
    try:
        return os.readlink("/proc/self/ns/pid")  # noqa: PTH115
    except OSError:
        return socket.gethostname()
