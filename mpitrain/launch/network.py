"""The address of rank zero that every node can really reach.

A host has many addresses, and its own name may resolve to one that others cannot
reach: ``127.0.1.1`` on Debian, a container bridge, a filtered network. So rank zero
listens on each, one rank of every other node connects to each, and the first address
that all of them reached is taken.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpitrain.errors import LaunchError, agreed
from mpitrain.topology import wait_for_all
from mpitrain.world import World

if TYPE_CHECKING:
    from mpi4py import MPI

LOOPBACK = "127.0.0.1"
CONNECT_SECONDS = 3.0
"""How long one connection may take; all addresses are tried at once."""


@dataclass(frozen=True, kw_only=True)
class Rendezvous:
    """Where rank zero is reached. `address` and `port` are equal on all ranks."""

    address: str
    """Numeric IP address of rank zero's host, IPv4 or IPv6."""
    port: int
    """The port that rank zero has bound there."""
    interface: str
    """This node's network interface towards it, such as ``"ib0"``; ``""``: unknown."""
    listener: socket.socket | None
    """The bound and listening socket on rank zero, ``None`` elsewhere."""


def find_rendezvous(
    comm: MPI.Intracomm,
    world: World,
    interface: str | None = None,  # noqa: ARG001
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
        LaunchError: No address is reached by all nodes, with the table of who reached
            what. Raised on every rank or on none.
    """
    with contextlib.ExitStack() as others:
        listeners: dict[tuple[str, int], socket.socket] = {}
        if world.is_rank_zero:
            alone = world.num_nodes == 1
            for address in [LOOPBACK] if alone else own_addresses():
                with contextlib.suppress(OSError):  # an interface that went away
                    sock = others.enter_context(listen(address))
                    listeners[_name(sock)] = sock
        offers: list[tuple[str, int]] = comm.bcast(list(listeners))
        leads = world.local_rank == 0 and world.node_rank > 0
        reached = connect_to_each(offers) if leads else {}
        wait_for_all(comm)
        by_rank = comm.allgather(reached)
        leaders = [node.ranks[0] for node in world.nodes]
        by_host = {
            world.nodes[i].hostname: sorted(by_rank[leaders[i]])
            for i in range(1, world.num_nodes)
        }
        chosen = choose(offers, by_host)
        # The original sockets are closed here, on every way out.
        listener = listeners[chosen].dup() if listeners else None
    if listener is not None:
        _drain(listener)
    sources = by_rank[leaders[world.node_rank]]
    own = sources[offers.index(chosen)] if world.node_rank > 0 else chosen[0]
    return Rendezvous(
        address=chosen[0],
        port=chosen[1],
        interface=interface_of(own),
        listener=listener,
    )


def own_addresses() -> tuple[str, ...]:
    """Return the addresses of this host that others might reach.

    Those that the host's own name resolves to come first, since administrators put the
    network meant for jobs there; then IPv4, then IPv6. Loopback, link-local addresses
    and interfaces that are down are left out.
    """
    import psutil

    up = {name for name, stats in psutil.net_if_stats().items() if stats.isup}
    found = [
        (entry.family, entry.address)
        for name, entries in psutil.net_if_addrs().items()
        for entry in entries
        if name in up and entry.family in (socket.AF_INET, socket.AF_INET6)
    ]
    outside = [
        (family, address)
        for family, address in found
        if not address.startswith(("127.", "169.254.", "fe80:")) and address != "::1"
    ]
    named: set[str] = set()
    with contextlib.suppress(OSError):
        named = {
            str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None)
        }
    outside.sort(key=lambda entry: (entry[1] not in named, entry[0]))
    return tuple(address for _, address in outside)


def listen(address: str) -> socket.socket:
    """Bind a free port on one address alone, and listen.

    Args:
        address: Numeric, IPv4 or IPv6.

    Returns:
        The listening socket.
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


def connect_to_each(offers: Sequence[tuple[str, int]]) -> dict[int, str]:
    """Try to connect to every offer at once.

    Args:
        offers: Addresses and ports.

    Returns:
        For each offer that answered, by its index: the address of this host that the
        connection came from.
    """

    def attempt(offer: tuple[str, int]) -> str | None:
        try:
            with socket.create_connection(offer, timeout=CONNECT_SECONDS) as sock:
                return str(sock.getsockname()[0])
        except OSError:
            return None

    if not offers:
        return {}
    with ThreadPoolExecutor(max_workers=len(offers)) as pool:
        sources = list(pool.map(attempt, offers))
    return {i: source for i, source in enumerate(sources) if source is not None}


def choose(
    offers: Sequence[tuple[str, int]], reached: Mapping[str, Sequence[int]]
) -> tuple[str, int]:
    """Choose the first offer that every other node reached.

    Args:
        offers: Rank zero's addresses and ports, in order of preference.
        reached: For each of the other nodes, by host name: the offers it reached.

    Returns:
        The chosen address and port.

    Raises:
        LaunchError: There is none.

    >>> choose([("10.0.0.1", 1), ("10.1.0.1", 2)], {"b": [0, 1], "c": [1]})
    ('10.1.0.1', 2)
    """
    for index, offer in enumerate(offers):
        if all(index in found for found in reached.values()):
            return offer
    rows = [
        f"  {host}: reached "
        + (", ".join(offers[index][0] for index in found) or "none of them")
        for host, found in reached.items()
    ]
    raise agreed(
        LaunchError(
            "no address of rank zero's host is reached by all other nodes.\n"
            f"It listened on {', '.join(address for address, _ in offers) or 'none'}.\n"
            + "\n".join(rows)
            + "\nExpected one network that joins all nodes. Look for a firewall, "
            "or leave those hosts out of the job."
        )
    )


def interface_of(address: str) -> str:
    """Return the name of this host's interface with an address, or ``""``."""
    import psutil

    for name, entries in psutil.net_if_addrs().items():
        if any(entry.address.partition("%")[0] == address for entry in entries):
            return name
    return ""


def _name(sock: socket.socket) -> tuple[str, int]:
    host, port = sock.getsockname()[:2]
    return str(host), int(port)


def _drain(sock: socket.socket) -> None:
    """Take the connections that only tried the address off the listener's queue."""
    sock.setblocking(False)
    with contextlib.suppress(BlockingIOError):
        while True:
            sock.accept()[0].close()
