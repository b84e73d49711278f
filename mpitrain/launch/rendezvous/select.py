"""The address of rank zero that every node can really reach.

A host has many addresses, and its own name may resolve to one that others cannot
reach: ``127.0.1.1`` on Debian, a container bridge, a filtered network. So rank zero
listens on each, one rank of every other node connects to each and checks that it is
rank zero, and of the addresses that all of them reached the one on the fastest class of
interface is selected.

1. Rank zero binds a port on each address, and broadcasts them with a secret.
2. One rank of each node tries them all, while threads of rank zero answer.
3. What the nodes found is merged on its way to rank zero, which selects one.
4. Rank zero keeps that socket, and the store gets it: nobody can take the port between.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from ipaddress import ip_address
from typing import TYPE_CHECKING

from mpitrain.errors import LaunchError
from mpitrain.launch.rendezvous import reachability
from mpitrain.launch.rendezvous.interfaces import (
    KINDS,
    Interface,
    find_interfaces,
    is_usable,
)
from mpitrain.mpi.collectives import (
    barrier,
    merge_lists,
    merge_on_rank_zero,
    on_rank_zero,
)
from mpitrain.mpi.world import World, list_hosts

if TYPE_CHECKING:
    from mpi4py import MPI

CONNECT_SECONDS = 3.0  # for a connection; lost packets are sent again after 1 s
MAX_CONNECTIONS = 64  # how many addresses one rank tries at once
# How many nodes try all addresses of rank zero, which needs 0.2 ms for each try. What
# the others reach is seen when they connect to the store.
MAX_PROBING_NODES = 256

UNKNOWN = Interface(name="", kind="virtual")  # an interface that was not found


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """Where rank zero is reached. `address`, `port`, `why` are equal on all ranks."""

    address: str  # numeric IP address of rank zero's host, IPv4 or IPv6
    port: int  # the port that rank zero has bound there
    why: str  # why this address, for people
    own_address: str  # this node's on that network; on rank zero's it is `address`
    interface: Interface  # this node's network interface with `own_address`
    listener: socket.socket | None  # rank zero's, bound and listening; else ``None``


@dataclass(frozen=True, kw_only=True)
class Offer:
    """An address of rank zero's host at which it listens."""

    address: str
    port: int
    interface: Interface

    def __str__(self) -> str:
        return f"{self.address} ({self.interface})"


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """One node's connection to one offer: its own address, or why it failed."""

    source: str = ""
    interface: Interface = UNKNOWN
    failure: str = ""


def find_rendezvous(
    comm: MPI.Intracomm,
    on_node: MPI.Intracomm,
    world: World,
    interface: str | None = None,
) -> Rendezvous:
    """Bind a port on rank zero at an address that all nodes reach.

    Collective over `comm`; `on_node` has the ranks of this node.
    """
    is_first_on_node = world.local_rank == 0
    is_probing = is_first_on_node and probes(world.node_rank, world.num_nodes)
    interfaces = find_interfaces() if is_first_on_node else ()
    if interface is not None:
        names = tuple(found.name for found in interfaces)
        mine = {names: [world.hostname]} if is_first_on_node else {}
        by_names = merge_on_rank_zero(comm, mine, merge_lists) or {}
        on_rank_zero(
            comm, lambda: check_interface(interface, by_names), "look for the interface"
        )
    with contextlib.ExitStack() as stack:
        listeners: list[socket.socket] = []
        offers: list[Offer] = []
        if world.is_rank_zero:
            is_alone = world.num_nodes == 1
            for address, found in addresses_to_offer(interfaces, interface, is_alone):
                with contextlib.suppress(OSError):  # it went away, or is not ready yet
                    listener = stack.enter_context(reachability.listen(address))
                    port = listener.getsockname()[1]
                    listeners.append(listener)
                    offers.append(Offer(address=address, port=port, interface=found))
        secret, offers = comm.bcast((secrets.token_bytes(32), offers))
        attempts: list[Attempt] = []
        with reachability.answering(listeners if world.num_nodes > 1 else (), secret):
            if is_probing:
                attempts = try_offers(offers, secret, interfaces, interface)
            barrier(comm)  # rank zero answers until all have tried
        # Without addresses: nodes that reached it alike are one entry of the merge.
        outcomes = tuple(
            replace(it, source="", interface=replace(it.interface, addresses=()))
            for it in attempts
        )
        reaching = {outcomes: [world.hostname]} if is_probing else {}
        hosts = merge_on_rank_zero(comm, reaching, merge_lists) or {}
        select = partial(select_offer, world.hostname, offers, hosts)
        index = on_rank_zero(comm, select, "select an address of rank zero")
        # The original sockets are closed here, on every way out.
        selected_listener = listeners[index].dup() if listeners else None
    offer = offers[index]
    own = Attempt(source=offer.address, interface=offer.interface)
    if is_first_on_node and world.node_rank > 0:
        own = attempts[index] if attempts else source_for(offer, interfaces, interface)
    own = on_node.bcast(own)
    reached, stride = "one node", probing_stride(world.num_nodes)
    if world.num_nodes > 1:
        num_reaching = (world.num_nodes - 1) // stride + 1  # with rank zero's own
        by = "all" if stride == 1 else f"{num_reaching} of the"
        reached = f"reached by {by} {world.num_nodes} nodes"
    return Rendezvous(
        address=offer.address,
        port=offer.port,
        why=f"{offer.interface}; {reached}",
        own_address=own.source,
        interface=own.interface,
        listener=selected_listener,
    )


def probes(node_rank: int, num_nodes: int) -> bool:
    """Whether a node tries rank zero's addresses: all do, or as many, evenly spread."""
    return node_rank > 0 and node_rank % probing_stride(num_nodes) == 0


