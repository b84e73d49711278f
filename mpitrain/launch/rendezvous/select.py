"""The address of rank zero that every node can really reach.

A host has many addresses, and its own name may resolve to one that others cannot
reach: ``127.0.1.1`` on Debian, a container bridge, a filtered network. So rank zero
listens on each, one rank of every other node connects to each and checks that it is
rank zero, and of the addresses that all of them reached the one on the fastest class of
interface is selected.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpitrain.errors import LaunchError, collective_error
from mpitrain.launch.rendezvous import probe
from mpitrain.launch.rendezvous.interfaces import (
    KINDS,
    Interface,
    find_interfaces,
    interface_with,
    is_loopback,
    is_usable,
)
from mpitrain.mpi.collectives import barrier
from mpitrain.mpi.world import World, list_hosts

if TYPE_CHECKING:
    from mpi4py import MPI

CONNECT_SECONDS = 3.0
"""How long one connection may take; all addresses are tried at once. A lost first
packet is sent again after one second."""

NAME_SECONDS = 1.0
"""How long this host's own name may take to resolve."""

MAX_CONNECTIONS = 64
"""How many connections of one rank are tried at once."""

UNKNOWN = Interface(name="", kind="virtual")
"""Stands for an interface that could not be found."""


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """Where rank zero is reached. `address`, `port`, `why` are equal on all ranks."""

    address: str
    """Numeric IP address of rank zero's host, IPv4 or IPv6."""
    port: int
    """The port that rank zero has bound there."""
    why: str
    """Why this address, for people."""
    own_address: str
    """This node's own address on that network; on rank zero's node it is `address`."""
    interface: Interface
    """This node's network interface with `own_address`."""
    listener: socket.socket | None
    """The bound and listening socket on rank zero, ``None`` elsewhere."""


@dataclass(frozen=True, kw_only=True)
class Offer:
    """An address of rank zero's host at which it listens."""

    address: str
    """Numeric, IPv4 or IPv6."""
    port: int
    """Bound on that address alone."""
    interface: Interface
    """The interface that has it."""
    is_named: bool = False
    """Whether the host's own name resolves to it: meant for jobs."""

    def __str__(self) -> str:
        return f"{self.address} ({self.interface})"


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """The result of one node's connection to one offer."""

    source: str = ""
    """The node's own address that it came from; empty if it failed."""
    interface: Interface | None = None
    """The interface with that address."""
    failure: str = ""
    """Why it failed, such as ``"refused"``; empty if it did not."""


@dataclass(frozen=True, kw_only=True)
class NodeReport:
    """What one node found."""

    attempts: tuple[Attempt, ...] = ()
    """One for each offer."""
    other_interfaces: tuple[str, ...] | None = None
    """The interfaces it has, where it lacks the one that was asked for."""


def find_rendezvous(
    comm: MPI.Intracomm, world: World, interface: str | None = None
) -> Rendezvous:
    """Bind a port on rank zero and find an address of it that all nodes reach.

    Collective over `comm`. On one node no port is open to the outside.
    """
    leads = world.local_rank == 0
    mine = find_interfaces() if leads else ()
    with contextlib.ExitStack() as stack:
        listeners: list[socket.socket] = []
        offers: list[Offer] = []
        if world.is_rank_zero:
            is_alone = world.num_nodes == 1
            for sock, offer in _listen(addresses_to_offer(mine, interface, is_alone)):
                listeners.append(stack.enter_context(sock))
                offers.append(offer)
        secret, offers = comm.bcast((secrets.token_bytes(32), offers))
        report = None
        with contextlib.ExitStack() as while_others_connect:
            if listeners and world.num_nodes > 1:
                while_others_connect.enter_context(probe.answering(listeners, secret))
            if leads:
                is_other_node = world.node_rank > 0
                report = try_offers(
                    offers if is_other_node else (), secret, mine, interface
                )
            barrier(comm)
        by_rank: list[NodeReport | None] = comm.allgather(report)
        reports = {
            node.hostname: found
            for node in world.nodes
            if (found := by_rank[node.ranks[0]]) is not None
        }
        if interface is not None:
            check_interface(interface, reports)
        zero, *others = reports
        attempts = {host: reports[host].attempts for host in others}
        index = select_offer(zero, offers, attempts)
        # The original sockets are closed here, on every way out.
        listener = listeners[index].dup() if listeners else None
    chosen = offers[index]
    own_address, own_interface = chosen.address, chosen.interface
    if world.node_rank > 0:
        own = attempts[world.hostname][index]
        own_address, own_interface = own.source, own.interface or UNKNOWN
    return Rendezvous(
        address=chosen.address,
        port=chosen.port,
        why=f"{chosen.interface}; "
        + (f"reached by all {world.num_nodes} nodes" if others else "one node"),
        own_address=own_address,
        interface=own_interface,
        listener=listener,
    )


def addresses_to_offer(
    interfaces: Sequence[Interface], name: str | None, is_alone: bool
) -> list[tuple[str, Interface]]:
    """Return the addresses at which rank zero listens, with their interfaces.

    On one node one loopback address, so that no port is open to the outside; on several
    nodes all others; of the interface called `name`, if given, in any case.
    """
    usable = [
        (address, interface)
        for interface in interfaces
        for address in interface.addresses
        if is_usable(address)
    ]
    if name is not None:
        return [entry for entry in usable if entry[1].name == name]
    outside = [entry for entry in usable if not is_loopback(entry[0])]
    return (
        [entry for entry in usable if entry not in outside][:1] if is_alone else outside
    )


