"""The one process of a unit test: its world and its communicator, without MPI."""

from __future__ import annotations

from typing import Any, cast

from mpitrain.mpi.shared_arrays import Communicator
from mpitrain.mpi.single_process import SingleProcess
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


def lone_communicator() -> Communicator:
    """Return a communicator of this process alone."""
    return Communicator(cast(Any, SingleProcess()), LONE)
