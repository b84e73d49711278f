"""Which ranks train a trial."""

from __future__ import annotations

from collections.abc import Collection

from mpitrain.mpi.world import World


class Placement:
    """The ranks of a job, free or busy.

    A trial that fits on one node is not spread over several, so that its result does
    not depend on what runs beside it; a larger one takes whole nodes.
    """

    def __init__(self, world: World, *, share_gpus: bool = False) -> None:
        self._nodes = [node.ranks for node in world.nodes]
        self._gpus = {
            rank: (number, node.gpus[at])
            for number, node in enumerate(world.nodes)
            for at, rank in enumerate(node.ranks)
            if node.gpus and not share_gpus
        }
        self._busy: set[int] = set()

    @property
    def num_busy(self) -> int:
        """How many ranks have a trial."""
        return len(self._busy)

    def take(self, count: int) -> list[int] | None:
        """Return ranks for a trial, in node order; ``None`` if it has to wait."""
        used = {self._gpus.get(rank) for rank in self._busy} - {None}
        free = [
            [r for r in node if r not in self._busy and self._gpus.get(r) not in used]
            for node in self._nodes
        ]
        ranks: list[int] = []
        if count <= max(map(len, self._nodes)):
            fits = [node for node in free if len(node) >= count]
            # Where the least room is left, so that larger trials find theirs.
            ranks = min(fits, key=len, default=[])[:count]
        else:
            for node, here in zip(self._nodes, free, strict=True):
                wanted = min(count - len(ranks), len(node))
                if len(here) >= wanted:
                    ranks += here[:wanted]
        if len(ranks) < count:
            return None
        self._busy.update(ranks)
        return ranks

    def give_back(self, ranks: Collection[int]) -> None:
        """Let ranks take other trials."""
        self._busy.difference_update(ranks)
