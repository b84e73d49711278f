"""The fork server of a node: it has imported torch, and forks a rank for each proxy.

It has started neither MPI nor CUDA, and has one thread: so a fork of it is as good as a
process of its own. `protocol` has what is sent, docs/decisions/0018 why.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import math
import os
import selectors
import signal
import socket
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from reprlib import Repr
from typing import IO, Any

from mpitrain.console import say
from mpitrain.errors import LaunchError, UsageError
from mpitrain.launch.env_checks import STATUS_FILE, was_launched
from mpitrain.launch.import_torch import import_torch
from mpitrain.launch.read_ahead import read_ahead
from mpitrain.settings import setting
from mpitrain.warm import protocol
from mpitrain.warm.process_state import RENEWABLE, ProcessState, identity
from mpitrain.watchdog.process import end_with_parent, is_stopped

MODULES = (
    "torch.distributed",
    "mpi4py",
    "threadpoolctl",
    "mpitrain.tools.command",
    "mpitrain.tools.train.run",
    "mpitrain.launch.early_return",
    "mpitrain.launch.run_script",
)
"""What each rank of a training imports, but for MPI itself."""

MORE_MODULES = ("torchvision",)
"""What many of them import; it takes as long again, since it imports torch._dynamo."""

REQUEST_SECONDS = 5.0  # how long it waits for a part of a request, or for files
LOCK_SECONDS = 3.0  # for a server that is about to end
RENEWAL_SECONDS = 1.0  # until all ranks of a start have been told
MAX_CORES = 8192  # of a node: more than the kernel has
SHORT = Repr()  # of values in a message
SHORT.maxstring = 100
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# Schedulers may send the first two to all; stopped it could not end its ranks.
_OF_RANKS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTSTP)


@dataclass(frozen=True, kw_only=True)
class ServeConfig:
    """Import torch once, for all ranks that mpirun starts on this machine later."""

    idle_minutes: float = setting(60.0, above=0)
    """Time without a rank after which it ends."""


def serve(config: ServeConfig) -> None:
    """Serve until it is idle, or ended by Ctrl-C; returns in each fork, a rank."""
    if os.environ.get(protocol.SOCKET) == protocol.NONE:
        raise UsageError(
            f"found {protocol.SOCKET}=none, by which each rank imports: unset it"
        )
    began = time.monotonic()
    # That of `supervise` ends with it, however late the first fault is.
    idle_seconds = math.inf if STATUS_FILE in os.environ else 60 * config.idle_minutes
    server = ForkServer(protocol.socket_path(os.environ), idle_seconds)
    took = time.monotonic() - began
    say(
        f"ready after {took:.1f} s: `mpirun ... python -m mpitrain ...` in another "
        "shell starts warm. Ctrl-C ends this server"
    )
    server.serve()


class ForkServer:
    """Forks a rank for each proxy that asks, until it is idle or told to end.

    Args:
        path: Of its socket, in a folder of this user alone.
        idle_seconds: How long it waits without a fork before it ends.
        modules: What it imports.
        lock: Its lock beside the socket, if it is held already. Then the server is of
            one start, and does not restart: its command line is that of a rank.
    """

    def __init__(
        self,
        path: Path,
        idle_seconds: float,
        modules: Sequence[str] = (*MODULES, *MORE_MODULES),
        lock: IO[bytes] | None = None,
    ) -> None:
        self._identity = identity()
        self._variables = dict(os.environ)
        self._parent = os.getppid()
        self._idle_seconds = idle_seconds
        # By the fork's process id; and that of its proxy.
        self._proxies: dict[int, tuple[socket.socket, int]] = {}
        self._own: list[socket.socket | selectors.BaseSelector] = []  # of `serve`
        self._is_ending = False
        # Variables and folder with which it restarts, and when.
        self._renewal: tuple[dict[str, str], str, float] | None = None
        self._checked_at = 0.0
        self.path = path
        self._is_of_start = lock is not None
        self._lock = lock or _lock(path)
        if not self._is_of_start:  # mpirun may have bound it to a core
            with contextlib.suppress(OSError):
                os.sched_setaffinity(0, range(MAX_CORES))
        self._import(modules)
        self._files = _files_of_modules()
        self._socket = _listen(path)

    def _import(self, modules: Sequence[str]) -> None:
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
        gc.disable()  # it takes a fifth of the time of the imports
        with contextlib.suppress(Exception):  # the import does without
            read_ahead(lambda: None)
        import_torch()
        for name in modules:
            importlib.import_module(name)
        # It keeps where the libraries are, for which each rank would take 13 ms.
        sys.modules["threadpoolctl"].threadpool_info()
        gc.enable()
        gc.freeze()  # a collection in a fork would copy every page
        # A first fork ends the threads of OpenBLAS: those that are left would be lost.
        if (pid := _fork()) == 0:
            os._exit(0)
        os.waitpid(pid, 0)
        num_threads = len(os.listdir("/proc/self/task"))  # noqa: PTH208
        if num_threads > 1:
            raise LaunchError(
                f"{num_threads - 1} threads run after the imports: a fork would be "
                "without them. Expected imports that start none"
            )

    def serve(self) -> None:
        """Serve until the end; returns in each fork, which continues as a rank."""
        woken, wakes = socket.socketpair()
        for end in (woken, wakes):
            end.setblocking(False)
        signal.set_wakeup_fd(wakes.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in _ENDING:
            # `nohup` ignores HUP: the user logs out, and it serves on.
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._end)
        for number in _OF_RANKS:  # each would end the server, and its forks with it
            signal.signal(number, signal.SIG_IGN)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        if was_launched(os.environ):  # mpirun may be killed
            end_with_parent(self._parent)
        idle_since = time.monotonic()
        with selectors.DefaultSelector() as selector:
            self._own = [woken, wakes, selector]
            selector.register(woken, selectors.EVENT_READ)
            selector.register(self._socket, selectors.EVENT_READ)
            while self._proxies or not self._is_ending:
                # A signal wakes it, too: the death of a fork, or that it shall end.
                seconds = idle_since + self._idle_seconds - time.monotonic()
                if self._proxies or self._renewal:
                    seconds = RENEWAL_SECONDS
                for key, _ in selector.select(min(max(seconds, 0.0), 60.0)):
                    if key.fileobj is woken:
                        with contextlib.suppress(BlockingIOError):
                            woken.recv(4096)
                    elif key.fileobj is not self._socket:
                        self._signal(key.data, signal.SIGKILL)  # its proxy is gone
                        selector.unregister(key.fileobj)
                    else:
                        # Until the fork is known `_end` would forget it.
                        signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
                        pid = self._answer()
                        if pid == 0:
                            return
                        if pid is not None:
                            proxy, _ = self._proxies[pid]
                            selector.register(proxy, selectors.EVENT_READ, pid)
                        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
                for proxy in self._reap():
                    with contextlib.suppress(KeyError):
                        selector.unregister(proxy)
                    proxy.close()
                self._stop_with_proxies()
                if self._proxies:
                    idle_since = time.monotonic()
                elif self._renewal and time.monotonic() > self._renewal[2]:
                    protocol.remove_files(self.path)  # till it listens again
                    with contextlib.suppress(OSError):  # it was removed
                        os.chdir(self._renewal[1])
                    os.execve(sys.executable, sys.orig_argv, self._renewal[0])
                elif time.monotonic() >= idle_since + self._idle_seconds:
                    break
        protocol.remove_files(self.path)
        sys.exit(0)  # not `return`, which is for forks

    def _end(self, number: int, _: object) -> None:
        """End when the forks have; at a second Ctrl-C at once, and they with it."""
        if not self._proxies or (self._is_ending and number == signal.SIGINT):
            for proxy, _ in self._proxies.values():
                with contextlib.suppress(OSError):  # it is gone
                    # Else it would say that this server was killed.
                    protocol.send_line(proxy, {"status": int(signal.SIGINT)})
            protocol.remove_files(self.path)
            os._exit(0)
        if not self._is_ending:
            self._is_ending = True
            with contextlib.suppress(OSError):  # the terminal is gone
                say(
                    f"ranks that still run: {len(self._proxies)}. This server ends "
                    "after them; a second Ctrl-C ends them, too"
                )

    def _answer(self) -> int | None:
        """Fork for the next proxy; return its process id, 0 in it, ``None`` without."""
        try:
            proxy, _ = self._socket.accept()
        except OSError:  # it is gone; or no descriptor is left
            time.sleep(0.1)
            return None
        pid, server = None, os.getpid()
        try:
            proxy.settimeout(REQUEST_SECONDS)
            request = protocol.receive_line(proxy)
            reason = self._refusal(request["identity"], request["state"])
            protocol.send_line(proxy, {"cold": reason} if reason else {})
            state = ProcessState(**request["state"])
            _, (number, *files), _, _ = socket.recv_fds(proxy, 1, protocol.MAX_FILES)
        except Exception:  # it is gone, or begins cold; or it is no proxy
            proxy.close()
            return None
        with socket.socket(fileno=number) as lifeline:
            try:
                pid = _fork()
            except OSError as error:  # no process left, or no memory
                with contextlib.suppress(OSError):  # the proxy has begun cold
                    reason = f"the fork server cannot fork: {error.strerror}"
                    protocol.send_line(lifeline, {"cold": reason})
            if pid == 0:
                # As objects: a number that one of them closed later may be a file of
                # the rank by then. Of other proxies the rank would be a second end.
                others = (it for it, _ in self._proxies.values())
                for it in (*self._own, self._socket, proxy, *others, self._lock):
                    it.close()
                self._proxies.clear()
                _become(state, files, lifeline, server)
                return 0
        for number in files:
            os.close(number)
        if pid is None:
            proxy.close()
        else:
            self._proxies[pid] = (proxy, state.pid)
        return pid

    def _reap(self) -> Iterator[socket.socket]:
        """Tell the proxies of forks that have ended, and return them."""
        for pid, (proxy, _) in list(self._proxies.items()):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                del self._proxies[pid]
                with contextlib.suppress(OSError):
                    protocol.send_line(proxy, {"status": status})
                yield proxy

    def _stop_with_proxies(self) -> None:
        """Stop the forks of proxies that are stopped, as by Ctrl-Z at mpirun.

        A proxy cannot hand on STOP. It does hand on CONT, maybe between the two looks.
        """
        for pid, (_, proxy) in self._proxies.items():
            if is_stopped(proxy):
                self._signal(pid, signal.SIGSTOP)
                if not is_stopped(proxy):
                    self._signal(pid, signal.SIGCONT)

    @staticmethod
    def _signal(pid: int, number: int) -> None:
        # Its group, too: what it has started. There is none in its first moment.
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError):
                kill(pid, number)

    def _refusal(self, theirs: Mapping[str, str], state: Mapping[str, Any]) -> str:
        """Return why no fork can be this rank; ``""``: one can."""
        if self._is_ending:
            return "the fork server ends"
        mine, at = self._identity, time.monotonic() + RENEWAL_SECONDS
        restart = ", which restarts"
        if self._proxies:
            restart += f" when its {len(self._proxies)} ranks have ended"
        if file := self._changed_file():
            reason = f"{file} has changed since it was imported in the fork server"
            if not self._is_of_start:
                self._renewal, reason = (self._variables, ".", at), reason + restart
            return reason
        # First what a new server would not have equal.
        names, is_read = {*mine, *theirs}, RENEWABLE.match
        other = [it for it in names if mine.get(it) != theirs.get(it)]
        name = min(other, key=lambda it: (bool(is_read(it)), it), default="")
        if not name:
            return ""
        here, there = SHORT.repr(mine.get(name)), SHORT.repr(theirs.get(name))
        reason = f"{name} is {there}, and {here} in the fork server"
        if is_read(name) and not self._is_of_start:
            kept = {k: v for k, v in self._variables.items() if not is_read(k)}
            kept |= {k: v for k, v in state["variables"].items() if is_read(k)}
            self._renewal, reason = (kept, state["folder"], at), reason + restart
        return reason

    def _changed_file(self) -> str:
        """Return a file that is not what was imported; ``""``: all are."""
        # Once for all ranks of a start: it looks at some 3,000 files.
        if time.monotonic() > self._checked_at + 1.0:
            self._checked_at = time.monotonic()
            for file, before in self._files.items():
                if _stamp(file) != before:
                    self._checked_at = 0.0  # the next rank shall be refused, too
                    return file
        return ""


def _lock(path: Path) -> IO[bytes]:
    try:
        if (file := protocol.try_lock(path, LOCK_SECONDS)) is not None:
            return file
    except OSError as error:
        raise UsageError(f"no place for the socket: {error}") from None
    raise UsageError(f"another fork server listens at {path}; expected one")


def _listen(path: Path) -> socket.socket:
    own = socket.socket(socket.AF_UNIX)
    try:
        own.bind(str(path))
    except OSError as error:
        raise UsageError(f"no socket can be at {path}: {error}") from None
    own.listen(1024)
    return own


def _fork() -> int:
    # OpenBLAS ends its threads before a fork, and starts them again when it needs them;
    # Python warns of threads all the same (3.12 and later).
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _become(
    state: ProcessState, files: Sequence[int], lifeline: socket.socket, server: int
) -> None:
    """Be what the proxy stands for, from its "go" on; ends this process without it."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGCHLD, *_ENDING, *_OF_RANKS):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    end_with_parent(server, signal.SIGKILL)
    is_begun = False
    with contextlib.suppress(OSError):  # the proxy has begun cold
        try:
            lifeline = state.take(files, lifeline)
        except Exception as error:
            protocol.send_line(lifeline, {"cold": str(error)})
        else:
            protocol.send_line(lifeline, {"pid": os.getpid()})
            is_begun = lifeline.recv(1) == protocol.GO
    if not is_begun:
        os._exit(1)  # it must not return as a second server
    lifeline.close()


def _files_of_modules() -> dict[str, tuple[int, int]]:
    files = [getattr(it, "__file__", None) for it in list(sys.modules.values())]
    return {file: _stamp(file) for file in files if file}


def _stamp(file: str) -> tuple[int, int]:
    try:
        found = os.stat(file)  # noqa: PTH116
    except OSError:
        return 0, 0
    return found.st_mtime_ns, found.st_size
