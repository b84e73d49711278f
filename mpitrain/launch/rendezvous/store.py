"""The rendezvous store: bound first, then announced, so that no port can be lost."""

from __future__ import annotations

import resource
from datetime import timedelta
from typing import TYPE_CHECKING

from mpitrain.launch.rendezvous.select import Rendezvous
from mpitrain.mpi.collectives import all_or_none
from mpitrain.mpi.world import World

if TYPE_CHECKING:
    from mpi4py import MPI
    from torch.distributed import TCPStore  # type: ignore[attr-defined]


_OTHER_DESCRIPTORS = 1024  # of rank zero, besides one for each client of the store


def allow_descriptors(number: int) -> None:
    """Let this process have so many descriptors, if its hard limit (ulimit -Hn) does.

    The soft limit is 1024 by default: for programs that call select.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = number if hard == resource.RLIM_INFINITY else min(number, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


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

    def serve() -> TCPStore | None:
        if not world.is_rank_zero:
            return None
        allow_descriptors(world.world_size + _OTHER_DESCRIPTORS)
        return open_here()

    server = all_or_none(comm, serve, "open the store")
    where = f"{world.master_addr}:{world.master_port}"
    return all_or_none(
        comm, lambda: server or open_here(), f"reach the store at {where}"
    )
