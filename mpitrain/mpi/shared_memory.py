"""Memory that the ranks of a node share: a file without a name (memfd_create).

One rank makes it, and the others open it in /proc. So nothing is left of it however the
ranks end, and a container's small /dev/shm does not limit it. It is no MPI window
(docs/decisions/0008).
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Callable, Sequence
from typing import Any


def create_memory_file(name: str) -> int:
    """Create an empty file in memory without a path, and return its descriptor."""
    if hasattr(os, "memfd_create"):
        return os.memfd_create(name)
    # Python that was built with an old glibc, such as uv's (python-build-standalone).
    create = getattr(ctypes.CDLL(None, use_errno=True), "memfd_create", None)
    close_on_exec = 1  # MFD_CLOEXEC of linux/memfd.h
    file: int = create(name.encode(), close_on_exec) if create is not None else -1
    if file < 0:
        number = ctypes.get_errno() or errno.ENOSYS
        raise OSError(number, f"memfd_create: {os.strerror(number)}")
    return file


def share_memory(
    allgather: Callable[[Any], list[Any]],
    rank: int,
    ranks_here: Sequence[int],
    num_bytes: int,
    name: str,
    *,
    is_allocated: bool,
) -> tuple[mmap.mmap | None, list[str]]:
    """Map one file on all ranks of each node. Collective over the ranks of `allgather`.

    Args:
        allgather: Gives all ranks an object of each.
        rank: Of this process.
        ranks_here: Those of this node; the first makes the file.
        num_bytes: Equal on the ranks of a node.
        name: Of the file, in /proc.
        is_allocated: Whether to allocate it now, so that lack of room is an error.
            Memory that cannot be had later ends the process (SIGBUS, or OOM).

    Returns:
        The memory, ``None`` where this rank has none, and for each rank why it has
        none, or ``""``.
    """
    file, inode, error = -1, 0, ""
    memory: mmap.mmap | None = None
    # Every rank makes both exchanges, whatever has failed on it: others wait there.
    try:
        if rank == ranks_here[0]:
            try:
                file = create_memory_file(name)
                os.ftruncate(file, num_bytes)
                if is_allocated:
                    os.posix_fallocate(file, 0, num_bytes)
                inode = os.fstat(file).st_ino
            except OSError as raised:
                error = str(raised)
        offers = allgather((f"/proc/{os.getpid()}/fd/{file}", inode, error))
        path, inode, error = offers[ranks_here[0]]
        if not error:
            try:
                file = file if file >= 0 else os.open(path, os.O_RDWR)
                memory = mmap.mmap(file, num_bytes)
                # In containers that hide processes a path may be another one's.
                if os.fstat(file).st_ino != inode:
                    error = f"{path} is another file"
            except (OSError, ValueError) as raised:
                error = str(raised)
        errors = allgather(error)
    # Not earlier: until the second exchange others open the path. Mapped memory stays.
    finally:
        if file >= 0:
            os.close(file)
    return None if error else memory, errors
