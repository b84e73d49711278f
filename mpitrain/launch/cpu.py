"""The cores of each rank, and how many threads it computes with."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
from collections import Counter
from collections.abc import Collection, Mapping, MutableMapping, Sequence
from dataclasses import replace
from operator import or_
from pathlib import Path
from typing import TYPE_CHECKING

from mpitrain.errors import UsageError
from mpitrain.launch.env_checks import was_launched
from mpitrain.mpi.collectives import (
    all_or_none,
    merge_lists,
    merge_on_rank_zero,
    on_rank_zero,
)
from mpitrain.mpi.launchers import DEFAULT, LAUNCHERS
from mpitrain.mpi.world import World, list_hosts
from mpitrain.schedulers.pbs import asks_for_ompthreads
from mpitrain.watchdog.process import cgroups, launcher_name, parent_of_rank

if TYPE_CHECKING:
    from mpi4py import MPI

logger = logging.getLogger("mpitrain")


def configure_threads(
    comm: MPI.Intracomm,
    on_node: MPI.Intracomm,
    world: World,
    variables: MutableMapping[str, str],
) -> World:
    """Count the cores of every node, and choose this rank's number of threads.

    Collective over `comm`; `on_node` has the ranks of this node. Before torch is
    imported: it reads OMP_NUM_THREADS once, which is set in `variables`.
    """
    masks = on_node.allgather(frozenset(os.sched_getaffinity(0)))
    quota, of_launcher = on_node.bcast((cpu_quota(), launcher_cores(variables)))
    counts = count_cores(masks, quota), idle_cores(masks, of_launcher)
    mine = {counts: [world.node_rank]} if world.local_rank == 0 else {}
    merged = merge_on_rank_zero(comm, mine, merge_lists)
    of_pbs: int | None
    by_counts, of_pbs = comm.bcast((merged, threads_of_pbs(variables)))
    nodes = list(world.nodes)
    idle = []
    for (num_cores, num_idle), numbers in by_counts.items():
        for number in numbers:
            nodes[number] = replace(nodes[number], num_cores=num_cores)
        idle += [(number, num_idle) for number in numbers if num_idle]
    if idle and world.is_rank_zero:
        launcher = LAUNCHERS[launcher_name(variables) or DEFAULT]
        hosts = [f"{num_idle} of {nodes[number].hostname}" for number, num_idle in idle]
        logger.warning(
            "each rank is bound to one core, and others stay idle: %s; to use "
            "them: %s %s",
            *(list_hosts(hosts), launcher.program, launcher.unbound),
        )
    num_cores = fair_shares(masks, quota)[world.local_rank]
    if of_pbs is not None:  # rank zero's: what follows is collective
        is_confined = len(frozenset().union(*masks)) < (os.cpu_count() or 1)
        num_cores = _cores_under_pbs(
            comm, world, num_cores, of_pbs, variables, is_confined=is_confined
        )
    num_threads = all_or_none(
        comm, lambda: threads_of(num_cores, variables), "read OMP_NUM_THREADS"
    )
    limit_blas(num_threads, variables)
    return replace(
        world, nodes=tuple(nodes), num_cores=num_cores, num_threads=num_threads
    )


def limit_blas(num_threads: int, variables: Mapping[str, str]) -> None:
    """Let numpy's BLAS compute with so many threads, unless a variable of its says.

    It has read OMP_NUM_THREADS itself, unless numpy was imported before that was set:
    in a warm rank, and in a script that imports it before `mpitrain.init`.
    """
    own = ("OPENBLAS_NUM_THREADS", "GOTO_NUM_THREADS", "MKL_NUM_THREADS")
    is_set = not variables.keys().isdisjoint((*own, "BLIS_NUM_THREADS"))
    if "numpy" in sys.modules and not is_set:
        # Its import sets this variable, which programs that this one starts would have.
        of_it = "KMP_DUPLICATE_LIB_OK"
        before = os.environ.get(of_it)
        from threadpoolctl import threadpool_limits

        if before is None:
            os.environ.pop(of_it, None)
        threadpool_limits(num_threads, user_api="blas")


def _cores_under_pbs(
    comm: MPI.Intracomm,
    world: World,
    num_cores: int,
    of_pbs: int,
    variables: MutableMapping[str, str],
    *,
    is_confined: bool,
) -> int:
    """Return this rank's cores where PBS has set ``OMP_NUM_THREADS`` to `of_pbs`.

    Those are the threads of one process if the job asked for ``ompthreads``, as qstat
    tells, or else all cores of a chunk, which its ranks share. Where PBS confines the
    job to its cores, those of the chunk are known. Collective over `comm`.
    """
    num_ranks = world.local_world_size
    of_rank = of_pbs // num_ranks if num_ranks <= of_pbs else of_pbs
    share = num_cores if is_confined else min(num_cores, of_rank)
    exceeds = variables.get("OMP_NUM_THREADS") == str(of_pbs) and of_pbs > share
    mine = {world.hostname: share} if exceeds else {}
    exceeding = merge_on_rank_zero(comm, mine, or_)
    # Once for the job, and only where it matters: qstat may take 30 s.
    is_asked = on_rank_zero(
        comm,
        lambda: bool(exceeding) and asks_for_ompthreads(variables["PBS_JOBID"]),
        "ask PBS for this job",
    )
    if is_asked:
        return min(num_cores, max(share, of_pbs))
    if exceeds:  # threads_of sets it anew
        del variables["OMP_NUM_THREADS"]
    if exceeding:
        logger.warning(
            "OMP_NUM_THREADS=%d, set by PBS, is more than the cores of each rank, "
            "which takes its share: %s (%s, or unset NCPUS)",
            of_pbs,
            list_hosts(f"{num} threads on {host}" for host, num in exceeding.items()),
            "qstat did not say if select has ompthreads; is it on PATH?"
            if is_asked is None
            else "for another number ask PBS for ompthreads in select",
        )
    return share


def launcher_cores(environ: Mapping[str, str]) -> frozenset[int]:
    """Return the cores of this process's parent: mpirun, or its daemon on this host.

    Empty where they are more than this job's.
    """
    if not was_launched(environ):
        return frozenset()
    try:
        cores = frozenset(os.sched_getaffinity(parent_of_rank()))
    except OSError:
        return frozenset()
    of_slurm = environ.get("SLURM_CPUS_ON_NODE", "")
    return frozenset() if of_slurm.isdecimal() and len(cores) > int(of_slurm) else cores


def idle_cores(masks: Sequence[frozenset[int]], of_launcher: frozenset[int]) -> int:
    """Count cores of the job that no rank of a node may use, if each is bound to one.

    By default Open MPI binds each of up to two ranks to one core, where threads and
    data workers then share it. A binding to a package or a NUMA domain is left alone.
    """
    if max(map(len, masks)) > hardware_threads_per_core():
        return 0
    return len(of_launcher.difference(*masks))


def cores_for_workers(world: World) -> str:
    """Say how many cores of its node a rank's data workers have, and how to get more.

    In the same words for each rank of a node, if they have as many.
    """
    num, num_ranks = os.cpu_count() or 1, world.local_world_size
    of_ranks = world.nodes[world.node_rank].num_cores
    text = f"{world.num_cores} of {num} cores reach this rank's workers"
    if of_ranks >= num:
        return f"{text}, which {num_ranks} ranks share" if num_ranks > 1 else text
    name = launcher_name(os.environ)
    if cpu_quota() < num:
        return f"{text}; the container may use no more"
    if name == "srun":
        return f"{text}; srun binds it: try --cpus-per-task={num // num_ranks}"
    if name and len(launcher_cores(os.environ)) > of_ranks:
        launcher = LAUNCHERS[name]
        return f"{text}; {launcher.program} binds it: try {launcher.unbound}"
    return f"{text}; the job has no more: ask the scheduler for them"


def hardware_threads_per_core() -> int:
    """Return how many logical cores of this host are one physical core."""
    import psutil

    physical = psutil.cpu_count(logical=False)
    return (os.cpu_count() or 1) // physical if physical else 1


def cpu_quota(
    root: Path = Path("/sys/fs/cgroup"), own: Path = Path("/proc/self/cgroup")
) -> float:
    """Return how many cores' worth of time this process may use; infinity: no limit.

    The least of its cgroup and those above it, such as a container's or a job's.
    ``cpu.max`` is of cgroups version 2, ``cpu.cfs_quota_us`` of version 1.
    """
    found = [float("inf")]
    for folder in cgroups("cpu", root, own):
        try:
            if (folder / "cpu.max").exists():
                quota, period = (folder / "cpu.max").read_text().split()
            else:
                names = ("cpu.cfs_quota_us", "cpu.cfs_period_us")
                quota, period = ((folder / name).read_text() for name in names)
            cores = int(quota) / int(period)
        except (OSError, ValueError, ZeroDivisionError):
            continue  # "max" among them
        if cores > 0:
            found.append(cores)
    return min(found)


def count_cores(masks: Sequence[Collection[int]], quota: float) -> int:
    """Count the cores that the ranks of one node may use together, at least 1."""
    return max(1, int(min(len(set().union(*masks)), quota)))


def fair_shares(
    masks: Sequence[Collection[int]], quota: float = float("inf")
) -> tuple[int, ...]:
    """Divide the cores of one node among its ranks.

    >>> fair_shares([{0, 1, 2, 3}, {0, 1, 2, 3}])
    (2, 2)
    """
    owners = Counter(core for mask in masks for core in mask)
    largest = quota / len(masks)
    # The sum of thirds is just below one: round before cutting.
    parts = (round(sum(1 / owners[core] for core in mask), 6) for mask in masks)
    return tuple(max(1, int(min(part, largest))) for part in parts)


def threads_of(num_cores: int, variables: MutableMapping[str, str]) -> int:
    """Return this rank's threads: ``OMP_NUM_THREADS``, which is set where it is not."""
    text = variables.get("OMP_NUM_THREADS", "").strip() or str(num_cores)
    variables["OMP_NUM_THREADS"] = text
    first = text.split(",")[0].strip()  # a list is for nested regions
    if not first.isdecimal() or int(first) < 1:
        raise UsageError(
            f"OMP_NUM_THREADS={text!r} in the environment; expected a number of "
            "threads of at least 1, or `unset OMP_NUM_THREADS` for a fair share"
        )
    return int(first)


