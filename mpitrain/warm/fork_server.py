"""The fork server of a node: it has imported torch, and forks a rank for each proxy.

It has started neither MPI nor CUDA, and has one thread: so a fork of it is as good as a
process of its own. `protocol` has what is sent, docs/decisions/0018 why.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import os
import selectors
import signal
import socket
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

from mpitrain.errors import LaunchError, UsageError
from mpitrain.files import make_private_folder
from mpitrain.launch.env_checks import was_launched
from mpitrain.launch.import_torch import import_torch
from mpitrain.launch.read_ahead import read_ahead
from mpitrain.warm.process_state import (
    READ_AT_IMPORT,
    ProcessState,
    difference,
    identity,
    is_renewable,
)
from mpitrain.warm.protocol import (
    GO,
    MAX_FILES,
    STATUS,
    receive_line,
    send_line,
    try_lock,
)
from mpitrain.watchdog.process import end_with_parent

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
MAX_REASON = 200  # characters of values in a message
_ENDING = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
_OF_RANKS = (signal.SIGUSR1, signal.SIGUSR2)  # schedulers may send them to all


class ForkServer:
    """Forks a rank for each proxy that asks, until it is idle or told to end.

    Args:
        path: Of its socket, in a folder of this user alone.
        idle_seconds: How long it waits without a fork before it ends.
        modules: What it imports.
        lock: Its lock beside the socket, if it is held already. Then the server is of
            one start, and does not begin anew: its command line is that of a rank.
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
        self._proxies: dict[int, socket.socket] = {}  # by the fork's process id
        self._own: list[socket.socket | selectors.BaseSelector] = []  # of `serve`
        self._is_ending = False
        self._renewal: dict[str, str] = {}  # variables of one that replaces it
        self._renewal_folder = ""
        self._renew_at = 0.0
        self._checked_at = 0.0
        self.path = path
        self._is_of_start = lock is not None
        self._lock = lock or _lock(path)
        if not self._is_of_start:  # mpirun may have bound it to a core
            os.sched_setaffinity(0, range(os.cpu_count() or 1))
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
                        self._kill(key.data)  # its proxy is gone
                        selector.unregister(key.fileobj)
                    elif (proxy := self._accept()) is not None:
                        # Until the fork is known `_end` would forget it.
                        signal.pthread_sigmask(signal.SIG_BLOCK, _ENDING)
                        pid = self._answer(proxy)
                        if pid == 0:
                            return
                        if pid is None:
                            proxy.close()
                        else:
                            self._proxies[pid] = proxy
                            selector.register(proxy, selectors.EVENT_READ, pid)
                        signal.pthread_sigmask(signal.SIG_UNBLOCK, _ENDING)
                for proxy in self._reap():
                    with contextlib.suppress(KeyError):
                        selector.unregister(proxy)
                    proxy.close()
                if self._proxies:
                    idle_since = time.monotonic()
                elif self._renewal and time.monotonic() > self._renew_at:
                    with contextlib.suppress(OSError):  # it was removed
                        os.chdir(self._renewal_folder)
                    os.execve(sys.executable, sys.orig_argv, self._renewal)
                elif time.monotonic() >= idle_since + self._idle_seconds:
                    break
        self._remove_files()
        sys.exit(0)  # not `return`, which is for forks

    def _remove_files(self) -> None:
        self.path.unlink(missing_ok=True)
        Path(self._lock.name).unlink(missing_ok=True)

    def _end(self, number: int, _: object) -> None:
        """End when the forks have; at a second Ctrl-C at once, and they with it."""
        if not self._proxies or (self._is_ending and number == signal.SIGINT):
            self._remove_files()
            os._exit(0)
        self._is_ending = True

    def _accept(self) -> socket.socket | None:
        try:
            proxy, _ = self._socket.accept()
        except OSError:  # it is gone; or no descriptor is left
            time.sleep(0.1)
            return None
        proxy.settimeout(REQUEST_SECONDS)
        return proxy

    def _answer(self, proxy: socket.socket) -> int | None:
        """Fork for a proxy; return the process id, 0 in the fork, ``None`` without."""
        try:
            request = receive_line(proxy)
            reason = self._refusal(request["identity"], request["state"])
            send_line(proxy, {"cold": reason} if reason else {})
            if reason:
                return None
            state = ProcessState(**request["state"])
            _, (number, *files), _, _ = socket.recv_fds(proxy, 1, MAX_FILES)
        except Exception:  # it is gone, or has begun cold; or it is no proxy
            return None
        server = os.getpid()
        with socket.socket(fileno=number) as lifeline:
            try:
                pid = _fork()
            except OSError as error:  # no process left, or no memory
                with contextlib.suppress(OSError):  # the proxy has begun cold
                    send_line(lifeline, {"cold": f"no fork: {error.strerror}"})
                pid = None
            if pid == 0:
                # As objects: a number that one of them closed later may be a file of
                # the rank by then. Of other proxies the rank would be a second end.
                for it in (*self._own, self._socket, proxy, *self._proxies.values()):
                    it.close()
                self._lock.close()
                self._proxies.clear()
                _become(state, files, lifeline, server)
        if pid != 0:
            for number in files:
                os.close(number)
        return pid

    def _reap(self) -> Iterator[socket.socket]:
        """Tell the proxies of forks that have ended, and return them."""
        for pid, proxy in list(self._proxies.items()):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                del self._proxies[pid]
                with contextlib.suppress(OSError):
                    proxy.sendall(STATUS.pack(status))
                yield proxy

    @staticmethod
    def _kill(pid: int) -> None:
        # Its group, too: what it has started. There is none in its first moment.
        for kill in (os.killpg, os.kill):
            with contextlib.suppress(ProcessLookupError):
                kill(pid, signal.SIGKILL)

    def _refusal(self, theirs: Mapping[str, str], state: Mapping[str, Any]) -> str:
        """Return why no fork can be this rank; ``""``: one can."""
        if self._is_ending:
            return "the fork server ends"
        self._renew_at = time.monotonic() + RENEWAL_SECONDS
        if file := self._changed_file():
            if self._is_of_start:
                return f"{file} has changed since the fork server has imported it"
            self._renewal, self._renewal_folder = self._variables, "."
            return f"{file} has changed; the fork server starts anew"
        name = difference(self._identity, theirs)
        if not name:
            return ""
        here, there = self._identity.get(name), theirs.get(name)
        reason = f"{name} is {there!r}, and {here!r} in the fork server"
        if len(reason) > MAX_REASON:
            reason = f"{name} is another one in the fork server"
        if is_renewable(name) and not self._is_of_start:
            is_read = READ_AT_IMPORT.match
            variables, self._renewal_folder = state["variables"], state["folder"]
            kept = {k: v for k, v in self._variables.items() if not is_read(k)}
            self._renewal = kept | {k: v for k, v in variables.items() if is_read(k)}
            reason += ", which starts anew"
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
    """Lock the file beside a socket; another server may be about to end."""
    end = time.monotonic() + LOCK_SECONDS
    while True:
        try:
            make_private_folder(path.parent)
            if (file := try_lock(path)) is not None:
                return file
        except OSError as error:
            raise UsageError(f"no place for the socket: {error}") from None
        if time.monotonic() > end:
            raise UsageError(f"another fork server listens at {path}; expected one")
        time.sleep(0.1)


def _listen(path: Path) -> socket.socket:
    # Its name is there from `bind` on, before it listens: a rank would be refused. No
    # longer name: 107 bytes are the limit.
    early = path.with_name(f"{path.name[:-1]}~")
    early.unlink(missing_ok=True)
    own = socket.socket(socket.AF_UNIX)
    try:
        own.bind(str(early))
    except OSError as error:
        raise UsageError(f"no socket can be at {path}: {error}") from None
    own.listen(1024)
    early.rename(path)
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
            send_line(lifeline, {"cold": str(error)})
        else:
            send_line(lifeline, {"pid": os.getpid()})
            is_begun = lifeline.recv(1) == GO
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
