"""The address of rank zero that every node can really reach.

A host has many addresses, and its own name may resolve to one that others cannot
reach: ``127.0.1.1`` on Debian, a container bridge, a filtered network. So rank zero
listens on each, one rank of every other node connects to each and has it prove that it
is rank zero, and of those that all of them reached the one on the fastest class of
interface is taken.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpitrain.errors import LaunchError
from mpitrain.launch import probe
from mpitrain.launch.choice import (
    UNKNOWN,
    Attempt,
    NodeReport,
    Offer,
    check_interface,
    choose,
)
from mpitrain.launch.interfaces import (
    Interface,
    find_interfaces,
    interface_with,
    is_loopback,
    is_usable,
)
from mpitrain.topology import mpi_library, wait_for_all
from mpitrain.world import World

if TYPE_CHECKING:
    from mpi4py import MPI

CONNECT_SECONDS = 3.0
"""How long one connection may take; all addresses are tried at once. A lost first
packet is sent again after one second."""

NAME_SECONDS = 1.0
"""How long this host's own name may take to resolve."""

MESSAGE_BYTES = 1 << 20
"""So large that Open MPI sends parts of it over every interface that it knows."""

MESSAGE_SECONDS = 60.0
"""How long such a message may take between two nodes."""

MAX_CONNECTIONS = 64
"""How many connections of one rank are tried at once."""


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


def find_rendezvous(
    comm: MPI.Intracomm, world: World, interface: str | None = None
) -> Rendezvous:
    """Bind a port on rank zero and find an address of it that all nodes reach.

    Collective over `comm`.

    Args:
        comm: All ranks.
        world: Where this process stands.
        interface: The interface of every node to use; ``None`` for the best.

    Returns:
        Where to meet; on one node that is the loopback address, and no port is
        open to the outside.

    Raises:
        LaunchError: A node lacks `interface`, or no address is reached by all nodes,
            with the table of who reached what. Raised on every rank or on none.
    """
    leads = world.local_rank == 0
    mine = find_interfaces() if leads else ()
    with contextlib.ExitStack() as stack:
        listeners: list[socket.socket] = []
        offers: list[Offer] = []
        if world.is_rank_zero:
            alone = world.num_nodes == 1
            wanted = addresses_to_offer(mine, interface, alone=alone)
            for sock, offer in _listen_on_each(wanted):
                listeners.append(stack.enter_context(sock))
                offers.append(offer)
        secret, offers = comm.bcast((secrets.token_bytes(32), offers))
        report = None
        with contextlib.ExitStack() as while_others_ask:
            if listeners and world.num_nodes > 1:
                while_others_ask.enter_context(probe.answering(listeners, secret))
            if leads:
                is_other_node = world.node_rank > 0
                report = look(offers if is_other_node else (), secret, mine, interface)
            wait_for_all(comm)
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
        index = choose(zero, offers, attempts)
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


def try_mpi(
    comm: MPI.Intracomm, world: World, rendezvous: Rendezvous, start_timeout: float
) -> None:
    """Send a large message by MPI from each node to the next.

    Collective over `comm`.

    Small messages, all that the start needs else, may go over one interface while a
    part of every large one waits for ever at another that is filtered.

    Args:
        comm: All ranks.
        world: Where this process stands.
        rendezvous: Which interface every node reaches.
        start_timeout: Seconds that a stage of the start may take.

    Raises:
        LaunchError: A message did not arrive; raised on the ranks that sent it or wait
            for it.
    """
    seconds = min(MESSAGE_SECONDS, 0.8 * start_timeout)  # before the watchdog ends it

    if world.local_rank == 0:
        firsts = [node.ranks[0] for node in world.nodes]
        requests = [
            comm.Irecv(bytearray(MESSAGE_BYTES), source=firsts[world.node_rank - 1]),
            comm.Isend(
                bytes(MESSAGE_BYTES),
                dest=firsts[(world.node_rank + 1) % len(firsts)],
            ),
        ]
        end = time.monotonic() + seconds
        while not all(request.Test() for request in requests):
            if time.monotonic() > end:
                # Not agreed on by the ranks: small messages now wait behind it.
                raise LaunchError(_stuck(world, rendezvous, seconds))
            time.sleep(0.001)
    wait_for_all(comm)


def _stuck(world: World, rendezvous: Rendezvous, seconds: float) -> str:
    name = rendezvous.interface.name
    set_it = (
        f"OMPI_MCA_btl_tcp_if_include={name} for mpirun"
        if mpi_library().startswith("Open MPI")
        else f"this MPI's variable for its interface to {name}"
    )
    return (
        f"a message of {MESSAGE_BYTES >> 20} MiB by MPI between node {world.hostname} "
        f"and its neighbours did not arrive within {seconds:.0f} s, though "
        f"{rendezvous.address} ({name}) is reached by all nodes.\nUsual cause: MPI "
        f"uses another interface, too, which is filtered. Set {set_it}"
    )


def addresses_to_offer(
    interfaces: Sequence[Interface], name: str | None, *, alone: bool
) -> list[tuple[str, Interface]]:
    """Return the addresses at which rank zero listens, with their interfaces.

    Args:
        interfaces: Those of this host.
        name: The one that was asked for; ``None``: no matter which.
        alone: Whether there is no other node.

    Returns:
        On one node one loopback address, so that no port is open to the outside; on
        several all others; those of the one that was asked for in any case.
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
    return [entry for entry in usable if entry not in outside][:1] if alone else outside


def _listen_on_each(
    addresses: Sequence[tuple[str, Interface]],
) -> list[tuple[socket.socket, Offer]]:
    named = named_addresses()
    found = []
    for address, interface in addresses:
        with contextlib.suppress(OSError):  # it went away, or is not yet ready
            sock = listen(address)
            offer = Offer(
                address=address,
                port=sock.getsockname()[1],
                interface=interface,
                is_named=address in named,
            )
            found.append((sock, offer))
    return found


def named_addresses() -> set[str]:
    """Return the addresses that this host's own name resolves to.

    It is only a preference: a name server that does not answer costs one second.
    """
    found: set[str] = set()

    def resolve() -> None:
        with contextlib.suppress(OSError):
            infos = socket.getaddrinfo(socket.gethostname(), None)
            found.update(str(info[4][0]) for info in infos)

    thread = threading.Thread(target=resolve, daemon=True)
    thread.start()
    thread.join(NAME_SECONDS)
    return set(found)


def listen(address: str) -> socket.socket:
    """Bind a free port on one address alone, and listen.

    Args:
        address: Numeric, IPv4 or IPv6.

    Returns:
        The listening socket.

    Raises:
        OSError: It is no address of this host, or no port is free.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.bind((address, 0))
        sock.listen(2048)
    except OSError:
        sock.close()
        raise
    return sock


def look(
    offers: Sequence[Offer],
    secret: bytes,
    interfaces: Sequence[Interface],
    name: str | None = None,
) -> NodeReport:
    """Try to reach every offer, all at once.

    Args:
        offers: Where rank zero says that it listens.
        secret: What only the ranks of this job know.
        interfaces: Those of this host.
        name: The interface to come from; ``None``: as the system routes it.

    Returns:
        What this node found, in the order of `offers`.
    """
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
        address, failure = probe.ask(
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
