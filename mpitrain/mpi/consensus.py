"""Decisions of all ranks at one step, of which one rank alone knows the cause.

Such as to stop, after a signal, or to write a checkpoint by the clock. The ranks
combine some numbers by an `Iallreduce` that is started at one step and completed some
steps later, when all have long started it: the gradients between needed every rank.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from mpitrain.mpi.collectives import abandon, barrier, raise_if_cancelled, world_comm
from mpitrain.mpi.world import World

if TYPE_CHECKING:
    from mpi4py import MPI

PERIOD_SECONDS = 0.2  # about how often the ranks exchange their numbers
MAX_PIECES = 32  # of work between two exchanges: the next may be slower
POLL_SECONDS = 0.0001


class Consensus:
    """The maximum over all ranks of some numbers, exchanged in the background."""

    def __init__(self, world: World, count: int, kinds: int) -> None:
        self._comm: MPI.Intracomm | None = None
        if world.world_size > 1:
            barrier(world_comm())  # a wait that can be cancelled
            self._comm = world_comm().Dup()
        self._mine: npt.NDArray[np.int64] = np.zeros(count + kinds, np.int64)
        # Alone, its own numbers are the maximum of all.
        self._all = self._mine if self._comm is None else np.zeros_like(self._mine)
        self._request: MPI.Request | None = None
        self._is_started = False
        self._micros = [0] * kinds  # per piece, as all have agreed; 0: unknown
        self._passed = 0.0
        self._last = time.monotonic()
        self._seconds, self._pieces = [0.0] * kinds, [0] * kinds

    def is_due(self, kind: int) -> bool:
        """Count a piece of work, and return whether to call `exchange` now.

        Equal on all ranks, which call it at the same places: it depends on the time per
        piece that all have agreed on.
        """
        now = time.monotonic()
        self._seconds[kind] += now - self._last
        self._pieces[kind] += 1
        self._last = now
        # By what all have agreed on: ranks' own clocks would decide differently, and
        # one would wait in an exchange that the others do not make.
        self._passed += max(self._micros[kind], 1e6 * PERIOD_SECONDS / MAX_PIECES)
        return not self._micros[kind] or self._passed >= 1e6 * PERIOD_SECONDS

    def exchange(self, mine: Sequence[int]) -> list[int] | None:
        """Start an exchange, and return the result of the one before.

        Collective over all ranks; waits only for ranks that are far behind.
        """
        found = self._complete()
        if found is not None:
            for kind, micros in enumerate(found[len(mine) :]):
                # 0: no rank has had such a piece since; the last number still holds.
                self._micros[kind] = micros or self._micros[kind]
            found = found[: len(mine)]
        self._passed = 0.0
        micros_per_piece = [
            max(1, int(1e6 * seconds / num)) if num else 0
            for seconds, num in zip(self._seconds, self._pieces, strict=True)
        ]
        kinds = len(micros_per_piece)
        self._seconds, self._pieces = [0.0] * kinds, [0] * kinds
        # In place: MPI has this address. The exchange that read it before is complete.
        self._mine[:] = [*mine, *micros_per_piece]
        self._is_started = True
        if self._comm is not None:
            from mpi4py import MPI

            self._request = self._comm.Iallreduce(self._mine, self._all, MPI.MAX)
        return found

    def forget(self) -> None:
        """Forget the time per piece: other work begins. Collective over all ranks."""
        self._micros = [0] * len(self._micros)

    def close(self) -> None:
        """Complete the exchange under way and free it. Collective over all ranks."""
        self._complete()
        if self._comm is not None:
            self._comm.Free()
            self._comm = None

    def abandon(self) -> None:
        """Give up after an error: other ranks may never come to the exchange; local."""
        abandon(self._request, self._comm, self._mine, self._all)
        self._comm = self._request = None

    def _complete(self) -> list[int] | None:
        if not self._is_started:
            return None
        self._is_started = False
        while self._request is not None and not self._request.Test():
            raise_if_cancelled()
            time.sleep(POLL_SECONDS)
        self._request = None
        return [int(number) for number in self._all]
