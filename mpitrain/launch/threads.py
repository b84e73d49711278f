"""How many threads each rank may compute with, from the cores it may really use."""

from __future__ import annotations

import logging
import os
from collections.abc import Collection, Mapping, MutableMapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from mpitrain.errors import UsageError
from mpitrain.launch import cores
from mpitrain.launch.launcher import Launcher, binding_asked
from mpitrain.topology import all_or_none
from mpitrain.world import Node, World

if TYPE_CHECKING:
    from mpi4py import MPI

logger = logging.getLogger("mpitrain")


def settle(
    comm: MPI.Intracomm,
    world: World,
    launcher: Launcher,
    variables: MutableMapping[str, str],
) -> World:
    """Count the cores of every node and settle this rank's cores and threads.

    Collective over `comm`. Before torch is imported: it reads OMP_NUM_THREADS once, and
    its threads stay on the cores that they were made on.

    Args:
        comm: All ranks.
        world: Where this process stands.
        launcher: What started it.
        variables: The environment; OMP_NUM_THREADS is set there.

    Returns:
        The world with the cores of all nodes, and this rank's cores and threads.

    Raises:
        UsageError: OMP_NUM_THREADS is no number; on every rank or on none.
    """
    masks, quotas = _unbind(comm, world, launcher, variables)
    of_nodes = [
        ([masks[rank] for rank in node.ranks], quotas[node.ranks[0]])
        for node in world.nodes
    ]
    nodes = tuple(
        replace(node, num_cores=count_cores(*of_node))
        for node, of_node in zip(world.nodes, of_nodes, strict=True)
    )
    on_node, quota = of_nodes[world.node_rank]
    fair = share(on_node, quota)[world.local_rank]
    whole_machine = len(set().union(*on_node)) == os.cpu_count()
    of_chunk = share_of_chunk(
        variables, world.local_world_size, fair, whole_machine=whole_machine
    )
    if of_chunk is not None:
        if world.is_rank_zero:
            logger.warning(
                "OMP_NUM_THREADS=%s is what PBS sets for all %d ranks of the chunk: "
                "each takes its share, %d (to insist on your own number: unset NCPUS)",
                *(variables["OMP_NUM_THREADS"], world.local_world_size, of_chunk),
            )
        fair = of_chunk
        del variables["OMP_NUM_THREADS"]
    num_threads = all_or_none(
        comm, lambda: threads_of(fair, variables), "read OMP_NUM_THREADS"
    )
    return replace(world, nodes=nodes, num_cores=fair, num_threads=num_threads)


def _unbind(
    comm: MPI.Intracomm,
    world: World,
    launcher: Launcher,
    variables: Mapping[str, str],
) -> tuple[list[frozenset[int]], list[float]]:
    """Undo a binding that nobody asked for.

    Collective over `comm`.

    Returns:
        The cores that each rank may run on now, and the cores' worth of time that each
        may use; equal on all ranks.
    """
    mask = cores.usable_cores()
    mine = (
        cores.list_cores(mask),
        cores.list_cores(launcher.cores | mask),
        cores.is_one_core(mask),
        binding_asked(launcher, variables),
        cpu_quota(),
    )
    records = comm.allgather(mine)
    bindings = [
        cores.Binding(
            cores=cores.parse_cores(may),
            given=cores.parse_cores(given),
            one_core=one_core,
            asked=asked,
        )
        for may, given, one_core, asked, _ in records
    ]
    asked = cores.whether_asked(bindings)
    widenings = [
        cores.widen([bindings[rank] for rank in node.ranks], asked=asked)
        for node in world.nodes
    ]
    masks = [of_rank.cores for of_rank in bindings]
    if any(widening.cores for widening in widenings):
        wider = widenings[world.node_rank].cores
        if wider:
            cores.run_on(wider)
        now = cores.list_cores(cores.usable_cores())
        masks = [cores.parse_cores(found) for found in comm.allgather(now)]
    if world.is_rank_zero:
        _tell_binding(world.nodes, widenings)
    return masks, [record[-1] for record in records]


def cpu_quota(root: Path = Path("/sys/fs/cgroup")) -> float:
    """Return how many cores' worth of time the container may use.

    Args:
        root: Where cgroups are mounted; ``cpu.max`` there is version 2's
            (https://docs.kernel.org/admin-guide/cgroup-v2.html#cpu-interface-files),
            ``cpu/cpu.cfs_quota_us`` version 1's.

    Returns:
        Cores, such as 1.5; infinity without a limit.
    """
    try:
        if (root / "cpu.max").exists():
            quota, period = (root / "cpu.max").read_text().split()
        else:
            names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
            quota, period = ((root / "cpu" / name).read_text() for name in names)
        cores = int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return float("inf")  # "max" among them
    return cores if cores > 0 else float("inf")


