"""The ranks of a part of the job, and how the fixture `parts` numbers such parts."""

from __future__ import annotations

import itertools

from mpitrain.mpi.world import World

numbers = itertools.count()  # of sub-worlds in this session, equal on all ranks


def in_node_order(world: World) -> list[int]:
    return [rank for node in world.nodes for rank in node.ranks]
