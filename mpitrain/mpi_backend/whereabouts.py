"""Where the ranks of a group are when one of its operations fails.

MPI knows neither who is missing nor what others do. So each rank that fails says where
it was, in the store of torch's group, and hears for a moment what others say.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Sequence
from datetime import timedelta

from torch._C._distributed_c10d import Store

HEAR_SECONDS = 2.0
"""How long a rank hears: others began to wait, and so give up, at another time."""


def tell(store: Store, rank: int, names: Sequence[str], where: str) -> str:
    """Say where this rank is; return where the others are.

    Args:
        store: The group's own.
        rank: This process in the group.
        names: Each rank of the group in words.
        where: In words, on one line.

    Returns:
        Lines for a message; ends in time, though the store may not answer.
    """
    keys = [f"where/{other}" for other in range(len(names))]
    heard: list[str | None] = []

    def ask() -> None:
        with contextlib.suppress(RuntimeError):  # its server is gone
            store.set(keys[rank], where)
            with contextlib.suppress(RuntimeError):  # some say nothing
                store.wait(keys, timedelta(seconds=HEAR_SECONDS))
            for key in keys:
                heard.append(store.get(key).decode() if store.check([key]) else None)

    # In a thread: a store does one thing at a time, and its server may be gone.
    asking = threading.Thread(target=ask, name="mpi4py whereabouts", daemon=True)
    asking.start()
    asking.join(2 * HEAR_SECONDS)
    if len(heard) < len(names):
        return "Who is missing is not known: rank zero's store does not answer."
    return described(names, heard)


def described(names: Sequence[str], heard: Sequence[str | None]) -> str:
    """Return what was heard, a line for all who say the same.

    >>> print(described(["rank 0", "rank 1", "rank 2"], ["barrier", None, "barrier"]))
      rank 0, rank 2: barrier
      nothing was heard from rank 1: it did not come, or is past that
    """
    by_text: dict[str | None, list[str]] = {}
    for name, text in zip(names, heard, strict=True):
        by_text.setdefault(text, []).append(name)
    silent = by_text.pop(None, [])
    lines = [f"  {', '.join(those)}: {text}" for text, those in by_text.items()]
    if silent:
        lines.append(
            f"  nothing was heard from {', '.join(silent)}: "
            f"{'it' if len(silent) == 1 else 'they'} did not come, or "
            f"{'is' if len(silent) == 1 else 'are'} past that"
        )
    return "\n".join(lines)
