"""Memory that the ranks of a node share: a file that one makes and the others open.

Not an MPI window (docs/decisions/0008): where a node has no room, that is an error of
one rank here, not the end of a process.
"""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple


class MemoryFile(NamedTuple):
    """A file in memory, and the path by which the other ranks of the node open it."""

    descriptor: int
    path: str
    num_bytes: int


class SharedMemory(NamedTuple):
    """What `share_memory` found; `sizes` and `errors` are by rank, equal on all."""

    memory: mmap.mmap | None  # ``None`` where this rank has none
    sizes: list[int]  # of the files that the first ranks of the nodes have made
    errors: list[str]  # why a rank has no memory; ``""`` where it has


def share_memory(
    allgather: Callable[[Any], list[Any]],
    rank: int,
    ranks_here: Sequence[int],
    create: Callable[[], MemoryFile],
) -> SharedMemory:
    """Map one file on all ranks of each node. Collective over the ranks of `allgather`.

    The first of `ranks_here`, those of this node, makes it by `create`, which may raise
    an OSError. All have mapped it, or failed, when this returns.
    """
    file, inode, error = MemoryFile(-1, "", 0), 0, ""
    memory: mmap.mmap | None = None
    try:
        if rank == ranks_here[0]:
            try:
                file = create()
                inode = os.fstat(file.descriptor).st_ino
            except OSError as raised:
                error = str(raised)
        offers = allgather((file.path, file.num_bytes, inode, error))
        path, num_bytes, inode, error = offers[ranks_here[0]]
        if not error:
            try:
                if file.descriptor < 0:
                    file = MemoryFile(os.open(path, os.O_RDWR), path, num_bytes)
                memory = mmap.mmap(file.descriptor, num_bytes)
                # In containers that hide processes a path may be another one's.
                if os.fstat(file.descriptor).st_ino != inode:
                    error = f"{path} is another file"
            except (OSError, ValueError) as raised:
                error = str(raised)
        errors = allgather(error)
    finally:
        if file.descriptor >= 0:
            os.close(file.descriptor)
    return SharedMemory(
        None if error else memory, [num_bytes for _, num_bytes, *_ in offers], errors
    )