def probing_stride(num_nodes: int) -> int:
    """Return the distance between the nodes that try rank zero's addresses."""
    return -(-num_nodes // MAX_PROBING_NODES)


def source_for(
    offer: Offer, interfaces: Sequence[Interface], name: str | None
) -> Attempt:
    """Return this node's address and interface towards rank zero, by its routes.

    Without a route both are empty; the store then says that it is not reached.
    """
    is_ipv6 = ":" in offer.address
    named = next((it.addresses for it in interfaces if it.name == name), ())
    address = next((it for it in named if (":" in it) == is_ipv6), "")
    if not address:
        family = socket.AF_INET6 if is_ipv6 else socket.AF_INET
        with (
            contextlib.suppress(OSError),
            socket.socket(family, socket.SOCK_DGRAM) as sock,  # sends nothing
        ):
            sock.connect((offer.address, offer.port))
            address = sock.getsockname()[0]
    having = (found for found in interfaces if address in found.addresses)
    return Attempt(source=address, interface=next(having, UNKNOWN))


def addresses_to_offer(
    interfaces: Sequence[Interface], name: str | None, is_alone: bool
) -> list[tuple[str, Interface]]:
    """Return the addresses at which rank zero listens, with their interfaces.

    On one node one loopback address alone, so that no port is open to the outside.
    """
    usable = [
        (address, interface)
        for interface in interfaces
        for address in interface.addresses
        if is_usable(address)
    ]
    if name is not None:
        return [entry for entry in usable if entry[1].name == name]
    found = [e for e in usable if ip_address(e[0]).is_loopback == is_alone]
    return found[:1] if is_alone else found


def try_offers(
    offers: Sequence[Offer],
    secret: bytes,
    interfaces: Sequence[Interface],
    name: str | None = None,
) -> list[Attempt]:
    """Try to reach every offer, all at once; from the interface `name`, if given."""
    sources: list[str | None] = [None]
    if name is not None:
        addresses = (i.addresses for i in interfaces if i.name == name)
        sources = [*filter(is_usable, next(addresses))]

    def attempt(index: int) -> Attempt:
        # Of several own addresses the first that reaches it counts.
        offer = offers[index]
        failure = f"{name} has no such address there"
        for source in sources:
            if source is not None and (":" in source) != (":" in offer.address):
                continue
            where = (offer.address, offer.port)
            address, failure = reachability.connect(
                where, index, secret, seconds=CONNECT_SECONDS, source=source
            )
            if not failure:
                having = (i for i in interfaces if address in i.addresses)
                return Attempt(source=address, interface=next(having, UNKNOWN))
        return Attempt(failure=failure)

    with ThreadPoolExecutor(max_workers=MAX_CONNECTIONS) as pool:
        return list(pool.map(attempt, range(len(offers))))


def check_interface(
    name: str, hosts_by_names: Mapping[tuple[str, ...], Sequence[str]]
) -> None:
    """Refuse an interface that some host lacks; hosts by what interfaces they have."""
    lacking: dict[str, list[str]] = {}
    for names, having in hosts_by_names.items():
        if name not in names:
            lacking.setdefault(", ".join(sorted(names)) or "none", []).extend(having)
    if lacking:
        lines = (f"  {list_hosts(on)}, where there is {n}" for n, on in lacking.items())
        raise LaunchError(
            f"no interface {name!r} that is up and has an address on\n"
            + "\n".join(lines)
            + "\nExpected one that every node has: --interface NAME. Without the "
            "flag the best one that works is taken."
        ).on_all_ranks()


def select_offer(
    host: str,
    offers: Sequence[Offer],
    hosts: Mapping[tuple[Attempt, ...], Sequence[str]],
) -> int:
    """Select the best offer that every other host reached; hosts by their attempts.

    A connection is of the class and the speed of its slower end. The best class wins;
    then the higher speed; then IPv4; then the order of the system.
    """

    def cost(index: int) -> tuple[int, int, bool, int]:
        offer = offers[index]
        ends = [offer.interface, *(tried[index].interface for tried in hosts)]
        return (
            max(KINDS.index(end.kind) for end in ends),
            -min(end.speed_mbps for end in ends),
            ":" in offer.address,
            index,
        )

    if not offers:
        raise _no_address(host, is_alone=not hosts)
    indices = range(len(offers))
    usable = [i for i in indices if not any(tried[i].failure for tried in hosts)]
    if usable:
        return min(usable, key=cost)
    lines = []
    for index, offer in enumerate(offers):
        by_result: dict[str, list[str]] = {}
        for tried, others in hosts.items():
            by_result.setdefault(tried[index].failure or "reached", []).extend(others)
        results = (
            f"{result}: {list_hosts(on)}" for result, on in sorted(by_result.items())
        )
        lines.append(f"  {offer}: {'; '.join(results)}")
    raise LaunchError(
        f"no address of rank zero's host {host} is reachable from every other node.\n"
        + "\n".join(lines)
        + "\nExpected one network that joins all nodes. Look for a firewall, or "
        "leave those hosts out of the job."
    ).on_all_ranks()


def _no_address(host: str, *, is_alone: bool) -> LaunchError:
    what = "no address of loopback (127.0.0.1) that is up"
    expected = "one, also without a network: `ip link set lo up`"
    if not is_alone:
        what = (
            "no address that other nodes could use: loopback or link-local ones alone"
        )
        expected = "one of a network that joins all nodes: see `ip address` there"
    return LaunchError(
        f"rank zero's host {host} has {what}.\nExpected {expected}."
    ).on_all_ranks()
