"""Which ranks are missing when a group is created, or when an operation fails.

MPI knows neither. The ranks exchange it through the store of torch's group.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Mapping, Sequence
from datetime import timedelta

from mpitrain.backend.op_queue import GroupError
from mpitrain.torch_compat import Store, append_to_store

COLLECT_SECONDS = 1.5  # how long to collect reports: ranks give up at different times
STORE_SECONDS = 2.5  # how long the store may take for the rest

_ALL_PRESENT = "all present"


def connect(
    store: Store, rank: int, ranks: Sequence[int], name: str, timeout_seconds: float
) -> None:
    """Wait, asleep, until all members of a new group have arrived.

    MPI creates a communicator in a call that cannot time out, and in which a rank spins
    on a core that the last one may need. `ranks` are the members in the default group.
    If some do not arrive, all that do raise a GroupError, late ones included.
    """
    store.set(f"arrived/{rank}", "")
    if store.add("number", 1) >= len(ranks):
        # Only if nobody has given up: then the last one raises, too.
        store.compare_set("outcome", "", _ALL_PRESENT)
    try:
        store.wait(["outcome"], timedelta(seconds=timeout_seconds))
    except RuntimeError:  # the first outcome holds for all ranks
        arrived = [store.check([f"arrived/{place}"]) for place in range(len(ranks))]
        missing = [r for r, is_here in zip(ranks, arrived, strict=True) if not is_here]
        names = ", ".join(f"rank {r}" for r in missing)
        store.compare_set("outcome", "", names or _ALL_PRESENT)
    outcome = store.get("outcome").decode()
    if outcome != _ALL_PRESENT:
        raise GroupError(
            f"{outcome} did not arrive within {timeout_seconds:g} s to create group "
            f"{name}.\nExpected all its ranks to create the same groups in one order."
        )


def desync_report(store: Store, rank: int, names: Sequence[str], position: str) -> str:
    """Report this rank's position, a line; return those of all ranks, in time."""
    answers: list[str] = []

    def exchange() -> None:
        with contextlib.suppress(RuntimeError):  # the store's server is gone
            append_to_store(store, "positions", json.dumps([rank, position]) + "\n")
            if store.add("number of positions", 1) >= len(names):
                store.set("all positions", "")
            with contextlib.suppress(RuntimeError):  # some ranks report nothing
                store.wait(["all positions"], timedelta(seconds=COLLECT_SECONDS))
            answers.append(store.get("positions").decode())

    # A store serves one call at a time, and its server may be gone: not in this thread.
    thread = threading.Thread(target=exchange, name="mpi4py desync report", daemon=True)
    thread.start()
    thread.join(COLLECT_SECONDS + STORE_SECONDS)
    if not answers:
        return "Unknown which ranks are missing: torch's store did not answer in time."
    return format_positions(names, dict(map(json.loads, answers[0].splitlines())))


def format_positions(names: Sequence[str], positions: Mapping[int, str]) -> str:
    """Return a line for all ranks at the same position.

    >>> print(format_positions(["rank 0", "rank 1"], {0: "barrier"}))
      rank 0: barrier
      no report from rank 1: not arrived, already past it, or still waiting
    """
    by_position: dict[str | None, list[str]] = {}
    for rank, name in enumerate(names):
        by_position.setdefault(positions.get(rank), []).append(name)
    silent = by_position.pop(None, [])
    lines = [f"  {', '.join(ranks)}: {text}" for text, ranks in by_position.items()]
    if silent:
        lines.append(
            f"  no report from {', '.join(silent)}: not arrived, already past it, or "
            "still waiting"
        )
    return "\n".join(lines)
