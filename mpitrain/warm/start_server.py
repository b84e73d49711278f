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
import time
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from mpitrain.launch.env_checks import launched_local_size
from mpitrain.mpi.launchers import JOB_VARIABLE, LAUNCHERS, by_process
from mpitrain.warm import process_state, protocol
from mpitrain.watchdog.process import Ancestor, end_with_parent, launchers_of, name_of

IMPORT_SECONDS = 120.0  # after which a rank begins cold
IDLE_SECONDS = 10.0
POLL_SECONDS = 0.02
PREFIX = "start-"


def server_of_start(environ: Mapping[str, str]) -> Path | str | None:
    """Return the socket of this start's fork server, once that has imported torch.

    ``None``: this is a fork of it, which is a rank from here on. Text: why this rank
    imports by itself; empty where no server is expected.
    """
    try:
        launcher = next(reversed(launchers_of(os.getpid())), None)
        if launcher is None or not _is_shared(launcher, environ):
            return ""
        path = protocol.private_folder() / f"{PREFIX}{_key(launcher, environ)}"
        if (lock := protocol.try_lock(path)) is not None:
            # mpirun may have bound this rank to one of the cores of all.
            cores, rank = os.sched_getaffinity(launcher.pid), os.getpid()
            if os.fork() == 0:
                _serve(path, lock, cores, rank)
                return None
            lock.close()
        return _wait(path) or path
    except OSError as error:
        return f"no fork server: {error}"


def _is_shared(launcher: Ancestor, environ: Mapping[str, str]) -> bool:
    """Whether ranks of this node would wait for each other's imports."""
    kind = LAUNCHERS.get(by_process(name_of(launcher.pid), environ))
    num_ranks = launched_local_size(environ)
    is_named = environ.get(protocol.SOCKET)
    if is_named or kind is None or not kind.serves_forks or num_ranks < 2:
        return False
    # With a tracer, or in a container of its own, a rank shares with nobody.
    container, of_launcher = "/proc/self/ns/mnt", f"/proc/{launcher.pid}/ns/mnt"
    is_alone = process_state.tracers() or not Path(container).samefile(of_launcher)
    from mpitrain.launch.pci import has_gpus  # late: most starts return before

    if is_alone or has_gpus():
        return False
    # With a core each, ranks import at the same time, and gain nothing.
    if num_ranks > len(os.sched_getaffinity(launcher.pid)):
        return True
    from mpitrain.launch.cpu import cpu_quota  # late: it imports much

    return num_ranks > cpu_quota()


def _key(launcher: Ancestor, environ: Mapping[str, str]) -> str:
    """Name this start, short enough for a socket.

    Ranks that differ in what a fork cannot take over have servers of their own. A
    daemon may have several jobs, and containers share a machine's files.
    """
    identity = sorted(process_state.identity().items())
    parts = (launcher, environ.get(JOB_VARIABLE), socket.gethostname(), identity)
    return hashlib.sha256(repr(parts).encode()).hexdigest()[:16]


def _wait(path: Path) -> str:
    """Wait for the socket; return why none comes, ``""``: it is there."""
    name, end = protocol.lock_file(path), time.monotonic() + IMPORT_SECONDS
    while not path.exists():
        try:
            with name.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return file.read().decode() or "the fork server has ended"
        except BlockingIOError:
            pass
        except FileNotFoundError:
            return "the fork server has ended"
        if time.monotonic() > end:
            return f"torch is not imported after {IMPORT_SECONDS:.0f} s"
        time.sleep(POLL_SECONDS)
    return ""


def _serve(path: Path, lock: IO[bytes], cores: set[int], rank: int) -> None:
    """Be the server; returns in each fork, which is a rank."""
    server = os.getpid()
    try:
        # Late: it imports much, and the ranks that wait need none of it.
        from mpitrain.warm.fork_server import MODULES, ForkServer

        end_with_parent(rank)
        os.setpgid(0, 0)  # mpirun stops the group of a rank; it shall stop the forks
        _remove_stale(path)
        # mpirun waits for the end of a rank's output, MPICH for that of its socket.
        nothing = os.open(os.devnull, os.O_RDWR)
        for number in {0, 1, 2, *process_state.inherited_files()}:
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
            if other != path and (lock := protocol.try_lock(other)) is not None:
                with lock:
                    protocol.remove_files(other)
