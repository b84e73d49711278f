"""One import for all ranks of a node, where they outnumber its cores.

Each rank asks here before it imports anything. The first one begins a fork server of
this start alone; all of them, that one too, become its proxies.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import socket
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from mpitrain.files import make_private_folder
from mpitrain.launch.env_checks import launched_local_size
from mpitrain.mpi.launchers import JOB_VARIABLE, LAUNCHERS, by_process
from mpitrain.warm.process_state import identity, inherited_files
from mpitrain.warm.protocol import SOCKET, lock_file, private_folder, try_lock
from mpitrain.watchdog.process import Ancestor, end_with_parent, launchers_of, name_of

IMPORT_SECONDS = 120.0  # after which a rank begins cold
IDLE_SECONDS = 10.0
POLL_SECONDS = 0.02
PREFIX = "start-"
# A GPU's driver may have been told which devices a rank may use: not tried.
GPU_DEVICES = ("/dev/nvidiactl", "/dev/kfd")


class NotServed(Exception):
    """Why a rank has no fork server; empty where none is expected."""


def server_of_start(environ: Mapping[str, str]) -> Path | None:
    """Return the socket of this start's fork server, once that has imported torch.

    ``None``: this is a fork of it, which is a rank from here on.

    Raises:
        NotServed: This rank imports by itself.
    """
    try:
        launcher = next(reversed(launchers_of(os.getpid())), None)
        if launcher is None or not _is_shared(launcher, environ):
            raise NotServed
        path = private_folder() / f"{PREFIX}{_key(launcher, environ)}"
        make_private_folder(path.parent)
        lock = try_lock(path)
        if lock is not None:
            path.unlink(missing_ok=True)  # of one that was killed
            own, rank = _own_cores(launcher), os.getpid()
            if os.fork() == 0:
                _serve(path, lock, own, rank)
                return None
            lock.close()
        _wait(path)
    except OSError as error:
        raise NotServed(f"no fork server: {error}") from None
    return path


def _is_shared(launcher: Ancestor, environ: Mapping[str, str]) -> bool:
    """Whether ranks of this node would wait for each other's imports."""
    kind = LAUNCHERS.get(by_process(name_of(launcher.pid), environ))
    num_ranks = launched_local_size(environ)
    if kind is None or not kind.serves_forks or num_ranks < 2 or SOCKET in environ:
        return False
    # With a tracer, or in a container of its own, a rank shares with nobody.
    is_alone = (
        sys.gettrace()
        or sys.getprofile()
        or not Path("/proc/self/ns/mnt").samefile(f"/proc/{launcher.pid}/ns/mnt")
    )
    if is_alone or any(map(os.path.exists, GPU_DEVICES)):
        return False
    # With a core each, ranks import at the same time, and gain nothing.
    if num_ranks > len(_own_cores(launcher)):
        return True
    from mpitrain.launch.cpu import cpu_quota  # late: it imports much

    return num_ranks > cpu_quota()


def _own_cores(launcher: Ancestor) -> set[int]:
    """Return the cores of all ranks: mpirun may have bound this one to one of them."""
    return os.sched_getaffinity(launcher.pid)


def _key(launcher: Ancestor, environ: Mapping[str, str]) -> str:
    """Name this start, short enough for a socket.

    Ranks that differ in what a fork cannot take over have servers of their own. A
    daemon may have several jobs, and containers share a machine's files.
    """
    job = environ.get(JOB_VARIABLE, "")
    parts = (launcher, job, socket.gethostname(), sorted(identity().items()))
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _wait(path: Path) -> None:
    """Wait for the socket; `NotServed` if its server has ended, or takes too long."""
    name, end = lock_file(path), time.monotonic() + IMPORT_SECONDS
    while not path.exists():
        try:
            with name.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                raise NotServed(file.read().decode() or "the fork server has ended")
        except BlockingIOError:
            pass
        except FileNotFoundError:
            raise NotServed("the fork server has ended") from None
        if time.monotonic() > end:
            raise NotServed(f"torch is not imported after {IMPORT_SECONDS:.0f} s")
        time.sleep(POLL_SECONDS)


def _serve(path: Path, lock: IO[bytes], cores: set[int], rank: int) -> None:
    """Be the server; returns in each fork, which is a rank."""
    server = os.getpid()
    try:
        # Late: it imports much, and the ranks that wait need none of it.
        from mpitrain.warm.fork_server import MODULES, ForkServer

        end_with_parent(rank)
        _remove_stale(path)
        # mpirun waits for the end of a rank's output, MPICH for that of its socket.
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in {0, 1, 2, *inherited_files()}:
            os.dup2(nothing, number) if number <= 2 else os.close(number)
        os.sched_setaffinity(0, cores)
        ForkServer(path, IDLE_SECONDS, MODULES, lock).serve()
    except BaseException as error:
        # It must not go on as a second rank; nor may a fork, which has not begun.
        if os.getpid() == server and not isinstance(error, SystemExit):
            lock.write(f"no fork server: {error}".encode())
            lock.flush()
        os._exit(0 if isinstance(error, SystemExit) else 1)


def _remove_stale(path: Path) -> None:
    """Remove the files of servers that were killed."""
    for file in path.parent.glob(f"{PREFIX}*.lock"):
        other = file.with_suffix("")
        with contextlib.suppress(OSError):
            if other != path and (lock := try_lock(other)) is not None:
                with lock:
                    other.unlink(missing_ok=True)
                    file.unlink()
