"""Memory that a step gives back is kept for the next one.

glibc hands much of what is freed back to the system, and large blocks at once. The next
step asks for the same, and the system clears every page of it: a training on CPUs may
spend a third of its time on that (docs/threads.md).
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping

_M_TRIM_THRESHOLD = -1  # malloc.h
_M_MMAP_THRESHOLD = -3

KEEP_BYTES = 1 << 30
"""Of free memory that stay with the process, and of the largest block made of it."""

OLD_BYTES = 1 << 25
"""Of the largest block, where glibc allows no more: half of one of its heaps."""

VARIABLES = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_")
TUNABLES = "glibc.malloc."


def keep_freed_memory(variables: Mapping[str, str]) -> None:
    """Let this process keep what it frees, unless its environment says otherwise.

    Does nothing where the C library is another; where another allocator is preloaded,
    nobody asks glibc's.

    Args:
        variables: The environment; obeyed where it settles glibc's thresholds
            (mallopt(3)).
    """
    asked = any(name in variables for name in VARIABLES)
    if asked or TUNABLES in variables.get("GLIBC_TUNABLES", ""):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    if not mallopt(_M_MMAP_THRESHOLD, KEEP_BYTES):
        mallopt(_M_MMAP_THRESHOLD, OLD_BYTES)
    mallopt(_M_TRIM_THRESHOLD, KEEP_BYTES)
