"""Where rank zero is reached, with every rank as a node of its own."""

from __future__ import annotations

import os
import socket
from typing import TYPE_CHECKING

import pytest

from mpitrain.errors import MpitrainError
from mpitrain.launch.rendezvous import reachability, select
from mpitrain.launch.rendezvous.interfaces import find_interfaces
from mpitrain.mpi.collectives import barrier
from mpitrain.mpi.world import World

if TYPE_CHECKING:
    from mpi4py import MPI

pytestmark = pytest.mark.mpi


def outside_addresses() -> list[str]:
    offered = select.addresses_to_offer(find_interfaces(), None, is_alone=False)
    return [address for address, _ in offered]


def test_on_one_node_the_store_listens_on_loopback_alone(world: World) -> None:
    if world.num_nodes > 1:
        return
    assert world.master_addr == "127.0.0.1"
    assert os.environ["GLOO_SOCKET_IFNAME"] == "lo"
    assert os.environ["NCCL_SOCKET_IFNAME"] == "=lo"
    for address in outside_addresses():
        with pytest.raises(OSError, match=r"refused|unreachable|timed out"):
            socket.create_connection((address, world.master_port), timeout=1).close()


def test_ranks_of_several_nodes_meet_at_an_address_all_reach(
    comm: MPI.Intracomm, apart: World, comm_self: MPI.Intracomm
) -> None:
    """On the machine's real network."""
    if comm.size > 1 and not outside_addresses():
        with pytest.raises(MpitrainError, match="no address of rank zero's host"):
            select.find_rendezvous(comm, comm_self, apart)
        return
    found = select.find_rendezvous(comm, comm_self, apart)
    assert len(set(comm.allgather((found.address, found.port, found.why)))) == 1
    assert (found.listener is not None) == (comm.rank == 0)
    assert found.own_address in found.interface.addresses
    barrier(comm)
    if found.listener is not None:
        assert found.listener.getsockname()[:2] == (found.address, found.port)
        found.listener.close()


def test_the_interface_that_was_asked_for_is_taken(
    comm: MPI.Intracomm, apart: World, comm_self: MPI.Intracomm
) -> None:
    found = select.find_rendezvous(comm, comm_self, apart, "lo")
    assert (found.address, found.interface.name) == ("127.0.0.1", "lo")
    assert found.own_address in found.interface.addresses
    if found.listener is not None:
        found.listener.close()


def test_an_interface_that_is_not_there_is_one_error(
    comm: MPI.Intracomm, apart: World, comm_self: MPI.Intracomm
) -> None:
    hosts = ", ".join(f"h{rank}" for rank in range(comm.size))
    with pytest.raises(MpitrainError, match=f"{hosts}, where there is .*lo") as caught:
        select.find_rendezvous(comm, comm_self, apart, "nosuch0")
    assert "no interface 'nosuch0'" in str(caught.value)
    assert caught.value.reporting_rank == 0


def test_no_common_address_is_one_error_with_the_table(
    comm: MPI.Intracomm,
    apart: World,
    comm_self: MPI.Intracomm,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if comm.size == 1:
        return  # a world of one has nobody who could not reach it
    monkeypatch.setattr(
        reachability, "connect", lambda *_, **__: ("", reachability.TIMED_OUT)
    )
    with pytest.raises(MpitrainError, match=r"lo, loopback\): timed out: h1") as caught:
        select.find_rendezvous(comm, comm_self, apart, "lo")
    assert caught.value.reporting_rank == 0
