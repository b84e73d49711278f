"""One import for all ranks of a node, where they outnumber its cores.

Each rank asks here before it imports anything. The first one begins a fork server of
this start alone; all of them, that one too, become its proxies.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from mpitrain.files import make_private_folder
from mpitrain.launch.cpu import cpu_quota
from mpitrain.launch.env_checks import launched_local_size
from mpitrain.mpi.launchers import LAUNCHERS, by_process
from mpitrain.warm.fork_server import MODULES, SOCKET, ForkServer, default_path
from mpitrain.warm.process_state import identity, inherited_files
from mpitrain.watchdog.process import launchers_of, name_of

RANKS_PER_CORE = 2  # with fewer, each rank's own import ends about as soon
IMPORT_SECONDS = 120.0  # after which a rank begins cold
IDLE_SECONDS = 10.0
POLL_SECONDS = 0.02


def server_of_start(environ: Mapping[str, str]) -> Path | None:
    """Return the socket of this start's fork server, once that has imported torch.

    ``None``: this rank must import by itself; or it is a fork, and has imported.
    """
    launcher = next(reversed(launchers_of(os.getpid())), None)
    if SOCKET in environ or launcher is None or not _is_crowded(launcher.pid, environ):
        return None
    # Ranks that differ in what a fork cannot take over have servers of their own.
    kind = zlib.crc32(repr(sorted(identity().items())).encode())
    path = default_path(f"start-{launcher.pid}.{launcher.started}-{kind:08x}")
    try:
        make_private_folder(path.parent)
        if (lock := _lock(path)) is not None:
            with lock:
                if os.fork() == 0:
                    _serve(path, lock)
                    return None
        end = time.monotonic() + IMPORT_SECONDS
        while not path.exists():
            if time.monotonic() > end or _lock(path) is not None:
                return None  # it has ended: the error of the import is this rank's
            time.sleep(POLL_SECONDS)
    except OSError:  # no place for a socket
        return None
    return path


def _is_crowded(launcher: int, environ: Mapping[str, str]) -> bool:
    """Whether the ranks of this node would wait for each other's imports."""
    of_name = LAUNCHERS.get(by_process(name_of(launcher), environ))
    if of_name is None or not of_name.serves_forks:
        return False
    # Not this process's cores: the launcher may have bound it to one of them.
    num_cores = min(len(os.sched_getaffinity(launcher)), cpu_quota())
    return launched_local_size(environ) >= RANKS_PER_CORE * num_cores


def _lock(path: Path) -> IO[bytes] | None:
    file = path.with_name(f"{path.name}.lock").open("ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        return None
    return file


def _serve(path: Path, lock: IO[bytes]) -> None:
    """Be the server; returns in each fork, which is a rank."""
    try:
        _remove_stale(path)
        # mpirun waits for the end of a rank's output, MPICH for that of its socket.
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in {0, 1, 2, *inherited_files()}:
            os.dup2(nothing, number) if number <= 2 else os.close(number)
        server = ForkServer(path, IDLE_SECONDS, MODULES, lock)
    except BaseException:
        os._exit(1)
    server.serve()


def _remove_stale(path: Path) -> None:
    """Remove the files of servers that were killed."""
    for file in path.parent.glob("start-*.lock"):
        other = file.with_suffix("")
        with contextlib.suppress(OSError):
            if other != path and (lock := _lock(other)) is not None:
                with lock:
                    other.unlink(missing_ok=True)
                    file.unlink()
