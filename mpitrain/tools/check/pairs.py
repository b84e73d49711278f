"""Which pairs of nodes can talk: every node with every other, in rounds."""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TYPE_CHECKING

from mpitrain.launch.rendezvous import probe
from mpitrain.mpi.collectives import barrier
from mpitrain.mpi.world import World

if TYPE_CHECKING:
    from mpitrain.launch.exit_guard import ExitGuard
    from mpitrain.launch.job import Job

CONNECT_SECONDS = 3.0
"""How long one connection may take, and one answer."""

BUDGET_SECONDS = 12.0
"""How long all of them may take; pairs that are left are said to be left."""

AT_ONCE = 16
"""Connections that one node tries at once."""

_TOKEN_BYTES = 32


@dataclass(frozen=True, kw_only=True)
class Failure:
    """One node that another one does not reach."""

    source: int
    """Node rank of the one that connects."""
    target: int
    """Node rank of the one that is connected to."""
    why: str
    """Such as ``"timed out"``."""


def rounds(num_nodes: int) -> list[list[tuple[int, int]]]:
    """Pair all nodes with each other, as a tournament does.

    Args:
        num_nodes: Number of nodes.

    Returns:
        Rounds, of which there are about as many as nodes. In a round each node is in
        one pair at most; over all rounds each pair is there once, its lower node first.

    >>> rounds(4)
    [[(0, 3), (1, 2)], [(0, 2), (1, 3)], [(0, 1), (2, 3)]]
    >>> rounds(3)
    [[(1, 2)], [(0, 2)], [(0, 1)]]
    """
    even = num_nodes + num_nodes % 2  # who meets the one too many has a round off
    found = []
    others = list(range(1, even))
    for _ in range(even - 1):
        circle = [0, *others]
        pairs = [(circle[i], circle[-1 - i]) for i in range(even // 2)]
        found.append(sorted((min(p), max(p)) for p in pairs if max(p) < num_nodes))
        others = [others[-1], *others[:-1]]
    return found


def opponents(node_rank: int, num_nodes: int) -> list[int]:
    """Return whom a node meets, in the order of the rounds.

    >>> opponents(0, 4), opponents(1, 3)
    ([3, 2, 1], [2, 0])
    """
    return [
        pair[pair[0] == node_rank]
        for pairs in rounds(num_nodes)
        for pair in pairs
        if node_rank in pair
    ]


def find_failures(guard: ExitGuard, world: World, address: str) -> list[Failure]:
    """Let the first rank of every node connect to that of every other, both ways.

    Collective over all ranks. Two allgathers, of an address and of the failures. By
    sockets of our own and before the process group: gloo joins all ranks with all
    others, and would wait for those that cannot.

    Args:
        guard: The guard that stands.
        world: Where this process stands.
        address: This node's own address on the network that gloo uses.

    Returns:
        Who does not reach whom; equal on all ranks.
    """
    if world.num_nodes == 1:
        return []
    comm = guard.comm
    leads = world.local_rank == 0
    token = comm.bcast(secrets.token_bytes(_TOKEN_BYTES))
    mine: list[Failure] = []
    with contextlib.ExitStack() as stack:
        offer = None
        if leads:
            with contextlib.suppress(OSError):  # no address: nobody will reach it
                offer = stack.enter_context(_answering(address, token))
        barrier(comm)
        by_rank: list[tuple[str, int] | None] = comm.allgather(offer)
        offers = [by_rank[node.ranks[0]] for node in world.nodes]
        if leads:
            mine = _connect_to_all(world.node_rank, offers, token)
        barrier(comm)
    return [failure for found in comm.allgather(mine) for failure in found]


def exchange(job: Job, world: World, budget_seconds: float) -> tuple[int, int]:
    """Let the first ranks of all nodes send to each other through torch.

    Collective over all ranks. A pair that waits for ever is the watchdog's to name.

    Args:
        job: The running job.
        world: Where this process stands.
        budget_seconds: When to begin no further round.

    Returns:
        How many pairs were tried, and how many had a wrong value; equal on all ranks.
    """
    import torch
    import torch.distributed as dist

    num_tried, num_wrong = 0, 0
    end = time.monotonic() + budget_seconds
    for pairs in rounds(world.num_nodes):
        if not job.comm.bcast(time.monotonic() < end):
            break
        num_tried += len(pairs)
        for pair in pairs:
            first, second = (world.nodes[node].ranks[0] for node in pair)
            if world.rank not in (first, second):
                continue
            names = " and ".join(world.nodes[node].hostname for node in pair)
            job.progress(f"check: {names} send to each other")
            other = second if world.rank == first else first
            value = torch.full((257,), float(world.rank), device=world.device)
            found = torch.empty_like(value)
            if world.rank == first:
                dist.send(value, other)
                dist.recv(found, other)
            else:
                dist.recv(found, other)
                dist.send(value, other)
            num_wrong += not bool((found == other).all())
    barrier(job.comm)
    return num_tried, sum(job.comm.allgather(num_wrong))


@contextlib.contextmanager
def _answering(address: str, token: bytes) -> Iterator[tuple[str, int]]:
    """Listen on one address, and prove to who connects that this is the job's node."""
    with probe.listen(address) as listener:
        listener.settimeout(0.2)
        done = threading.Event()
        thread = threading.Thread(target=_serve, args=(listener, token, done))
        thread.daemon = True
        thread.start()
        try:
            yield address, listener.getsockname()[1]
        finally:
            done.set()
            thread.join()


def _serve(listener: socket.socket, token: bytes, done: threading.Event) -> None:
    with ThreadPoolExecutor(max_workers=AT_ONCE) as pool:
        while not done.is_set():
            with contextlib.suppress(OSError):
                connection, _ = listener.accept()
                pool.submit(_answer, connection, token)


def _answer(connection: socket.socket, token: bytes) -> None:
    with connection, contextlib.suppress(OSError):
        connection.settimeout(CONNECT_SECONDS)
        if hmac.compare_digest(_receive(connection), token):
            connection.sendall(token[::-1])


def _connect_to_all(
    node_rank: int, offers: Sequence[tuple[str, int] | None], token: bytes
) -> list[Failure]:
    end = time.monotonic() + BUDGET_SECONDS

    def attempt(target: int) -> Failure | None:
        why = _connect(offers[target], token) if time.monotonic() < end else "no time"
        return Failure(source=node_rank, target=target, why=why) if why else None

    others = opponents(node_rank, len(offers))
    with ThreadPoolExecutor(max_workers=AT_ONCE) as pool:
        return [found for found in pool.map(attempt, others) if found is not None]


def _connect(offer: tuple[str, int] | None, token: bytes) -> str:
    """Return why an address is not reached; nothing if it is."""
    if offer is None:
        return "it could not listen"
    try:
        with socket.create_connection(offer, timeout=CONNECT_SECONDS) as connection:
            connection.sendall(token)
            if not hmac.compare_digest(_receive(connection), token[::-1]):
                return f"somebody else answers at {offer[0]}:{offer[1]}"
    except TimeoutError:
        return "timed out"
    except OSError as error:
        return (error.strerror or str(error)).lower()
    return ""


def _receive(connection: socket.socket) -> bytes:
    data = b""
    while len(data) < _TOKEN_BYTES and (part := connection.recv(_TOKEN_BYTES)):
        data += part
    return data
