"""The rendezvous store: bound first, then announced, so that no port can be lost."""

from __future__ import annotations

import importlib
import os
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from mpitrain.launch.rendezvous.select import Rendezvous
from mpitrain.mpi.collectives import all_or_none
from mpitrain.mpi.world import World

if TYPE_CHECKING:
    from mpi4py import MPI
    from torch._C._distributed_c10d import TCPStore


def open_store(
    comm: MPI.Intracomm, rendezvous: Rendezvous, world: World, timeout_seconds: float
) -> TCPStore:
    """Open the store on rank zero, then reach it from the others.

    Collective over `comm`. In two stages: a client of a server that failed would wait.
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


def lead_scripts_by_port(address: str, port: int) -> None:
    """Lead a script to our store by its port, or let torch open one on another port.

    ``TORCHELASTIC_USE_AGENT_STORE`` makes every rank a client of whatever stands in
    ``MASTER_PORT``: where the script has written its own, nobody serves it, and
    ``init_process_group`` waits for its timeout (torch 2.8 to 2.14; so does torchrun).
    """
    tcp_store: Any = importlib.import_module("torch.distributed").TCPStore
    connect = tcp_store.__init__

    # A script may give its host's name, where a store on loopback does not listen.
    def connect_to_ours(store: Any, host_name: str, *args: Any, **kwargs: Any) -> None:
        is_ours = port == (args[0] if args else kwargs.get("port"))
        connect(store, address if is_ours else host_name, *args, **kwargs)

    tcp_store.__init__ = connect_to_ours
    rendezvous = importlib.import_module("torch.distributed.rendezvous")
    create = rendezvous._create_c10d_store  # noqa: SLF001

    def create_store(hostname: str, asked: int, *args: Any, **kwargs: Any) -> Any:
        name = "TORCHELASTIC_USE_AGENT_STORE"
        before = os.environ.get(name)
        if before is None or asked == port:
            return create(hostname, asked, *args, **kwargs)
        os.environ[name] = "False"
        try:
            return create(hostname, asked, *args, **kwargs)
        finally:
            os.environ[name] = before

    rendezvous._create_c10d_store = create_store  # type: ignore[attr-defined] # noqa: SLF001
