"""How a process ends: its status, its message, and the very last moment."""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import io
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import NoReturn

from mpitrain.errors import MpitrainError, UsageError
from mpitrain.launch.env_checks import STATUS_FILE, launched_rank

LOST_OUTPUT = 120
"""Status of a process whose last flush of stdout fails, as Python has it."""


def exit_status(error: BaseException) -> int:
    """Return the status, 0 to 255, with which a process ends because of an error."""
    if isinstance(error, MpitrainError):
        return error.exit_status
    if isinstance(error, KeyboardInterrupt):
        return 130
    code = error.code if isinstance(error, SystemExit) else 1
    if isinstance(code, int):
        # The system keeps eight bits, of which a failure such as 256 has none.
        return code & 0xFF or int(code != 0)
    return 0 if code is None else 1


def is_failing() -> bool:
    """Return whether an error is on its way out of this process, or a status not 0."""
    error = sys.exc_info()[1]
    return error is not None and exit_status(error) != 0


def error_message(error: BaseException, label: str) -> str:
    """Return an error as the screen shows it.

    The traceback comes first, where it is not the user's mistake, then one line that
    begins with `label`, such as ``[rank 2/4 gpu03]``, unless all ranks raised it.
    """
    is_collective = getattr(error, "is_collective", False)
    if isinstance(error, UsageError) and is_collective:
        return str(error)
    if isinstance(error, SystemExit):
        return f"[{label}] sys.exit({error.code!r})"
    if isinstance(error, KeyboardInterrupt):
        return f"[{label}] interrupted by Ctrl-C (SIGINT)"
    line = f"{type(error).__name__}: {error}"
    if not is_collective:
        line = f"[{label}] {line}"
    if isinstance(error, MpitrainError):
        return line
    frames = _from_main(error.__traceback__)
    trace = "".join(traceback.format_exception(type(error), error, frames)).rstrip()
    return f"{trace}\n{line}"


def _from_main(trace: TracebackType | None) -> TracebackType | None:
    """Leave out our own frames below those of a script that we run."""
    found = trace
    while found and found.tb_frame.f_globals["__name__"].startswith("mpitrain."):
        found = found.tb_next
    if found and found.tb_frame.f_globals["__name__"] == "__main__":
        return found
    return trace


def is_consequence(error: BaseException) -> bool:
    """Whether an error looks like another rank's death seen from here.

    torch.distributed raises its own classes for the store and NCCL, and a bare
    RuntimeError for gloo, whose text names the source file or the peer.
    """
    known = getattr(error, "is_consequence", None)  # our backend sets it
    if known is not None:
        return bool(known)
    # Not imported for this: without it the error cannot be one of its own.
    torch_distributed = sys.modules.get("torch.distributed")
    if torch_distributed is not None and isinstance(error, torch_distributed.DistError):
        return True
    signs = ("gloo", "closed by peer", "reset by peer", "Broken pipe")
    return isinstance(error, RuntimeError | ConnectionError) and any(
        sign in str(error) for sign in signs
    )


def write_status(status: int) -> None:
    """Tell `supervise` the status with which rank zero ends."""
    file = os.environ.get(STATUS_FILE)
    if file and launched_rank(os.environ) == 0:
        with contextlib.suppress(OSError):
            Path(file).write_text(f"{status}\n")


def flush() -> None:
    """Flush stdout and stderr."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def flush_output() -> Exception | None:
    """Flush stdout; return the error where that fails."""
    if sys.stdout is not None:
        try:
            # As Python does at its end: a script's object may have no `closed`.
            if not getattr(sys.stdout, "closed", False):
                sys.stdout.flush()
        except Exception as error:
            return error
    return None


def ignore_children() -> None:
    """Let a child's death change nothing any more."""
    # Where DataLoader has workers, torch raises an error wherever the main thread is
    # when one of them is killed: in the middle of a rank's last message, too.
    if threading.current_thread() is threading.main_thread():
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)


_FILE: type = io.IOBase.__mro__[1]
"""The class of every file, in C; `io.IOBase` would be asked in Python, one by one, and
knows those of `_pyio`, too."""


def finish_python() -> None:
    """Join threads and run `atexit`, as the interpreter does before it ends."""
    threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001
    atexit._run_exitfuncs()  # noqa: SLF001 - os._exit would skip both


def exit_now(status: int) -> NoReturn:
    """End this process without freeing all modules. Collective, where MPI was started.

    torch's own threads were seen to die of that ("terminate called without an active
    exception"; docs/decisions/0004). Threads are waited for, `atexit` runs, open files
    are flushed, MPI is finalized.
    """
    finish_python()
    finish_mpi(status)


def finish_mpi(status: int) -> NoReturn:
    """Finalize MPI and end this process; nothing of Python's is waited for."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()
    if not status and (error := flush_output()) is not None:
        status = LOST_OUTPUT
        reason = getattr(error, "strerror", None) or error
        text = f"the last lines of stdout could not be written: {reason}"
        with contextlib.suppress(Exception):  # stderr is closed, or full as well
            print(f"error: {text}; status {status}", file=sys.stderr, flush=True)
    gc.unfreeze()  # get_objects leaves out what is frozen, as `tools/command` does
    for found in gc.get_objects():
        if issubclass(type(found), _FILE):
            with contextlib.suppress(Exception):  # closed, or read only
                found.flush()
    # C's exit, not os._exit: MPICH says goodbye to its mpiexec in a handler of C's end,
    # and takes a process without goodbye for dead (4 in 10 tries). Not PyDLL: a thread
    # of gloo that wants Python's lock must get it. In a thread of its own: C's end
    # would free what belongs to the main thread, and DTensor's cache there frees Python
    # objects without the lock ("PyThreadState_Get"; torch 2.15, by gdb).
    last = threading.Thread(target=ctypes.CDLL(None).exit, args=(status,))
    last.start()
    last.join()
    os._exit(status)


class _SigEvent(ctypes.Structure):
    """``struct sigevent`` of Linux, 64 bytes."""

    _fields_ = (
        ("value", ctypes.c_int64),
        ("signo", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("function", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("rest", ctypes.c_byte * 32),
    )


@contextlib.contextmanager
def exit_after(seconds: float, status: int) -> Iterator[None]:
    """End this process if the block takes longer, even while Python's lock is held.

    MPI_Init waits in C, and mpi4py keeps the lock over it: no Python code can run then.
    So a timer of the C library (timer_create(2), ``SIGEV_THREAD``) calls ``_exit`` in a
    thread of its own. Does nothing where the C library has no such timers.
    """
    c = ctypes.CDLL(None)
    timer = ctypes.c_void_p()
    clock_monotonic, sigev_thread = 1, 2
    try:
        # `_exit` gets the value of the event, which is the status, as its argument.
        leave = ctypes.cast(c._exit, ctypes.c_void_p).value  # noqa: SLF001
        event = _SigEvent(value=status, notify=sigev_thread, function=leave)
        made = c.timer_create(clock_monotonic, ctypes.byref(event), ctypes.byref(timer))
    except AttributeError:  # no symbol of that name
        made = -1
    if made == 0:
        # struct itimerspec: no interval, then seconds and nanoseconds.
        nanoseconds = int(seconds % 1 * 1e9)
        when = (ctypes.c_long * 4)(0, 0, int(seconds), nanoseconds)
        c.timer_settime(timer, 0, when, None)
    try:
        yield
    finally:
        if made == 0:
            c.timer_delete(timer)
