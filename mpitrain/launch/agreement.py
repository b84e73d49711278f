"""What must be equal on all ranks and may differ: compared before anything uses it."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib import metadata
from typing import TYPE_CHECKING, Any

import mpitrain
from mpitrain.errors import TopologyError, agreed
from mpitrain.launch.config import LaunchConfig
from mpitrain.launch.contradictions import LOCAL_SIZE_VARIABLES
from mpitrain.launch.launcher import Launcher, asked_per_node
from mpitrain.topology import mpi_library, wait_for_all
from mpitrain.world import Node, World, in_runs, list_hosts

if TYPE_CHECKING:
    from mpi4py import MPI

CLOCK_WARNING_SECONDS = 60.0
"""Clocks further apart than this are said."""

CLOCK_LIMIT_SECONDS = 300.0
"""Clocks further apart than this are refused: deadlines and times of files lie."""

logger = logging.getLogger("mpitrain")


@dataclass(frozen=True, kw_only=True)
class Record:
    """What one rank says of itself."""

    software: Mapping[str, str]
    """Versions by name."""
    arguments: Mapping[str, str]
    """What this rank was asked for, by the argument's name, as Python writes it."""
    clock_seconds: float
    """Its clock when all ranks were at one place, seconds since 1970."""
    per_node: int | None = None
    """Processes per node that were asked for; ``None``: not said, or not seen here."""
    local_size: tuple[str, int] | None = None
    """The launcher's variable for the processes of this node, and its value."""


def compare(
    comm: MPI.Intracomm,
    world: World,
    config: LaunchConfig,
    timeout_seconds: float,
    launcher: Launcher,
    environ: Mapping[str, str],
) -> None:
    """Refuse to start where ranks contradict each other.

    Collective over `comm`: a barrier, then one allgather of a small record.

    Args:
        comm: All ranks.
        world: Where this process stands.
        config: What this rank was asked for.
        timeout_seconds: Likewise.
        launcher: What started this process.
        environ: Its environment.

    Raises:
        TopologyError: Versions, arguments, clocks or the number of ranks per node
            contradict each other. Raised on every rank or on none.
    """
    mine: dict[str, Any] = {
        "software": software(),
        "arguments": {
            name: repr(value)
            for name, value in {
                **asdict(config),
                "timeout_seconds": timeout_seconds,
            }.items()
        },
        "per_node": asked_per_node(launcher, environ),
        "local_size": local_size(environ),
    }
    wait_for_all(comm)  # so that the clocks are read at one moment
    mine["clock_seconds"] = time.time()
    # Plain dictionaries: another version of mpitrain must be able to read them.
    records = [
        Record(**{name: theirs.get(name) for name in mine})
        for theirs in comm.allgather(mine)
    ]
    check_software(records, world.nodes)
    check_arguments(records)
    check_ranks_per_node(records, world.nodes)
    apart = check_clocks(records, world.nodes)
    if apart and world.is_rank_zero:
        logger.warning("%s", apart)


