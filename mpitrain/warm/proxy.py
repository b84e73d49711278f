"""The process that mpirun started, where a fork of the fork server is the rank."""

from __future__ import annotations

import os
import resource
import signal
import socket
import stat
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import NoReturn

from mpitrain.console import HELP_FLAGS
from mpitrain.files import make_private_folder
from mpitrain.launch.env_checks import (
    forget_parent,
    launched_label,
    launched_rank,
    was_launched,
)
from mpitrain.schedulers.signals import had_term
from mpitrain.warm import protocol
from mpitrain.warm.process_state import ProcessState, identity
from mpitrain.watchdog.process import launchers_of

ANSWER_SECONDS = 10.0  # after which a rank begins cold
CLAIM_SECONDS = 2.0  # while others of a server that has ended see that one rank says so
COMMANDS = ("train", "run", "sweep")
NOT_PASSED_ON = {
    *(signal.SIGKILL, signal.SIGCHLD),
    *(signal.SIGSTOP, signal.SIGTSTP, signal.SIGTTIN, signal.SIGTTOU),
    *(signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL),
}
"""Signals that end or stop the proxy, and so its fork, or that concern it alone."""


def start_warm() -> None:
    """Run the command of this rank in a fork of the fork server, and end as it ends.

    Returns if it must begin cold: no server, no rank, or one that is not equal. It also
    returns in the fork.
    """
    words = sys.argv[1:]
    path = protocol.socket_path(os.environ)
    if (
        (words and words[0] not in COMMANDS and not words[0].startswith("-"))
        or not HELP_FLAGS.isdisjoint(words)
        or os.environ.get(protocol.SOCKET) == protocol.NONE
        or not was_launched(os.environ)
        or forget_parent(dict(os.environ))
    ):
        return None
    # Closed at the end: a fork that is late ends without having begun.
    with ExitStack() as stack:
        try:
            if (server := _connect(path)) is None:
                # Not at the top: where a server listens no process of a start needs it.
                from mpitrain.warm.start_server import server_of_start

                of_start = server_of_start(os.environ)
                if not isinstance(of_start, Path):  # or this is a fork: a rank
                    return _say_cold(of_start or "")
                if (server := _connect(path := of_start)) is None:
                    return _say_cold("the fork server has ended")
            stack.enter_context(server)
            state = ProcessState.of_this_process()
            if (found := len(state.descriptors)) >= (limit := protocol.MAX_FILES):
                return _say_cold(f"{found} files are open; expected fewer than {limit}")
            request = {"state": vars(state), "identity": identity()}
            protocol.send_line(server, request)
            if not (answer := protocol.receive_line(server)):
                # Not sooner: in the queue of a server that is stopped the files would
                # be open for ever, and mpirun would wait for the end of the output.
                lifeline, of_fork = map(stack.enter_context, socket.socketpair())
                lifeline.settimeout(ANSWER_SECONDS)
                with of_fork:
                    files = [of_fork.fileno(), *state.descriptors]
                    socket.send_fds(server, [b"f"], files)
                answer = protocol.receive_line(lifeline)
        except Exception as error:  # nothing has begun yet
            return _say_cold(f"no answer of the fork server: {error}")
        if "cold" not in answer:
            _stand_for(answer["pid"], path, server, lifeline, state.descriptors)
    return _say_cold(answer["cold"])


def _connect(path: Path) -> socket.socket | None:
    """Connect to the server; return ``None`` without one, an OSError if it cannot."""
    end = time.monotonic() + ANSWER_SECONDS
    while os.path.exists(path):  # noqa: PTH110 - False, too, where it may not be seen
        make_private_folder(path.parent)
        with suppress(FileNotFoundError):  # a server that ends has removed it
            if not stat.S_ISSOCK(path.stat().st_mode):
                raise OSError(f"{path} is no socket")
        server = socket.socket(socket.AF_UNIX)
        server.settimeout(ANSWER_SECONDS)
        try:
            server.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            server.close()
            if time.monotonic() > end:
                raise
            # It was killed; or it listens in a moment, and has the lock.
            if (lock := protocol.try_lock(path)) is not None:
                with lock:
                    protocol.lock_file(path).unlink()
            time.sleep(0.01)
        else:
            return server
    return None


def _say_cold(reason: str) -> None:
    if reason and launched_rank(os.environ) == 0:
        print(f"cold start: {reason}", file=sys.stderr, flush=True)


def _stand_for(
    pid: int,
    path: Path,
    server: socket.socket,
    lifeline: socket.socket,
    inherited: Sequence[int],
) -> NoReturn:
    """Pass signals on to the fork, and end as it ends."""
    launchers = launchers_of(os.getpid())

    def pass_on(number: int, _: object) -> None:
        # Where the scheduler signals the fork, too, it would get TERM twice.
        if number != signal.SIGTERM or not had_term(pid, launchers, os.environ):
            with suppress(ProcessLookupError):
                # The server has stopped what the fork has started, too.
                send = os.killpg if number == signal.SIGCONT else os.kill
                send(pid, number)

    for it in signal.valid_signals() - NOT_PASSED_ON:
        if signal.getsignal(it) != signal.SIG_IGN:
            signal.signal(it, pass_on)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    with suppress(OSError):  # it has ended already; the server tells its status
        lifeline.sendall(protocol.GO)
    lifeline.close()
    # The launcher sees the end of a rank's files when the fork closes them. Messages
    # of this process need the last one.
    for file in inherited:
        if file != 2:
            os.close(file)
    server.settimeout(None)
    try:
        status = protocol.receive_line(server)["status"]
    except (OSError, ValueError):
        _say_ended(path)
        os._exit(1)
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the fork's core is enough
        number = os.WTERMSIG(status)
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))


def _say_ended(path: Path) -> None:
    """Say that the server has ended, in one of its ranks, and remove what it left."""
    with socket.socket(socket.AF_UNIX) as claim:
        try:
            # A name without a file: mpirun may kill this process at any moment.
            claim.bind(b"\0" + os.fsencode(f"{path}.ended")[-100:])
        except OSError:
            time.sleep(CLAIM_SECONDS / 4)  # another says so; mpirun kills it after this
            return
        text = (
            f"[{launched_label(os.environ)}] the fork server of this host has ended, "
            "and its ranks with it. It was killed, by hand or for lack of memory (see "
            f"dmesg). Start again; with {protocol.SOCKET}=none each rank imports torch"
        )
        with suppress(OSError):
            print(text, file=sys.stderr, flush=True)
            # Its sockets may be closed somewhat before its lock.
            if (lock := protocol.try_lock(path, CLAIM_SECONDS / 4)) is not None:
                with lock:
                    protocol.lock_file(path).unlink()
        time.sleep(CLAIM_SECONDS)
