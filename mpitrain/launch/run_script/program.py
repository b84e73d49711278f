"""A program that is no Python, as a child of its rank: both end together."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from types import FrameType

from mpitrain.errors import LaunchError

FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
"""What the launcher sends to a rank, and the program is meant to get."""

_KILL_GROUP = 'read -r group || exit; read -r end; kill -KILL "-$group"'
"""Kill the process group that the first line of stdin names, when stdin ends."""


class ProgramFailed(LaunchError):
    """The program of this rank ended with a status that is not 0."""


def run_program(path: str, argv: Sequence[str], environ: Mapping[str, str]) -> None:
    """Run a program to its end.

    It has a process group of its own: mpirun signals the whole group of a rank (Open
    MPI 4.1 and 5.0, MPICH 5.0; tried), and a signal that is forwarded besides would
    come twice. A shell in a session of its own kills that group when this process ends
    in any way; it is started, like the program, without a fork of this process's
    memory, which some networks of MPI do not bear.

    Raises:
        ProgramFailed: It ended with a status that is not 0, or by a signal.
    """
    with subprocess.Popen(
        ["/bin/sh", "-c", _KILL_GROUP],
        bufsize=0,
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as killer:
        child = subprocess.Popen(argv, executable=path, env=environ, process_group=0)
        assert killer.stdin is not None
        killer.stdin.write(b"%d\n" % child.pid)
        with _forwarding(child):
            status = child.wait()
        if status == 0:
            killer.kill()  # what the program left running on purpose may stay
    if status != 0:
        raise failure(argv[0], status)


def failure(name: str, status: int) -> ProgramFailed:
    """Return the error, with a shell's exit status, for a status of `subprocess`.

    >>> str(failure("train.sh", 3)), failure("train.sh", -9).exit_status
    ('train.sh ended with status 3', 137)
    >>> print(failure("train.sh", -9))
    train.sh was killed by SIGKILL
    """
    if status > 0:
        error = ProgramFailed(f"{name} ended with status {status}")
        error.exit_status = status
    else:
        try:
            by = signal.Signals(-status).name
        except ValueError:
            by = f"signal {-status}"
        error = ProgramFailed(f"{name} was killed by {by}")
        error.exit_status = 128 - status
    return error


@contextlib.contextmanager
def _forwarding(child: subprocess.Popen[bytes]) -> Iterator[None]:
    """Forward signals to a child and its process group."""

    def forward(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        if child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(child.pid, number)

    for number in FORWARDED:
        signal.signal(number, forward)
    yield
    # Others may have nobody to go to now, but must not end a rank that waits.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