def count_cores(masks: Sequence[Collection[int]], quota: float) -> int:
    """Count the cores that the ranks of one node may use together, at least 1.

    >>> count_cores([{0, 1}, {1, 2}], float("inf")), count_cores([range(64)], 8.0)
    (3, 8)
    """
    return max(1, int(min(len(set().union(*masks)), quota)))


def share_of_chunk(
    environ: Mapping[str, str],
    local_world_size: int,
    fair: int,
    *,
    whole_machine: bool,
) -> int | None:
    """Notice an ``OMP_NUM_THREADS`` that PBS set for all ranks of a chunk together.

    In the job's shell PBS sets it to the cores of the chunk, and NCPUS likewise; mpirun
    hands both to every rank, each of which would start threads for all.

    Args:
        environ: This process's environment.
        local_world_size: Number of ranks on this node.
        fair: This rank's share of the cores that the ranks may run on.
        whole_machine: Whether these are all cores of the machine. Then PBS does not
            hold the job to its own, and its word for their number counts.

    Returns:
        The threads that are fair, if it is so and they are fewer; else ``None``.

    >>> pbs = {"PBS_JOBID": "1.head", "PBS_NODEFILE": "/var/spool/pbs/aux/1.head"}
    >>> pbs |= {"NCPUS": "8", "OMP_NUM_THREADS": "8"}
    >>> share_of_chunk(pbs, 4, 2, whole_machine=False)
    2
    >>> share_of_chunk(pbs, 4, 16, whole_machine=True)
    2
    """
    if not {"PBS_JOBID", "PBS_NODEFILE"} <= environ.keys() or local_world_size < 2:
        return None
    of_chunk, wanted = environ.get("NCPUS", ""), environ.get("OMP_NUM_THREADS", "")
    if not of_chunk.isdecimal() or wanted != of_chunk:
        return None
    if whole_machine:
        fair = min(fair, max(1, int(of_chunk) // local_world_size))
    return fair if fair < int(of_chunk) else None


def _tell_binding(nodes: Sequence[Node], widenings: Sequence[cores.Widening]) -> None:
    """Say what became of ranks that mpirun bound to one core each. For rank zero."""
    for node, widening in zip(nodes, widenings, strict=True):
        if widening.cores:
            logger.info(
                "%s: mpirun bound each rank to one core by default; they may now run "
                "on all %d of the job, as with --bind-to none",
                *(node.hostname, len(widening.cores)),
            )
    idle = {
        node.hostname: widening.idle
        for node, widening in zip(nodes, widenings, strict=True)
        if widening.idle
    }
    if idle:
        logger.warning(
            "each rank is bound to one core, and %d core%s of %s stay%s idle; to use "
            "them: mpirun --bind-to none",
            *(sum(idle.values()), "s" * (sum(idle.values()) > 1), ", ".join(idle)),
            "s" * (sum(idle.values()) == 1),
        )


def threads_of(fair: int, variables: MutableMapping[str, str]) -> int:
    """Settle this rank's threads: ``OMP_NUM_THREADS`` where it is set, else its share.

    Args:
        fair: This rank's share of the cores.
        variables: The environment; ``OMP_NUM_THREADS`` is set there if it is not.

    Returns:
        The number of threads.

    Raises:
        UsageError: ``OMP_NUM_THREADS`` is no number of threads.

    >>> threads_of(4, {}), threads_of(4, {"OMP_NUM_THREADS": "2"})
    (4, 2)
    """
    wanted = variables.setdefault("OMP_NUM_THREADS", str(fair))
    first = wanted.split(",")[0].strip()  # a list is for nested regions
    if not first.isdecimal() or int(first) < 1:
        raise UsageError(
            f"OMP_NUM_THREADS={wanted!r} in the environment; expected a number of "
            "threads of at least 1, or `unset OMP_NUM_THREADS` for a fair share"
        )
    return int(first)


def share(
    masks: Sequence[Collection[int]], quota: float = float("inf")
) -> tuple[int, ...]:
    """Divide the cores of one node among its ranks.

    Args:
        masks: The cores that each rank may use, by local rank.
        quota: Cores' worth of time that all of them may use together.

    Returns:
        Threads per rank, at least 1: a core that n ranks may use counts 1/n for each.

    >>> share([{0, 1, 2, 3}, {0, 1, 2, 3}])
    (2, 2)
    >>> share([{0}, {1}]), share([{0, 1}] * 8), share([{0, 1, 2, 3}] * 2, quota=2.0)
    ((1, 1), (1, 1, 1, 1, 1, 1, 1, 1), (1, 1))
    """
    owners: dict[int, int] = {}
    for mask in masks:
        for core in mask:
            owners[core] = owners.get(core, 0) + 1
    most = quota / len(masks)
    # The sum of thirds is just below one: round before cutting.
    parts = (round(sum(1 / owners[core] for core in mask), 6) for mask in masks)
    return tuple(max(1, int(min(part, most))) for part in parts)