def _listen(
    addresses: Sequence[tuple[str, Interface]],
) -> list[tuple[socket.socket, Offer]]:
    named = _addresses_of_own_name()
    found = []
    for address, interface in addresses:
        with contextlib.suppress(OSError):  # it went away, or is not yet ready
            sock = probe.listen(address)
            offer = Offer(
                address=address,
                port=sock.getsockname()[1],
                interface=interface,
                is_named=address in named,
            )
            found.append((sock, offer))
    return found


def _addresses_of_own_name() -> set[str]:
    """Only a preference: a name server that does not answer costs one second."""
    found: set[str] = set()

    def resolve() -> None:
        with contextlib.suppress(OSError):
            infos = socket.getaddrinfo(socket.gethostname(), None)
            found.update(str(info[4][0]) for info in infos)

    thread = threading.Thread(target=resolve, daemon=True)
    thread.start()
    thread.join(NAME_SECONDS)
    return set(found)


def try_offers(
    offers: Sequence[Offer],
    secret: bytes,
    interfaces: Sequence[Interface],
    name: str | None = None,
) -> NodeReport:
    """Try to reach every offer, all at once; from the interface `name`, if given."""
    sources: list[str | None] = [None]
    if name is not None:
        own = [interface for interface in interfaces if interface.name == name]
        if not own:
            names = tuple(interface.name for interface in interfaces)
            return NodeReport(other_interfaces=names)
        sources = [*filter(is_usable, own[0].addresses)]

    def attempt(task: tuple[int, str | None]) -> Attempt:
        index, source = task
        where = (offers[index].address, offers[index].port)
        address, failure = probe.connect(
            where, index, secret, seconds=CONNECT_SECONDS, source=source
        )
        return Attempt(
            source=address,
            interface=interface_with(address, interfaces),
            failure=failure,
        )

    tasks = [
        (index, source)
        for index, offer in enumerate(offers)
        for source in sources
        if source is None or (":" in source) == (":" in offer.address)
    ]
    workers = max(1, min(len(tasks), MAX_CONNECTIONS))
    with ThreadPoolExecutor(max_workers=workers) as pool:
        results = list(pool.map(attempt, tasks))
    # Of several ways to one offer the first that worked counts.
    best = [Attempt(failure=f"{name} has no such address there")] * len(offers)
    for (index, _), result in zip(tasks, results, strict=True):
        if best[index].failure:
            best[index] = result
    return NodeReport(attempts=tuple(best))


def check_interface(name: str, reports: Mapping[str, NodeReport]) -> None:
    """Refuse an interface that some node lacks."""
    lacking: dict[str, list[str]] = {}
    for host, report in reports.items():
        if report.other_interfaces is not None:
            has = ", ".join(sorted(report.other_interfaces)) or "none"
            lacking.setdefault(has, []).append(host)
    if lacking:
        raise collective_error(
            LaunchError(
                f"no interface {name!r} that is up and has an address on\n"
                + "\n".join(
                    f"  {list_hosts(hosts)}, where there is {has}"
                    for has, hosts in lacking.items()
                )
                + "\nExpected one that every node has: --interface NAME. Without the "
                "flag the best one that works is taken."
            )
        )


def select_offer(
    host: str, offers: Sequence[Offer], attempts: Mapping[str, Sequence[Attempt]]
) -> int:
    """Select the best offer that every other node reached.

    A connection is of the class and the speed of its slower end. The best class wins;
    then the higher speed; then an address that the host's own name resolves to; then
    IPv4; then the order of the system.
    """

    def cost(index: int) -> tuple[int, int, bool, bool, int]:
        offer = offers[index]
        ends = [offer.interface]
        ends += [tried[index].interface or UNKNOWN for tried in attempts.values()]
        return (
            max(KINDS.index(end.kind) for end in ends),
            -min(end.speed_mbps for end in ends),
            not offer.is_named,
            ":" in offer.address,
            index,
        )

    usable = [
        index
        for index in range(len(offers))
        if not any(tried[index].failure for tried in attempts.values())
    ]
    if usable:
        return min(usable, key=cost)
    raise collective_error(
        LaunchError(
            f"no address of rank zero's host {host} is reached by all other nodes.\n"
            + ("\n".join(_table(offers, attempts)) or "  It has none that is up.")
            + "\nExpected one network that joins all nodes. Look for a firewall, or "
            "leave those hosts out of the job."
        )
    )


def _table(
    offers: Sequence[Offer], attempts: Mapping[str, Sequence[Attempt]]
) -> list[str]:
    """Who reached what, one line for each offer."""
    rows = []
    for index, offer in enumerate(offers):
        found: dict[str, list[str]] = {}
        for host, tried in attempts.items():
            found.setdefault(tried[index].failure or "reached", []).append(host)
        words = [
            f"{result}: {list_hosts(hosts)}" for result, hosts in sorted(found.items())
        ]
        rows.append(f"  {offer}: " + "; ".join(words))
    return rows
