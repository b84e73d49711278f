"""Ranks that have returned, and others that wait for them in a collective.

Under torchrun a rank's end closes its connections, so that gloo fails at once. Here it
waits for the others, and they would wait for it until the group's timeout. So each rank
writes to the store at its end how many collectives it has begun in which group; a rank
that has begun more, and stands still, waits for ever. Only a world of all ranks counts:
torch numbers ranks and names groups anew in each, and others cannot be told apart.
"""

from __future__ import annotations

import contextlib
import json
import sys
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from mpitrain.backend.desync_report import format_positions
from mpitrain.errors import EarlyReturnError
from mpitrain.mpi.world import format_ranges
from mpitrain.torch_compat import (
    Store,
    append_to_store,
    call_at_messages,
    call_before_destroy,
    count_collectives,
)
from mpitrain.watchdog.report import Frame, describe_call

POLL_SECONDS = 2.0  # how often a rank looks whether others have returned
STUCK_SECONDS = 3.0  # standstill in a collective after which a rank is stuck

_KEY = "mpitrain/returned"
_WAITING_KEY = "mpitrain/waiting"


class EarlyReturnMonitor:
    """Which ranks have returned, seen from one rank; watches in a thread."""

    def __init__(
        self,
        store: Store,
        rank: int,
        world_size: int,
        fail: Callable[[EarlyReturnError], object],
    ) -> None:
        self._store, self._rank, self._fail = store, rank, fail
        self._names = [f"rank {number}" for number in range(world_size)]
        self._place = (rank, world_size)
        # Groups with sends and receives: gloo counts them among the collectives, and
        # ranks need not have as many.
        self._with_messages: set[str] = set()
        self._counts: dict[str, int] = {}  # of groups that are destroyed
        self._stop = threading.Event()
        call_before_destroy(self._keep_counts)
        call_at_messages(lambda group: self._with_messages.add(group.group_name))
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def returned(self) -> None:
        """Write to the store that this rank has returned, and stop watching."""
        self._stop.set()
        # Not for ever: a store that is stopped does not answer the thread.
        self._thread.join(POLL_SECONDS)
        with contextlib.suppress(Exception):  # the end will tell
            self._keep_counts()
            self._write(_KEY, self._counts)

    def note(self) -> str:
        """Return a line that names those that have returned; ``""`` for none."""
        ranks = sorted(self._read(_KEY))
        return f"\n{_returned(ranks)} before" if ranks else ""

    def _write(self, key: str, value: Any) -> None:
        append_to_store(self._store, key, json.dumps([self._rank, value]) + "\n")

    def _read(self, key: str) -> dict[int, Any]:
        if not self._store.check([key]):
            return {}
        return dict(map(json.loads, self._store.get(key).decode().splitlines()))

    def _keep_counts(self) -> None:
        self._counts |= self._count_collectives()

    def _count_collectives(self) -> dict[str, int]:
        """Return how many collectives were begun here, by group."""
        counts: dict[str, int] = {}
        if not dist.is_initialized():
            return counts
        if (dist.get_rank(), dist.get_world_size()) != self._place:
            return counts
        for group, name, device, number in count_collectives():
            if group.group_name not in self._with_messages:
                members = format_ranges(sorted(dist.get_process_group_ranks(group)))
                counts[f"{name} {members} {device}"] = number
        return counts

    def _watch(self) -> None:
        before: dict[str, tuple[int, list[int]]] = {}
        since = 0.0
        # The store answers some 1,000 times a second for this at most.
        while not self._stop.wait(max(POLL_SECONDS, len(self._names) / 1000)):
            try:
                returned = self._read(_KEY)
            except Exception:  # the store is gone, and so is the job
                return
            now = {}  # by group: collectives begun here, ranks that began fewer
            counts = self._count_collectives() if returned else {}
            for name, n in counts.items():
                # A rank that never had this group is not missed: its job is healthy.
                ranks = [r for r, theirs in returned.items() if theirs.get(name, n) < n]
                if ranks:
                    now[name] = (n, ranks)
            if now != before:
                before, since = now, time.monotonic()
            elif now and time.monotonic() - since > STUCK_SECONDS:
                away = sorted({r for _, ranks in now.values() for r in ranks})
                self._fail(self._error(away))
                return

    def _error(self, away: list[int]) -> EarlyReturnError:
        main = sys._current_frames().get(threading.main_thread().ident or 0)  # noqa: SLF001
        stack = traceback.extract_stack(main)[::-1]
        frames = [Frame(f.filename, f.lineno or 0, f.name) for f in stack]
        self._write(_WAITING_KEY, describe_call(frames))
        time.sleep(POLL_SECONDS + 0.5)  # others find the same as late as that
        waiting: dict[int, str] = self._read(_WAITING_KEY)
        where = format_positions(self._names, dict.fromkeys(away, "returned") | waiting)
        return EarlyReturnError(
            f"{_returned(away)}, and others wait in a collective:\n{where}"
        )


def _returned(ranks: Sequence[int]) -> str:
    some = f"ranks {format_ranges(ranks)} have" if len(ranks) > 1 else ""
    return f"{some or f'rank {ranks[0]} has'} returned with status 0"
