"""Groups of the mpi4py backend, and the transports that a new one may be given."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist

import mpitrain.backend  # noqa: F401 - registers it


def group_of(
    ranks: list[int] | None = None, seconds: float = 30.0, **more: object
) -> dist.ProcessGroup:
    """Make a group."""
    timeout = timedelta(seconds=seconds)
    return dist.new_group(ranks, timeout=timeout, backend="mpi4py", **more)


def without_shared_memory(patch: pytest.MonkeyPatch) -> None:
    """Let ranks get no memory to share: all goes by MPI."""

    def refuse(name: str) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)

    patch.setattr(os, "memfd_create", refuse)


def on_two_nodes(patch: pytest.MonkeyPatch, rank: int) -> None:
    """Let even and odd ranks take themselves for those of two nodes."""
    from mpitrain.backend import shared_buffer

    patch.setattr(shared_buffer, "_machine_id", lambda: (f"node{rank % 2}",))


def in_small_pieces(patch: pytest.MonkeyPatch) -> None:
    """Let large tensors be those of some 64 kB."""
    from mpitrain.backend import inter_node, shared_buffer

    patch.setattr(shared_buffer, "MAX_SLOT_BYTES", shared_buffer.MIN_SLOT_BYTES)
    patch.setattr(
        shared_buffer, "MAX_SLOT_BYTES_IN_CACHE", shared_buffer.MIN_SLOT_BYTES
    )
    patch.setattr(inter_node, "CHUNK_BYTES", 4 << 10)


def has_shared_memory_of_a_part(group: dist.ProcessGroup) -> bool:
    """Whether some ranks of a group share memory, and not all."""
    node = group._get_backend(torch.device("cpu"))._group._node
    return node is not None and node.size < group.size()


def all_gather_single() -> Callable[..., Any]:
    """Return it by the name that this torch has."""
    return getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


def reduce_scatter_single() -> Callable[..., Any]:
    """Return it by the name that this torch has."""
    return getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
