"""What all ranks agree on while they work, without waiting for each other.

Some decisions must fall at the same step on every rank, though one rank alone knows of
them: to stop, since its signal came; to write a checkpoint, since its clock says so.
Every now and then the ranks tell each other some numbers by an `Iallreduce` that is
begun at one step and looked at some steps later, when all must long have begun it: the
gradients of the steps between needed every rank.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from mpitrain.topology import working_ranks
from mpitrain.world import World

if TYPE_CHECKING:
    from mpi4py import MPI

PERIOD_SECONDS = 0.2
"""How often they tell each other, about."""

MOST_PIECES = 32
"""How many pieces of work may lie between: the next ones may be much slower."""

NAP_SECONDS = 0.0001


class Consensus:
    """The largest of each number that the ranks have.

    Collective over all ranks.

    Args:
        world: Where this process stands.
        count: How many numbers.
        kinds: How many kinds of work there are, such as steps and evaluations.
    """

    def __init__(self, world: World, count: int, kinds: int) -> None:
        self._comm = working_ranks().Dup() if world.world_size > 1 else None
        self._mine: npt.NDArray[np.int64] = np.zeros(count + kinds, np.int64)
        self._all = np.zeros_like(self._mine)
        self._request: MPI.Request | None = None
        self._is_begun = False
        self._micros = [0] * kinds  # that a piece takes, as all have agreed; 0: unknown
        self._passed = 0.0
        self._last = time.monotonic()
        self._seconds, self._pieces = [0.0] * kinds, [0] * kinds

    def is_due(self, kind: int) -> bool:
        """Count a piece of work, and tell whether `exchange` is to be called now.

        Call it at the same places on all ranks; equal on all of them. No clock of a
        rank's own decides, but what all have agreed that such a piece takes.

        Args:
            kind: Which kind of work has just been done.
        """
        now = time.monotonic()
        self._seconds[kind] += now - self._last
        self._pieces[kind] += 1
        self._last = now
        self._passed += max(self._micros[kind], 1e6 * PERIOD_SECONDS / MOST_PIECES)
        return not self._micros[kind] or self._passed >= 1e6 * PERIOD_SECONDS

    def exchange(self, mine: Sequence[int]) -> list[int] | None:
        """Tell the others some numbers, and hear the last ones that all have told.

        Collective over all ranks; waits for none that is not far behind.

        Args:
            mine: This rank's numbers, as they are now.

        Returns:
            The largest of each, as they were at the last call; ``None`` at the first.
        """
        heard = self._hear()
        if heard is not None:
            for kind, micros in enumerate(heard[len(mine) :]):
                self._micros[kind] = micros or self._micros[kind]
            heard = heard[: len(mine)]
        self._passed = 0.0
        taken = [
            max(1, int(1e6 * seconds / num)) if num else 0
            for seconds, num in zip(self._seconds, self._pieces, strict=True)
        ]
        kinds = len(taken)
        self._seconds, self._pieces = [0.0] * kinds, [0] * kinds
        self._mine[:] = [*mine, *taken]
        self._is_begun = True
        if self._comm is not None:
            from mpi4py import MPI

            self._request = self._comm.Iallreduce(self._mine, self._all, MPI.MAX)
        return heard

    def forget(self) -> None:
        """Take the time that work takes for unknown: other work begins.

        Collective over all ranks.
        """
        self._micros = [0] * len(self._micros)

    def close(self) -> None:
        """Hear what is under way, and take it down.

        Collective over all ranks.
        """
        self._hear()
        if self._comm is not None:
            self._comm.Free()
            self._comm = None

    def _hear(self) -> list[int] | None:
        if not self._is_begun:
            return None
        self._is_begun = False
        if self._request is None:
            return [int(number) for number in self._mine]
        while not self._request.Test():
            time.sleep(NAP_SECONDS)
        self._request = None
        return [int(number) for number in self._all]
