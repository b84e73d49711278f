"""Where the ranks of a group are when one of its operations fails.

MPI knows neither who is missing nor what others do. So each rank that fails says where
it was, in the store of torch's group, and hears for a moment what others say.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Mapping, Sequence
from datetime import timedelta

from torch._C._distributed_c10d import Store

HEAR_SECONDS = 1.5
"""How long a rank hears: others began to wait, and so give up, at another time."""

ANSWER_SECONDS = 2.5
"""How long the store may take for the rest."""


def tell(store: Store, rank: int, names: Sequence[str], where: str) -> str:
    """Say where this rank is; return where the others are.

    Args:
        store: The group's own; its kind must have `append` (TCP, not files).
        rank: This process in the group.
        names: Each rank of the group in words.
        where: In words, on one line.

    Returns:
        Lines for a message; ends in time, though the store may not answer.
    """
    heard: list[str] = []

    def ask() -> None:
        with contextlib.suppress(RuntimeError):  # its server is gone
            # torch's stub does not know of it
            store.append(  # type: ignore[attr-defined]
                "where", json.dumps([rank, where]) + "\n"
            )
            if store.add("number of where", 1) >= len(names):
                store.set("all of where", "")
            with contextlib.suppress(RuntimeError):  # some say nothing
                store.wait(["all of where"], timedelta(seconds=HEAR_SECONDS))
            heard.append(store.get("where").decode())

    # In a thread: a store does one thing at a time, and its server may be gone.
    asking = threading.Thread(target=ask, name="mpi4py whereabouts", daemon=True)
    asking.start()
    asking.join(HEAR_SECONDS + ANSWER_SECONDS)
    if not heard:
        return "Who is missing is not known: torch's store did not answer in time."
    return described(names, dict(map(json.loads, heard[0].splitlines())))


def described(names: Sequence[str], heard: Mapping[int, str]) -> str:
    """Return what was heard, a line for all who say the same.

    >>> print(described(["rank 0", "rank 1", "rank 2"], {0: "barrier", 2: "barrier"}))
      rank 0, rank 2: barrier
      nothing was heard from rank 1: not come, past that, or still waiting
    """
    by_text: dict[str | None, list[str]] = {}
    for rank, name in enumerate(names):
        by_text.setdefault(heard.get(rank), []).append(name)
    silent = by_text.pop(None, [])
    lines = [f"  {', '.join(those)}: {text}" for text, those in by_text.items()]
    if silent:
        lines.append(
            f"  nothing was heard from {', '.join(silent)}: not come, past that, or "
            "still waiting"
        )
    return "\n".join(lines)
