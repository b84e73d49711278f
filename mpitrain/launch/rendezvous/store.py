"""The rendezvous store: bound first, then announced, so that no port can be lost."""

from __future__ import annotations

from datetime import timedelta
from typing import TYPE_CHECKING

from mpitrain.launch.rendezvous.select import Rendezvous
from mpitrain.mpi.collectives import all_or_none
from mpitrain.mpi.world import World

if TYPE_CHECKING:
    from mpi4py import MPI
    from torch.distributed import TCPStore  # type: ignore[attr-defined]


def open_store(
    comm: MPI.Intracomm, rendezvous: Rendezvous, world: World, timeout_seconds: float
) -> TCPStore:
    """Open the store on rank zero, then reach it from the others.

    Collective over `comm`. In two steps: a client of a server that failed would wait.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    def open_here() -> TCPStore:
        listener = rendezvous.listener
        return TCPStore(
            rendezvous.address,
            rendezvous.port,
            world.world_size,
            is_master=world.is_rank_zero,
            timeout=timedelta(seconds=timeout_seconds),
            # The clients come after it: with True the constructor would wait for them.
            wait_for_workers=False,
            # The socket that rank zero has bound, so that nobody takes the port
            # between; for good: the store closes it.
            master_listen_fd=listener.detach() if listener is not None else None,
        )

    server = all_or_none(
        comm, lambda: open_here() if world.is_rank_zero else None, "open the store"
    )
    where = f"{world.master_addr}:{world.master_port}"
    return all_or_none(
        comm, lambda: server or open_here(), f"reach the store at {where}"
    )
