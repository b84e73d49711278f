"""Rank, node and local rank of this process, from MPI's communicators alone.

Variables of launchers and schedulers are not read here. Open MPI's own local rank is
not ordered by rank (eight oversubscribed ranks got 0 2 4 6 1 3 5 7), so it is not used.
"""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mpitrain.errors import TopologyError
from mpitrain.mpi.collectives import merge_lists, merge_on_rank_zero, on_rank_zero
from mpitrain.mpi.world import Node, World, format_ranges

if TYPE_CHECKING:
    from mpi4py import MPI


def boot_id() -> str:
    """Return what tells this machine, since it started, from all others."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return socket.gethostname()


# Ranks of one host among those that share memory by MPI, and how many these are.
Ranks = tuple[tuple[int, ...], int]


def node_comm(comm: MPI.Intracomm) -> MPI.Intracomm:
    """Return the ranks that share memory with this one, by rank. Collective."""
    if comm.size == 1:
        return comm.Dup()
    from mpi4py import MPI

    on_node: Any = comm.Split_type(MPI.COMM_TYPE_SHARED, key=comm.rank)
    return on_node  # type: ignore[no-any-return]


def discover_world(comm: MPI.Intracomm, on_node: MPI.Intracomm) -> World:
    """Find this process's rank and node by MPI alone. Collective over `comm`.

    `on_node` is of `node_comm`.
    """
    machines = on_node.gather((comm.rank, socket.gethostname(), boot_id()))
    groups = hosts_of_group(machines or ())
    found = merge_on_rank_zero(comm, groups, merge_lists)
    # Tuples: ranks of another version of mpitrain, which is refused later, read them.
    hosts = on_rank_zero(comm, lambda: hosts_by_rank(found or {}), "find the nodes")
    nodes = tuple(Node(hostname=name, ranks=ranks) for name, ranks in hosts)
    return World(**place_on(nodes, comm.rank))


def hosts_of_group(machines: Sequence[tuple[int, str, str]]) -> dict[str, list[Ranks]]:
    """Return the ranks by host name, of ranks that share memory: rank, name, boot id.

    Containers of a machine may have a name each: theirs is that of the first rank.
    """
    ranks: dict[str, list[int]] = {}
    for rank, hostname, boot in machines:
        # Ranks of two machines in one group of MPI keep their names, and are refused.
        name = machines[0][1] if boot == machines[0][2] else hostname
        ranks.setdefault(name, []).append(rank)
    return {name: [(tuple(of), len(machines))] for name, of in ranks.items()}


def hosts_by_rank(
    groups: Mapping[str, Sequence[Ranks]],
) -> list[tuple[str, tuple[int, ...]]]:
    """Return the hosts with their ranks, ordered by lowest rank."""
    for hostname, found in groups.items():
        if len(found) > 1 or len(found[0][0]) != found[0][1]:
            ranks = sorted(rank for of, _ in found for rank in of)
            raise TopologyError(
                f"{len(ranks)} ranks say they run on host {hostname!r} "
                f"(ranks {format_ranges(ranks)}), but MPI's shared-memory "
                f"groups there have sizes {sorted({size for _, size in found})}.\n"
                "Expected both to be equal. Give every machine (or container) a "
                "host name of its own, and name it once in the host file. Let "
                "containers of one machine share /dev/shm (such as docker run "
                "--ipc=host)."
            ).on_all_ranks()
    hosts = ((name, found[0][0]) for name, found in groups.items())
    return sorted(hosts, key=lambda host: host[1])


def place_on(nodes: tuple[Node, ...], rank: int) -> dict[str, Any]:
    """Return the fields of a rank's `World` that follow from the nodes."""
    node_rank = next(i for i, node in enumerate(nodes) if rank in node.ranks)
    on_node = nodes[node_rank].ranks
    return {
        "rank": rank,
        "world_size": sum(len(node.ranks) for node in nodes),
        "local_rank": on_node.index(rank),
        "local_world_size": len(on_node),
        "node_rank": node_rank,
        "nodes": nodes,
    }