def software() -> dict[str, str]:
    """Return the versions that must be equal on all ranks. Imports no torch.

    >>> sorted(software())
    ['MPI library', 'Python', 'mpi4py', 'mpitrain', 'torch']
    """
    found = {
        "mpitrain": mpitrain.__version__,
        "Python": f"{sys.version_info.major}.{sys.version_info.minor}",
        # Up to the comma: then comes on which machine it was built.
        "MPI library": " ".join(mpi_library().partition(",")[0].split()),
    }
    for package in ("torch", "mpi4py"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "unknown"
    return found


def local_size(environ: Mapping[str, str]) -> tuple[str, int] | None:
    """Return the variable in which the launcher counts this node's processes.

    >>> local_size({"OMPI_COMM_WORLD_LOCAL_SIZE": "4"})
    ('OMPI_COMM_WORLD_LOCAL_SIZE', 4)
    >>> local_size({}) is None
    True
    """
    for name in LOCAL_SIZE_VARIABLES:
        if environ.get(name, "").isdecimal():
            return name, int(environ[name])
    return None


def check_software(records: Sequence[Record], nodes: Sequence[Node]) -> None:
    """Refuse different versions on different ranks.

    Raises:
        TopologyError: With each version and where it is; on every rank or on none.
    """
    hosts = {rank: node.hostname for node in nodes for rank in node.ranks}
    lines = []
    for name in records[0].software:
        versions = _ranks_by([record.software.get(name) for record in records])
        if len(versions) > 1:
            found = (
                f"{version} on {list_hosts(hosts[rank] for rank in ranks)} "
                f"({_ranks(ranks)})"
                for version, ranks in versions.items()
            )
            lines.append(f"  {name}: {'; '.join(found)}")
    if lines:
        raise agreed(
            TopologyError(
                "the ranks do not run the same software.\n"
                + "\n".join(lines)
                + "\nExpected one version of each on all nodes. Use one environment on "
                "a file system that all nodes share, and hand it on: mpirun -x PATH "
                "-x LD_LIBRARY_PATH -x PYTHONPATH -x MPI4PY_LIBMPI"
            )
        )


def check_arguments(records: Sequence[Record]) -> None:
    """Refuse a start that the ranks were asked for in different ways.

    Raises:
        TopologyError: With each value and the ranks that have it; on every rank or on
            none.
    """
    lines = []
    for name in records[0].arguments:
        values = _ranks_by([record.arguments.get(name) for record in records])
        if len(values) > 1:
            found = (f"{value} on {_ranks(ranks)}" for value, ranks in values.items())
            lines.append(f"  {name}: {'; '.join(found)}")
    if lines:
        raise agreed(
            TopologyError(
                "the ranks ask for different things.\n"
                + "\n".join(lines)
                + "\nExpected the same arguments to mpitrain.init() on every rank."
            )
        )


def check_ranks_per_node(records: Sequence[Record], nodes: Sequence[Node]) -> None:
    """Refuse numbers of ranks per node other than those that were asked for.

    Fewer ranks than the nodes hold are what ``-np`` may ask for, as long as every node
    that has any has the same number.

    Raises:
        TopologyError: With the nodes that are different; on every rank or on none.
    """
    for node in nodes:
        said = records[node.ranks[0]].local_size
        if said is not None and said[1] != len(node.ranks):
            name, number = said
            raise agreed(
                TopologyError(
                    f"the launcher says that it started {number} processes on "
                    f"{node.hostname} ({name}={number}), but {len(node.ranks)} say "
                    f"that they run there ({_ranks(node.ranks)}).\n"
                    "Expected both to be equal. Give every machine (or container) a "
                    "host name of its own, and name it once in the host file."
                )
            )
    asked = next((r.per_node for r in records if r.per_node is not None), None)
    sizes = {len(node.ranks) for node in nodes}
    if asked is None or sizes == {asked} or (len(sizes) == 1 and max(sizes) < asked):
        return
    found = ", ".join(
        f"{len(node.ranks)} on {node.hostname}"
        for node in nodes
        if len(node.ranks) != asked
    )
    raise agreed(
        TopologyError(
            f"expected {asked} processes on every node, as was asked for, found "
            f"{found} (world_size={len(records)}, {len(nodes)} nodes).\n"
            f"Start {asked * len(nodes)}, the number of nodes times {asked}, or leave "
            "-np out; and look for a node that offers fewer slots."
        )
    )


def check_clocks(records: Sequence[Record], nodes: Sequence[Node]) -> str:
    """Refuse clocks that are minutes apart.

    Returns:
        What to say where they are more than a minute apart, else nothing.

    Raises:
        TopologyError: With the two hosts that are furthest apart; on every rank or on
            none.
    """
    # The earliest of a host: a rank may be held up between the barrier and its clock.
    clocks = {
        node.hostname: min(records[rank].clock_seconds for rank in node.ranks)
        for node in nodes
    }
    behind, ahead = (choose(clocks, key=clocks.__getitem__) for choose in (min, max))
    seconds = clocks[ahead] - clocks[behind]
    if seconds <= CLOCK_WARNING_SECONDS:
        return ""
    times = " and ".join(
        f"{datetime.fromtimestamp(clocks[host], UTC):%Y-%m-%d %H:%M:%S} on {host}"
        for host in (behind, ahead)
    )
    said = f"the hosts' clocks are {seconds:.0f} s apart: {times} (UTC)"
    if seconds <= CLOCK_LIMIT_SECONDS:
        return f"{said}; let them keep the network's time (timedatectl, chronyc)"
    raise agreed(
        TopologyError(
            f"{said}.\nExpected less than {CLOCK_LIMIT_SECONDS:.0f} s: deadlines and "
            "the times of logs and files are compared between hosts. Let them keep the "
            "network's time (timedatectl, chronyc), or leave that host out of the job."
        )
    )


def _ranks_by(values: Sequence[str | None]) -> dict[str, list[int]]:
    found: dict[str, list[int]] = {}
    for rank, value in enumerate(values):
        found.setdefault(value or "unknown", []).append(rank)
    return found


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {in_runs(ranks)}"
