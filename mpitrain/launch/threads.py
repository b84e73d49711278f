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
from mpitrain.schedulers.pbs import asks_for_ompthreads
from mpitrain.topology import all_or_none, on_rank_zero
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
    masks, quotas, of_pbs = _unbind(comm, world, launcher, variables)
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
    if of_pbs is not None:
        whole_machine = len(set().union(*on_node)) == os.cpu_count()
        fair = _within_pbs(
            comm, world, of_pbs, fair, variables, whole_machine=whole_machine
        )
    num_threads = all_or_none(
        comm, lambda: threads_of(fair, variables), "read OMP_NUM_THREADS"
    )
    return replace(world, nodes=nodes, num_cores=fair, num_threads=num_threads)


def _unbind(
    comm: MPI.Intracomm,
    world: World,
    launcher: Launcher,
    variables: Mapping[str, str],
) -> tuple[list[frozenset[int]], list[float], int | None]:
    """Undo a binding that nobody asked for.

    Collective over `comm`.

    Returns:
        The cores that each rank may run on now, the cores' worth of time that each
        may use, and `threads_of_pbs` of rank zero; equal on all ranks.
    """
    mask = cores.usable_cores()
    mine = (
        cores.list_cores(mask),
        cores.list_cores(launcher.cores | mask),
        cores.is_one_core(mask),
        binding_asked(launcher, variables),
        cpu_quota(),
        threads_of_pbs(variables),
    )
    records = comm.allgather(mine)
    bindings = [
        cores.Binding(
            cores=cores.parse_cores(may),
            given=cores.parse_cores(given),
            one_core=one_core,
            asked=asked,
        )
        for may, given, one_core, asked, *_ in records
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
    return masks, [record[4] for record in records], records[0][5]


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


def threads_of_pbs(environ: Mapping[str, str]) -> int | None:
    """Return the ``OMP_NUM_THREADS`` that PBS set; ``None`` where it is another's.

    In the job's shell PBS sets it and ``NCPUS`` to ``ompthreads``, the threads of one
    process, or, where the job did not ask for those, to all cores of its first chunk.
    mpirun hands ``OMP_NUM_THREADS`` to the ranks of every node, but ``NCPUS`` to those
    of its own alone.

    >>> pbs = {"PBS_JOBID": "1.head", "PBS_NODEFILE": "/var/spool/pbs/aux/1.head"}
    >>> threads_of_pbs(pbs | {"NCPUS": "8", "OMP_NUM_THREADS": "8"})
    8
    """
    of_chunk, wanted = environ.get("NCPUS", ""), environ.get("OMP_NUM_THREADS", "")
    is_pbs = {"PBS_JOBID", "PBS_NODEFILE"} <= environ.keys()
    if not is_pbs or wanted != of_chunk or not wanted.isdecimal():
        return None
    return int(wanted) or None


def cores_by_pbs(of_pbs: int, local_world_size: int, job_id: str) -> int:
    """Return the cores that PBS gave to each rank of this node.

    Args:
        of_pbs: `threads_of_pbs`.
        local_world_size: Number of ranks on this node.
        job_id: The job; PBS is asked where the number may be for all ranks together.
    """
    if not 2 <= local_world_size <= of_pbs:
        return of_pbs
    asks = asks_for_ompthreads(job_id)
    if asks is None:
        logger.warning(
            "`qstat -f %s` does not tell whether the job asks for ompthreads: "
            "OMP_NUM_THREADS=%d is taken as the threads of each rank",
            *(job_id, of_pbs),
        )
    return of_pbs // local_world_size if asks is False else of_pbs


def _within_pbs(
    comm: MPI.Intracomm,
    world: World,
    of_pbs: int,
    fair: int,
    variables: MutableMapping[str, str],
    *,
    whole_machine: bool,
) -> int:
    """Return this rank's share of the cores by what PBS gave. Collective over `comm`.

    Where the ranks see all cores of the machine, PBS does not hold them to their own.
    """
    given = on_rank_zero(
        comm,
        lambda: (
            cores_by_pbs(of_pbs, world.local_world_size, variables["PBS_JOBID"])
            if whole_machine
            else of_pbs
        ),
        "ask PBS for this job",
    )
    if whole_machine:
        fair = min(fair, given)
    if variables.get("OMP_NUM_THREADS") == str(of_pbs) and of_pbs > fair:
        del variables["OMP_NUM_THREADS"]
        if world.is_rank_zero:
            logger.warning(
                "OMP_NUM_THREADS=%d, set by PBS, is more than the cores of each of the "
                "%d ranks on %s: each takes its share, %d (for a number of your own "
                "ask PBS for ompthreads, or unset NCPUS)",
                *(of_pbs, world.local_world_size, world.hostname, fair),
            )
    return fair


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
