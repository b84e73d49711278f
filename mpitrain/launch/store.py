"""The rendezvous store: bound first, then announced, so that no port can be lost."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from mpitrain.launch.network import Rendezvous
from mpitrain.world import World

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore


def open_store(
    rendezvous: Rendezvous, world: World, timeout_seconds: float
) -> TCPStore:
    """Open the key-value store that torch.distributed starts from.

    Rank zero hands the socket it has bound already to the store, so that nobody can
    take the port in between, and the store listens on that one address alone.

    Args:
        rendezvous: Where rank zero listens.
        world: Where this process stands.
        timeout_seconds: How long one answer of the store may take.

    Returns:
        The server on rank zero, a client elsewhere.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    # The store closes the socket when it goes, so it gets it for good.
    descriptor = (
        rendezvous.listener.detach() if rendezvous.listener is not None else None
    )
    return TCPStore(
        rendezvous.address,
        rendezvous.port,
        world.world_size,
        is_master=world.is_rank_zero,
        timeout=timedelta(seconds=timeout_seconds),
        wait_for_workers=False,
        master_listen_fd=descriptor,
    )
