"""`python -m mpitrain serve`: a fork server, for whoever edits and runs."""

from __future__ import annotations

import math
import os
import time
from dataclasses import dataclass

from mpitrain.console import say
from mpitrain.errors import UsageError
from mpitrain.launch.env_checks import STATUS_FILE
from mpitrain.settings import setting
from mpitrain.warm.protocol import NONE, SOCKET, socket_path


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Import torch once, for all ranks that mpirun starts on this machine later."""

    idle_minutes: float = setting(60.0, above=0)
    """Time without a rank after which it ends."""


def serve(config: ServeConfig) -> None:
    """Serve until it is idle, or ended by Ctrl-C; returns in each fork, a rank."""
    from mpitrain.warm.fork_server import ForkServer

    if os.environ.get(SOCKET) == NONE:
        raise UsageError(f"found {SOCKET}={NONE}, by which each rank imports: unset it")
    began = time.monotonic()
    # That of `supervise` ends with it, however late the first fault is.
    idle_seconds = math.inf if STATUS_FILE in os.environ else 60 * config.idle_minutes
    server = ForkServer(socket_path(os.environ), idle_seconds)
    took = time.monotonic() - began
    say(
        f"ready after {took:.1f} s: `mpirun ... python -m mpitrain ...` in another "
        "shell starts warm. Ctrl-C ends this server"
    )
    server.serve()
