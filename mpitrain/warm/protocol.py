"""What a proxy and its fork server send each other, and where they find each other.

Two sockets are between them. The proxy's connection to the server:

    proxy    a line: what it is, and what it hands on (`process_state`)
    server   a line: nothing more, or why the proxy must begin cold
    proxy    its open files, and the fork's end of the lifeline
    server   a line: the status of the fork, once that has ended

When it closes, the proxy is gone, and the server kills the fork. The lifeline:

    fork     a line: its process id, or why the proxy must begin cold
    proxy    "go"; one that has begun cold meanwhile has closed it, and the fork ends

Each process of a start imports this before it asks: so it imports little itself.
"""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

from mpitrain.files import make_private_folder
from mpitrain.launch.env_checks import STATUS_FILE

SOCKET = "MPITRAIN_FORK_SERVER"
"""Variable that names the socket of a fork server, in place of the usual one."""

NONE = "none"
"""Its value where each rank shall import by itself."""

GO = b"g"
MAX_FILES = 253  # that a message of a Unix socket may carry (Linux: SCM_MAX_FD)


def send_line(sock: socket.socket, values: Mapping[str, Any]) -> None:
    """Send values as a line of JSON."""
    sock.sendall(json.dumps(values).encode() + b"\n")


def receive_line(sock: socket.socket) -> dict[str, Any]:
    """Return the values of a line; an OSError or a ValueError without."""
    # Nothing may follow a line before it is answered: the buffer of this reader goes.
    line = sock.makefile().readline()
    if not line:
        raise ConnectionError("it has ended")
    return json.loads(line)  # type: ignore[no-any-return]


def socket_path(environ: Mapping[str, str]) -> Path:
    """Return where this machine's fork server is: the user's, or of `supervise`."""
    status = environ.get(STATUS_FILE)
    name = "fork-server" if status is None else Path(status).parent.name
    # Containers may share a machine's files, and not its name.
    hostname = socket.gethostname().partition(".")[0]
    return Path(environ.get(SOCKET) or private_folder() / f"{name}-{hostname}")


def private_folder() -> Path:
    """Return where the sockets of this user are, on each machine."""
    return Path(f"/tmp/mpitrain-{os.getuid()}")


def lock_file(path: Path) -> Path:
    """Return the file beside a socket that its server locks."""
    return path.with_name(f"{path.name}.lock")


def try_lock(path: Path, seconds: float = 0.0) -> IO[bytes] | None:
    """Lock the file beside a socket; ``None`` if another process has it so long.

    The kernel releases it when this process, and its forks that have it, end. A socket
    that is there is of a server that was killed, and removed.
    """
    make_private_folder(path.parent)
    end = time.monotonic() + seconds
    while True:
        file = lock_file(path).open("ab")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A server that ends removes the file: a lock of it would keep nobody away.
            if os.path.samestat(os.fstat(file.fileno()), lock_file(path).stat()):
                if path.is_socket():
                    path.unlink(missing_ok=True)
                return file
        except BlockingIOError:
            if time.monotonic() >= end:
                file.close()
                return None
            time.sleep(0.1)
        except FileNotFoundError:
            pass
        file.close()


def remove_files(path: Path) -> None:
    """Remove a socket and the file beside it; by the process that has the lock."""
    path.unlink(missing_ok=True)
    lock_file(path).unlink(missing_ok=True)
