"""Rank, node and local rank of this process, from MPI's communicators alone.

Variables of launchers and schedulers are not read here. Open MPI's own local rank is
not ordered by rank (eight oversubscribed ranks got 0 2 4 6 1 3 5 7), so it is not used.
"""

from __future__ import annotations

import os
import socket
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from mpitrain.errors import LaunchError, TopologyError
from mpitrain.mpi.launchers import NO_FABRIC_PROBE, missing_library
from mpitrain.mpi.world import Node, World, format_ranges

if TYPE_CHECKING:
    from mpi4py import MPI


def start_mpi(before: Callable[[str], object] | None = None) -> MPI.Intracomm:
    """Start MPI in this process, if it is not started yet, and return all its ranks.

    `before` gets the library's version text before MPI_Init, which may end the process.
    """
    for name, value in NO_FABRIC_PROBE.items():
        os.environ.setdefault(name, value)
    try:
        from mpi4py import rc

        if "mpi4py.MPI" not in sys.modules:  # imported, it has started already
            rc.initialize, rc.finalize = False, True
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise _no_library(error) from None
    if not MPI.Is_initialized():
        if before is not None:
            before(MPI.Get_library_version())
        with warnings.catch_warnings():
            # "suspicious MPI execution environment" on each rank: we say it once.
            warnings.simplefilter("ignore", RuntimeWarning)
            MPI.Init_thread(getattr(MPI, f"THREAD_{rc.thread_level.upper()}"))
    return MPI.COMM_WORLD


def _no_library(error: Exception) -> LaunchError:
    remedy = missing_library(str(error))
    return LaunchError(f"mpi4py could not load an MPI library: {error}\n{remedy}")


def has_thread_multiple() -> bool:
    """Whether any thread may call MPI at any time; MPI has started."""
    from mpi4py import MPI

    return bool(MPI.Query_thread() >= MPI.THREAD_MULTIPLE)


def mpi_library_version() -> str:
    """Return the first line of the MPI library's version text."""
    from mpi4py import MPI

    return MPI.Get_library_version().strip("\0 \n").splitlines()[0]


def boot_id() -> str:
    """Return what tells this machine, since it started, from all others."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return socket.gethostname()


def group_by_node(hostnames: Sequence[str]) -> tuple[Node, ...]:
    """Group ranks into nodes by host name; the nodes are ordered by lowest rank."""
    ranks: dict[str, list[int]] = {}
    for rank, hostname in enumerate(hostnames):
        ranks.setdefault(hostname, []).append(rank)
    return tuple(
        Node(hostname=name, ranks=tuple(on_node)) for name, on_node in ranks.items()
    )


def discover_world(comm: MPI.Intracomm) -> World:
    """Find this process's rank and node by MPI alone. Collective over `comm`."""
    from mpi4py import MPI

    on_node = comm.Split_type(MPI.COMM_TYPE_SHARED, key=comm.rank)
    try:
        first = on_node.bcast(comm.rank)
        machine = socket.gethostname(), boot_id()
        records = comm.allgather((*machine, first, on_node.rank, on_node.size))
    finally:
        on_node.Free()
    # Containers of a machine may have a name each: theirs is that of the first rank.
    named = [records[it[2]] if records[it[2]][1] == it[1] else it for it in records]
    nodes = group_by_node([hostname for hostname, *_ in named])
    for node in nodes:
        found = [records[rank][3:] for rank in node.ranks]
        if found != [(i, len(found)) for i in range(len(found))]:
            raise TopologyError(
                f"{len(node.ranks)} ranks say they run on host {node.hostname!r} "
                f"(ranks {format_ranges(node.ranks)}), but MPI's shared-memory "
                f"groups there have sizes {sorted({size for _, size in found})}.\n"
                "Expected both to be equal. Give every machine (or container) a "
                "host name of its own, and name it once in the host file. Let "
                "containers of one machine share /dev/shm (such as docker run "
                "--ipc=host)."
            ).on_all_ranks()
    rank = comm.rank
    node_rank = next(i for i, node in enumerate(nodes) if rank in node.ranks)
    return World(
        rank=rank,
        world_size=comm.size,
        local_rank=nodes[node_rank].ranks.index(rank),
        local_world_size=len(nodes[node_rank].ranks),
        node_rank=node_rank,
        nodes=nodes,
    )
