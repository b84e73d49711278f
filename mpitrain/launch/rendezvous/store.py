"""The rendezvous store: bound first, then announced, so that no port can be lost."""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import os
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpitrain.launch.rendezvous.select import Rendezvous
from mpitrain.mpi.collectives import all_or_none
from mpitrain.mpi.world import World

if TYPE_CHECKING:
    from mpi4py import MPI
    from torch._C._distributed_c10d import TCPStore

_ERROR = 2


def open_store(
    comm: MPI.Intracomm, rendezvous: Rendezvous, world: World, timeout_seconds: float
) -> TCPStore:
    """Open the store on rank zero, then reach it from the others.

    Collective over `comm`. In two stages: a client of a server that failed would wait.
    """

    def open_here() -> TCPStore:
        return open_on_this_rank(rendezvous, world, timeout_seconds)

    with _errors_only():
        server = all_or_none(
            comm, lambda: open_here() if world.is_rank_zero else None, "open the store"
        )
        doing = f"reach the store at {world.master_addr}:{world.master_port}"
        return all_or_none(comm, lambda: server or open_here(), doing)


def open_on_this_rank(
    rendezvous: Rendezvous, world: World, timeout_seconds: float
) -> TCPStore:
    """Open the server on rank zero, a client elsewhere.

    Rank zero hands the socket it has bound already to the store, so that nobody can
    take the port in between, and the store listens on that one address alone.
    """
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    listener = rendezvous.listener
    return TCPStore(
        rendezvous.address,
        rendezvous.port,
        world.world_size,
        is_master=world.is_rank_zero,
        timeout=timedelta(seconds=timeout_seconds),
        wait_for_workers=False,
        # For good: the store closes it.
        master_listen_fd=listener.detach() if listener is not None else None,
    )


def let_scripts_open_their_own(port: int) -> None:
    """Let torch open a store where a script names another port than our store's.

    ``TORCHELASTIC_USE_AGENT_STORE`` makes every rank a client of whatever stands in
    ``MASTER_PORT``: where the script has written its own, nobody serves it, and
    ``init_process_group`` waits for its timeout (torch 2.8 to 2.14; so does torchrun).
    """
    rendezvous = importlib.import_module("torch.distributed.rendezvous")
    create = getattr(rendezvous, "_create_c10d_store", None)
    if create is None:
        return

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


@contextlib.contextmanager
def _errors_only() -> Iterator[None]:
    """Let torch's C++ write errors alone, and no warnings, in this block.

    It warns of each client whose address has no name. TORCH_CPP_LOG_LEVEL is read once,
    as torch is imported; this is what it sets (libc10.so of torch 2.14).
    """
    import torch

    try:
        c10 = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / "libc10.so"))
        level = ctypes.c_int.in_dll(c10, "FLAGS_caffe2_log_level")
    except (OSError, ValueError):  # another torch: it warns
        yield
        return
    before, level.value = level.value, max(level.value, _ERROR)
    try:
        yield
    finally:
        level.value = before
