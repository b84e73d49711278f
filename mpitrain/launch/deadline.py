"""End this process at a time, even while its interpreter's lock is held.

MPI_Init waits in C, and mpi4py keeps the lock over it: no Python code of this process
can run then. A timer of the C library calls a function of C in a thread of its own
(timer_create(2), ``SIGEV_THREAD``); here that function is ``_exit``.
"""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Iterator

_CLOCK_MONOTONIC = 1
_SIGEV_THREAD = 2


class _Event(ctypes.Structure):
    """``struct sigevent`` of Linux, 64 bytes."""

    _fields_ = (
        ("value", ctypes.c_int64),
        ("signo", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("function", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("rest", ctypes.c_byte * 32),
    )


class _When(ctypes.Structure):
    """``struct itimerspec``: once, after so many seconds."""

    _fields_ = (
        ("interval_seconds", ctypes.c_long),
        ("interval_nanoseconds", ctypes.c_long),
        ("seconds", ctypes.c_long),
        ("nanoseconds", ctypes.c_long),
    )


@contextlib.contextmanager
def ends_within(seconds: float, status: int) -> Iterator[None]:
    """End the process with a status if the block takes longer.

    Does nothing where the C library has no such timers.

    Args:
        seconds: How long the block may take.
        status: The exit status.
    """
    c = ctypes.CDLL(None)
    timer = ctypes.c_void_p()
    try:
        leave = ctypes.cast(c._exit, ctypes.c_void_p).value  # noqa: SLF001
        event = _Event(value=status, notify=_SIGEV_THREAD, function=leave)
        made = c.timer_create(
            _CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(timer)
        )
    except AttributeError:  # no symbol of that name
        made = -1
    if made == 0:
        whole = int(seconds)
        when = _When(seconds=whole, nanoseconds=int((seconds - whole) * 1e9))
        c.timer_settime(timer, 0, ctypes.byref(when), None)
    try:
        yield
    finally:
        if made == 0:
            c.timer_delete(timer)
