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

from mpitrain.launch.network import Rendezvous
from mpitrain.world import World

if TYPE_CHECKING:
    from torch._C._distributed_c10d import TCPStore


_ERROR = 2


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


def let_scripts_open_their_own(port: int) -> None:
    """Let torch open a store where a script names another port than ours.

    ``TORCHELASTIC_USE_AGENT_STORE`` makes every rank a client of whatever stands in
    ``MASTER_PORT``: where the script has written its own, nobody serves it, and
    ``init_process_group`` waits for as long as its timeout (torch 2.8 to 2.14; so does
    torchrun).

    Args:
        port: Of our store.
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
def errors_alone() -> Iterator[None]:
    """Let torch's C++ write errors alone, and no warnings, in this block.

    It warns of each client whose address has no name ("The hostname of the client
    socket cannot be retrieved"). TORCH_CPP_LOG_LEVEL is read once, as torch is
    imported; this is what it sets (seen in libc10.so of torch 2.14).
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
