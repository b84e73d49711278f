"""How a rank waits for others on its node: a short look, then asleep in the kernel.

A rank that spins takes the core from the rank it waits for, wherever there are more
ranks than cores. Linux can sleep on a word of shared memory (futex, see futex(2));
elsewhere we sleep for short times.
"""

from __future__ import annotations

import ctypes
import os
import platform
import sys
import threading
import time

_FUTEX_NUMBERS = {"x86_64": 202, "aarch64": 98, "riscv64": 98, "ppc64le": 221}
_WAIT, _WAKE = 0, 1
_EVERYBODY = 0x7FFFFFFF
_NUMBER = _FUTEX_NUMBERS.get(platform.machine()) if sys.platform == "linux" else None
_IS_X86 = platform.machine() in ("x86_64", "AMD64")


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


class Word:
    """A 32-bit word of shared memory that ranks may sleep on.

    Args:
        memory: Shared by all who wait; mapped for as long as this lives.
        offset: Of the word in it, in bytes; a multiple of 4.
    """

    def __init__(self, memory: memoryview, offset: int) -> None:
        self._word = ctypes.c_uint32.from_buffer(memory, offset)
        self._address = ctypes.c_void_p(ctypes.addressof(self._word))
        if _NUMBER is not None:
            # Not PyDLL: others of this process go on while this thread sleeps.
            self._system = ctypes.CDLL(None).syscall
            self._number = ctypes.c_long(_NUMBER)

    @property
    def value(self) -> int:
        """What stands there now."""
        return self._word.value

    @value.setter
    def value(self, value: int) -> None:
        self._word.value = value

    def wake(self) -> None:
        """Wake all who sleep on it."""
        if _NUMBER is not None:
            self._system(self._number, self._address, _WAKE, _EVERYBODY, None)

    def sleep_while(self, value: int, seconds: float) -> None:
        """Sleep until it may have changed.

        Args:
            value: Returns at once if another stands there.
            seconds: Longest time; it may return before without a reason.
        """
        if _NUMBER is None:
            time.sleep(min(seconds, 0.0002))
            return
        whole = int(seconds)
        most = _Timespec(whole, int((seconds - whole) * 1e9))
        self._system(
            *(self._number, self._address, _WAIT, value & 0xFFFFFFFF),
            ctypes.byref(most),
        )


class Fence:
    """Makes what this processor wrote be seen before what it writes or reads next."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        if not _IS_X86:
            from mpi4py import MPI

            self._window = MPI.Win.Create(None, comm=MPI.COMM_SELF)

    def __call__(self) -> None:
        """Let all memory operations before this come before those after it."""
        if _IS_X86:
            # Taking a lock is a `lock cmpxchg`, which is a full barrier; stores are
            # seen in their order anyway (Intel SDM 3A, 9.2.2).
            self._lock.acquire(blocking=False)
            self._lock.release()
        else:
            self._window.Sync()


def give_way() -> None:
    """Let another process of this core run."""
    os.sched_yield()
