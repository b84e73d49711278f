"""Which sidecar each rank reports to, where the ranks are many."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, cast

import pytest

from mpitrain.launch import watchdog_tree
from mpitrain.launch.watchdog_tree import connect_watchdogs
from mpitrain.mpi.world import World

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpitrain.watchdog.client import Watchdog

pytestmark = pytest.mark.mpi

FAN_OUT = 2


@dataclass
class Sidecar:
    """Records what a rank's sidecar is told."""

    rank: int
    is_connected: bool = False
    listens_at: str | None = None
    places: list[tuple[str, int]] = field(default_factory=list)
    token: str = ""

    def listen(self, address: str, token: str, rank: int, world_size: int) -> int:
        assert rank == self.rank
        self.listens_at, self.token = address, token
        return 1000 + rank

    def connect(
        self, places: Sequence[tuple[str, int]], token: str, rank: int, world_size: int
    ) -> None:
        assert rank == self.rank
        self.places, self.token = list(places), token


def connected(comm: MPI.Intracomm, world: World, on_node: MPI.Intracomm) -> Sidecar:
    sidecar = Sidecar(world.rank)
    address, watchdog = f"10.0.0.{world.node_rank}", cast("Watchdog", sidecar)
    connect_watchdogs(comm, watchdog, world, on_node, address)
    assert len(set(comm.allgather(sidecar.token))) == 1
    return sidecar


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if these ranks were more than rank zero's sidecar takes alone."""
    monkeypatch.setattr(watchdog_tree, "MAX_DIRECT_LINKS", 0)
    monkeypatch.setattr(watchdog_tree, "FAN_OUT", FAN_OUT)


def ports(sidecar: Sidecar) -> list[int]:
    return [port - 1000 for _, port in sidecar.places]


def test_few_ranks_report_to_rank_zero(
    comm: MPI.Intracomm, world: World, comm_self: MPI.Intracomm, apart: World
) -> None:
    for where, on_node in ((world, comm), (apart, comm_self)):
        sidecar = connected(comm, where, on_node)
        assert ports(sidecar) == ([] if world.is_rank_zero else [0])
        assert (sidecar.listens_at is not None) == world.is_rank_zero


def test_many_nodes_report_to_one_of_their_group_and_then_to_rank_zero(
    many: None, comm: MPI.Intracomm, comm_self: MPI.Intracomm, apart: World
) -> None:
    sidecar = connected(comm, apart, comm_self)
    rank, hub = apart.rank, apart.rank - apart.rank % FAN_OUT
    # The group of rank zero, and a group of one node, need nobody between.
    has_hub = 0 < hub < apart.world_size - 1
    assert ports(sidecar) == [hub] * (has_hub and hub != rank) + [0] * (rank > 0)
    if sidecar.places and has_hub and hub != rank:
        assert sidecar.places[0][0] == f"10.0.0.{hub}"  # where other nodes reach it
    if has_hub and hub == rank:
        assert sidecar.listens_at == f"10.0.0.{rank}"


def test_the_ranks_of_a_node_report_through_its_first(
    many: None, comm: MPI.Intracomm, apart: World
) -> None:
    """Rank zero's node has rank zero; the others are on one other node."""
    rank, size = apart.rank, apart.world_size
    nodes = [apart.nodes[0]]
    if size > 1:
        nodes.append(replace(apart.nodes[1], ranks=tuple(range(1, size))))
    world = replace(
        apart,
        nodes=tuple(nodes),
        node_rank=min(rank, 1),
        local_rank=max(rank - 1, 0),
        local_world_size=1 if rank == 0 else size - 1,
    )
    on_node = comm.Split(min(rank, 1), rank)
    try:
        sidecar = connected(comm, world, on_node)
    finally:
        on_node.Free()
    assert ports(sidecar) == [1] * (rank > 1) + [0] * (rank > 0)
    if rank > 1:
        assert sidecar.places[0][0] == "127.0.0.1"


def test_a_sidecar_that_cannot_listen_is_left_out(
    many: None,
    comm: MPI.Intracomm,
    comm_self: MPI.Intracomm,
    apart: World,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    listen = Sidecar.listen

    def fails(self: Sidecar, *args: Any) -> int:
        if self.rank:
            raise OSError("no sockets")
        return listen(self, *args)

    monkeypatch.setattr(Sidecar, "listen", fails)
    sidecar = connected(comm, apart, comm_self)
    assert ports(sidecar) == [0] * (apart.rank > 0)
    assert ("hangs may be seen late" in caplog.text) == (apart.rank > 0)