def threads_of_pbs(environ: Mapping[str, str]) -> int | None:
    """Return the ``OMP_NUM_THREADS`` that PBS set; ``None`` where it is another's.

    In the job's shell PBS sets it and ``NCPUS`` to ``ompthreads``, the threads of one
    process, or, where the job did not ask for those, to all cores of its first chunk.
    mpirun hands ``OMP_NUM_THREADS`` to the ranks of every node, but ``NCPUS`` to those
    of its own alone.
    """
    of_chunk, text = environ.get("NCPUS", ""), environ.get("OMP_NUM_THREADS", "")
    is_pbs = {"PBS_JOBID", "PBS_NODEFILE"} <= environ.keys()
    if not is_pbs or text != of_chunk or not text.isdecimal():
        return None
    return int(text) or None


_M_TRIM_THRESHOLD = -1  # malloc.h
_M_MMAP_THRESHOLD = -3
_KEEP_BYTES = 1 << 30
_OLD_GLIBC_BYTES = 1 << 25  # half of one of its heaps; old versions allow no more


def keep_freed_memory(variables: Mapping[str, str]) -> None:
    """Let this process keep up to 1 GiB that it frees, for the next step.

    glibc hands much of what is freed back to the system, which clears every page of it
    before the next step gets it again: a training on CPUs may spend a third of its time
    on that. The environment is obeyed where it sets glibc's thresholds (mallopt(3));
    another C library is left alone (docs/explanation/devices.md).
    """
    names = {"MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_TOP_PAD_"}
    if names & variables.keys() or "glibc.malloc." in variables.get(
        "GLIBC_TUNABLES", ""
    ):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    # Large blocks come from the heap, too: those of mmap go back when they are freed.
    if not mallopt(_M_MMAP_THRESHOLD, _KEEP_BYTES):
        mallopt(_M_MMAP_THRESHOLD, _OLD_GLIBC_BYTES)
    mallopt(_M_TRIM_THRESHOLD, _KEEP_BYTES)
