"""The process that mpirun started, where a fork of the fork server is the rank."""

from __future__ import annotations

import os
import resource
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from typing import Any, NoReturn

from mpitrain.console import HELP_FLAGS
from mpitrain.files import make_private_folder
from mpitrain.launch.env_checks import forget_parent, launched_rank, was_launched
from mpitrain.schedulers.signals import had_term
from mpitrain.warm.process_state import ProcessState, identity
from mpitrain.warm.protocol import (
    GO,
    MAX_FILES,
    NONE,
    SOCKET,
    STATUS,
    receive_line,
    send_line,
    socket_path,
)
from mpitrain.watchdog.process import launchers_of

ANSWER_SECONDS = 10.0  # after which a rank begins cold
COMMANDS = ("train", "run", "sweep")
NOT_PASSED_ON = {
    *(signal.SIGKILL, signal.SIGSTOP, signal.SIGCHLD),
    *(signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL),
}
"""Signals that end the proxy, and so its fork, or that mean nothing to another."""


def start_warm() -> None:
    """Run the command of this rank in a fork of the fork server, and end as it ends.

    Returns if it must begin cold: no server, no rank, or one that is not equal. It also
    returns in the fork.
    """
    words = sys.argv[1:]
    path = socket_path(os.environ)
    if (
        (words and words[0] not in COMMANDS and not words[0].startswith("-"))
        or not HELP_FLAGS.isdisjoint(words)
        or os.environ.get(SOCKET) == NONE
        or not was_launched(os.environ)
        or forget_parent(dict(os.environ))
    ):
        return
    if not os.path.exists(path):  # noqa: PTH110 - False, too, where it may not be seen
        # Not at the top: where a server listens no process of a start needs it.
        from mpitrain.warm.start_server import NotServed, server_of_start

        try:
            of_start = server_of_start(os.environ)
        except NotServed as reason:
            if str(reason):
                _say_cold(str(reason))
            return
        if of_start is None:  # this is a fork: a rank
            return
        path = of_start
    # Closed at the end: a fork that is late ends without having begun.
    with socket.socket(socket.AF_UNIX) as server, ExitStack() as stack:
        try:
            make_private_folder(path.parent)
            server.settimeout(ANSWER_SECONDS)
            server.connect(str(path))
            lifeline, of_fork = map(stack.enter_context, socket.socketpair())
            lifeline.settimeout(ANSWER_SECONDS)
            state = ProcessState.of_this_process()
            answer = _ask(server, state)
            if "cold" not in answer:
                answer = _send_files(server, state, lifeline, of_fork)
        except Exception as error:  # nothing has begun yet
            answer = {"cold": f"no answer of the fork server: {error}"}
        if "cold" not in answer:
            _stand_for(answer["pid"], server, lifeline, state.descriptors)
    _say_cold(answer["cold"])


def _say_cold(reason: str) -> None:
    if launched_rank(os.environ) == 0:
        print(f"cold start: {reason}", file=sys.stderr, flush=True)


def _ask(server: socket.socket, state: ProcessState) -> dict[str, Any]:
    """Send what this process is; return the answer."""
    if len(state.descriptors) >= MAX_FILES:
        found = len(state.descriptors)
        return {"cold": f"{found} files are open; expected fewer than {MAX_FILES}"}
    send_line(server, {"state": vars(state), "identity": identity()})
    return receive_line(server)


def _send_files(
    server: socket.socket,
    state: ProcessState,
    lifeline: socket.socket,
    of_fork: socket.socket,
) -> dict[str, Any]:
    """Send the open files, and the fork's end of the lifeline; return its answer.

    Not before the server has answered: in the queue of one that is stopped they would
    be open for ever, and mpirun would wait for the end of this rank's output.
    """
    with of_fork:
        socket.send_fds(server, [b"f"], [of_fork.fileno(), *state.descriptors])
    return receive_line(lifeline)


def _stand_for(
    pid: int, server: socket.socket, lifeline: socket.socket, inherited: Sequence[int]
) -> NoReturn:
    """Pass signals on to the fork, and end as it ends."""
    launchers = launchers_of(os.getpid())

    def pass_on(number: int, _: object) -> None:
        # Where the scheduler signals the fork, too, it would get TERM twice.
        if number != signal.SIGTERM or not had_term(pid, launchers, os.environ):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    for it in signal.valid_signals() - NOT_PASSED_ON:
        if signal.getsignal(it) != signal.SIG_IGN:
            signal.signal(it, pass_on)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())
    with suppress(OSError):  # it has ended already; the server tells its status
        lifeline.sendall(GO)
    lifeline.close()
    # The launcher sees the end of a rank's files when the fork closes them. Messages
    # of this process need the last one.
    for file in inherited:
        if file != sys.stderr.fileno():
            os.close(file)
    server.settimeout(None)
    data = b""
    with suppress(OSError):
        data = server.recv(STATUS.size, socket.MSG_WAITALL)
    if len(data) < STATUS.size:
        print("the fork server has ended, and its ranks with it", file=sys.stderr)
        sys.stderr.flush()
        os._exit(1)
    (status,) = STATUS.unpack(data)
    if os.WIFSIGNALED(status):
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))  # the fork's core is enough
        number = os.WTERMSIG(status)
        if number not in (signal.SIGKILL, signal.SIGSTOP):
            signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)
    os._exit(os.waitstatus_to_exitcode(status))
