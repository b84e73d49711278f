"""What must be equal on all ranks and may differ: compared before anything uses it.

What a rank has goes up a tree as the key of a dictionary, so ranks that are alike are
one entry, however many they are. Rank zero compares; all ranks raise, or none.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from importlib import metadata
from typing import TYPE_CHECKING

from mpitrain import _version
from mpitrain.errors import LaunchError, TopologyError
from mpitrain.mpi.collectives import (
    barrier,
    merge_lists,
    merge_on_rank_zero,
    on_rank_zero,
)
from mpitrain.mpi.implementation import mpi_library_version
from mpitrain.mpi.world import Node, World, format_ranges, list_hosts

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpitrain.config import LaunchConfig

CLOCK_WARNING_SECONDS = 60.0
CLOCK_LIMIT_SECONDS = 300.0

logger = logging.getLogger("mpitrain")


def check_consistency(
    comm: MPI.Intracomm, world: World, config: LaunchConfig, timeout_seconds: float
) -> None:
    """Refuse to start where ranks contradict each other. Collective over `comm`."""
    arguments = {**asdict(config), "timeout_seconds": timeout_seconds}
    asked = {name: repr(value) for name, value in arguments.items()}
    # JSON: another version of mpitrain must be able to read it.
    mine = json.dumps({"software": software(), "arguments": asked})
    by_record = merge_on_rank_zero(comm, {mine: [comm.rank]}, merge_lists) or {}
    barrier(comm)  # so that the clocks are read at one moment
    clocks = merge_on_rank_zero(comm, {world.node_rank: time.time()}, merge_earliest)

    def check() -> list[str]:
        if len(by_record) > 1:
            of_rank = {rank: it for it, ranks in by_record.items() for rank in ranks}
            records = [json.loads(of_rank[rank]) for rank in range(comm.size)]
            check_software([it.get("software", {}) for it in records], world.nodes)
            check_arguments([it.get("arguments", {}) for it in records])
        # Rank zero's packages stand for all, since their versions are equal by now.
        # Compared before that, an old one on one rank alone hung the others (MPICH).
        check_requirements()
        return [uneven_nodes(world.nodes), check_clocks(clocks or {}, world.nodes)]

    warnings = on_rank_zero(comm, check, "compare the ranks")
    if world.is_rank_zero:
        for text in filter(None, warnings):
            logger.warning("%s", text)


def merge_earliest(left: dict[int, float], right: dict[int, float]) -> dict[int, float]:
    """Merge the earliest clock of each node; a rank may be held up at its own."""
    for node, seconds in right.items():
        left[node] = min(seconds, left.get(node, seconds))
    return left


def software() -> dict[str, str]:
    """Return the versions that must be equal on all ranks. Imports no torch."""
    found = {
        "mpitrain": _version.__version__,
        "Python": f"{sys.version_info.major}.{sys.version_info.minor}",
        # Up to the comma: then comes on which machine it was built.
        "MPI library": " ".join(mpi_library_version().partition(",")[0].split()),
    }
    for package in ("torch", "mpi4py"):
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            found[package] = "unknown"
    return found


def check_software(by_rank: Sequence[Mapping[str, str]], nodes: Sequence[Node]) -> None:
    """Refuse different versions on different ranks."""
    hosts = {rank: node.hostname for node in nodes for rank in node.ranks}
    lines = _differences(
        by_rank,
        lambda ranks: f"{list_hosts(hosts[rank] for rank in ranks)} ({_named(ranks)})",
    )
    if lines:
        raise TopologyError(
            f"the ranks do not run the same software.\n{lines}\n"
            "Expected one version of each on all nodes. Use one environment on "
            "a file system that all nodes share, and hand it on: mpirun -x PATH "
            "-x LD_LIBRARY_PATH -x PYTHONPATH -x MPI4PY_LIBMPI"
        ).on_all_ranks()


def check_arguments(by_rank: Sequence[Mapping[str, str]]) -> None:
    """Refuse a start that the ranks were asked for in different ways."""
    lines = _differences(by_rank, _named)
    if lines:
        raise TopologyError(
            f"the ranks ask for different things.\n{lines}\n"
            "Expected the same arguments to mpitrain.init(), or flags of `run`, on all."
        ).on_all_ranks()


def uneven_nodes(nodes: Sequence[Node]) -> str:
    """Return a warning where nodes have different numbers of ranks."""
    hosts: dict[int, list[str]] = {}
    for node in nodes:
        hosts.setdefault(len(node.ranks), []).append(node.hostname)
    if len(hosts) == 1:
        return ""
    found = "; ".join(f"{size} on {list_hosts(on)}" for size, on in hosts.items())
    return (
        f"the nodes have different numbers of ranks: {found}. Expected as many on "
        "each, unless you mean it: leave -np out, or look for a node that offers "
        "fewer slots"
    )


def check_clocks(by_node: Mapping[int, float], nodes: Sequence[Node]) -> str:
    """Refuse clocks (seconds) that are minutes apart; warn of smaller differences."""
    clocks = {nodes[number].hostname: clock for number, clock in by_node.items()}
    behind, ahead = (choose(clocks, key=clocks.__getitem__) for choose in (min, max))
    seconds = clocks[ahead] - clocks[behind]
    if seconds <= CLOCK_WARNING_SECONDS:
        return ""
    times = " and ".join(
        f"{datetime.fromtimestamp(clocks[host], UTC):%Y-%m-%d %H:%M:%S} on {host}"
        for host in (behind, ahead)
    )
    text = f"the hosts' clocks are {seconds:.0f} s apart: {times} (UTC)"
    if seconds <= CLOCK_LIMIT_SECONDS:
        return f"{text}; let them keep the network's time (timedatectl, chronyc)"
    raise TopologyError(
        f"{text}.\nExpected less than {CLOCK_LIMIT_SECONDS:.0f} s: deadlines and "
        "the times of logs and files are compared between hosts. Let them keep the "
        "network's time (timedatectl, chronyc), or leave that host out of the job."
    ).on_all_ranks()


def _differences(
    by_rank: Sequence[Mapping[str, str]], where: Callable[[list[int]], str]
) -> str:
    lines = []
    for name in by_rank[0]:
        ranks: dict[str, list[int]] = {}
        for rank, values in enumerate(by_rank):
            # A rank of another version of mpitrain may not know the name.
            ranks.setdefault(values.get(name) or "unknown", []).append(rank)
        if len(ranks) > 1:
            found = (f"{value} on {where(having)}" for value, having in ranks.items())
            lines.append(f"  {name}: {'; '.join(found)}")
    return "\n".join(lines)


def _named(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {format_ranges(ranks)}"


def check_requirements() -> None:
    """Refuse packages older than the minimum that mpitrain was installed with."""
    if old := old_packages():
        found = "\n".join(
            f"  {name}: found {version}, expected {minimum} or newer"
            for name, version, minimum in old
        )
        raise LaunchError(
            f"packages of {sys.prefix} are too old for mpitrain.\n{found}\n"
            f"Type: {upgrade_command(old)}"
        ).on_all_ranks()


def old_packages() -> list[tuple[str, str, str]]:
    """Return name, version and minimum of each installed package that is too old.

    The minimum versions are in mpitrain's metadata, which a PYTHONPATH does not have.
    """
    old = []
    with contextlib.suppress(metadata.PackageNotFoundError):
        for line in metadata.requires("mpitrain") or []:
            # Not those of extras, which have a marker after a semicolon.
            if found := re.fullmatch(r"([\w.-]+)\s*>=\s*([\d.]+)", line):
                name, minimum = found.groups()
                version = metadata.version(name)
                if version_numbers(version) < version_numbers(minimum):
                    old.append((name, version, minimum))
    return old


def upgrade_command(old: list[tuple[str, str, str]]) -> str:
    """Return the command that upgrades some packages of this environment."""
    words = " ".join(f"'{name}>={minimum}'" for name, _, minimum in old)
    return f"{sys.executable} -m pip install --upgrade {words}"


def version_numbers(version: str) -> tuple[int, ...]:
    """Return the numbers that a version begins with.

    >>> version_numbers("2.15.0+cu132"), version_numbers("5.0.11rc1")
    ((2, 15, 0), (5, 0, 11))
    """
    found = re.match(r"\d+(?:\.\d+)*", version)
    return tuple(map(int, found[0].split("."))) if found else ()
