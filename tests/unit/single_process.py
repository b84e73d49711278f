"""A communicator of one process, without MPI."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mpitrain.mpi.shared_arrays import Communicator
from mpitrain.mpi.topology import Node
from mpitrain.mpi.world import World

LONE = World(
    rank=0,
    world_size=1,
    local_rank=0,
    local_world_size=1,
    node_rank=0,
    nodes=(Node(hostname="here", ranks=(0,)),),
)


class SingleProcess(Communicator):
    """Answers what one process may ask."""

    def __init__(self) -> None:
        pass

    def on_rank_zero(self, action: Callable[[], Any], doing: str) -> Any:
        del doing
        return action()

    def allgather(self, mine: Any) -> list[Any]:
        return [mine]

    gather = allgather

    def load_shared(self, make: Callable[[], Any], doing: str) -> dict[str, Any]:
        del doing
        return dict(make())
