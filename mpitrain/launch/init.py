"""From MPI to a ready process group: the steps of the start, and `init`."""

from __future__ import annotations

import contextlib
import logging
import math
import multiprocessing
import os
import sys
from collections.abc import Mapping, MutableMapping
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any

from mpitrain.config import (
    START_TIMEOUT_SECONDS,
    TIMEOUT_SECONDS,
    Backend,
    Device,
    LaunchConfig,
    default_start_timeout,
)
from mpitrain.errors import LaunchError, UsageError
from mpitrain.flags import PROGRAM
from mpitrain.launch import cpu, gpu
from mpitrain.launch.consistency import check_consistency
from mpitrain.launch.env_checks import RANK_PID, lone_in_allocation, part_of_het_job
from mpitrain.launch.import_torch import import_torch
from mpitrain.launch.job import Job, start_job
from mpitrain.launch.read_ahead import read_ahead
from mpitrain.launch.rendezvous import select, store, transports
from mpitrain.launch.watchdog_tree import connect_watchdogs
from mpitrain.mpi.collectives import all_or_none, barrier
from mpitrain.mpi.topology import discover_world, node_comm
from mpitrain.mpi.world import World
from mpitrain.settings import flag_name

if TYPE_CHECKING:
    from mpi4py import MPI

    from mpitrain.torch_compat import Store

logger = logging.getLogger("mpitrain")


def prepare_without_torch(
    job: Job,
    config: LaunchConfig,
    timeout_seconds: float,
    variables: MutableMapping[str, str],
) -> tuple[World, select.Rendezvous, MPI.Intracomm]:
    """Do what can be done before torch is imported; writes to `variables`.

    The communicator that is returned has the ranks of this node.
    """
    comm = job.comm
    start_timeout = default_start_timeout(config.hang_timeout, config.start_timeout)
    job.watchdog.start_timeout_seconds = start_timeout
    with job.start_step("who is where"):
        on_node = node_comm(comm)
        world = discover_world(comm, on_node)
        # First: which collectives the next steps make depends on the arguments.
        check_consistency(comm, world, config, timeout_seconds)
    with job.start_step("network"):
        rendezvous = select.find_rendezvous(comm, on_node, world, config.interface)
        job.rendezvous = rendezvous
    world = replace(world, master_addr=rendezvous.address, master_port=rendezvous.port)
    with job.start_step("watchdog"):
        own_address = rendezvous.own_address
        connect_watchdogs(comm, job.watchdog, world, on_node, own_address)
    if world.num_nodes > 1:
        with job.start_step("MPI between nodes"):
            transports.check_mpi_messages(comm, world, rendezvous, start_timeout)
    if world.is_rank_zero:
        warning = part_of_het_job(variables, world.num_nodes)
        if world.world_size == 1:
            warning = warning or lone_in_allocation(variables)
        if warning:
            logger.warning("%s", warning)
    with job.start_step("threads"):
        world = cpu.configure_threads(comm, on_node, world, variables)
    return world, rendezvous, on_node


def prepare(
    job: Job,
    config: LaunchConfig,
    timeout_seconds: float,
    variables: MutableMapping[str, str],
) -> World:
    """Do all that comes before the process group, and open its store.

    Collective over all ranks. `variables`, the environment, is written to.
    """
    comm = job.comm
    world, rendezvous, on_node = prepare_without_torch(
        job, config, timeout_seconds, variables
    )
    # torch's C++ warns of each client of the store whose address has no name.
    variables.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    with job.start_step("import torch"):
        if on_node.rank == 0:
            try:
                read_ahead(lambda: job.watchdog.start("import torch"))
            except Exception as error:  # the import does without
                logger.info("torch was not read ahead: %r", error)
        barrier(on_node)  # the others would fetch the same pages one by one
        all_or_none(comm, import_torch, "import torch")
    with job.start_step("devices"):
        world = gpu.assign_devices(comm, on_node, world, config, variables)
        on_node.Free()
    variables.update(torchrun_variables(world))
    with job.start_step("store"):
        prepare_here = partial(_prepare_torch, world, rendezvous, variables)
        all_or_none(comm, prepare_here, f"use {world.device}")
        variables.update(transports.socket_variables(rendezvous, variables))
        job.store = store.open_store(comm, rendezvous, world, timeout_seconds)
    logger.info(
        "%s, local rank %d, computes on %s with %d threads; %s, rendezvous at %s:%d "
        "(%s), from %s (%s)",
        *(world, world.local_rank, world.device, world.num_threads, world.backend),
        *(world.master_addr, world.master_port, rendezvous.why),
        *(rendezvous.own_address, rendezvous.interface),
    )
    return world


def torchrun_variables(world: World) -> dict[str, str]:
    """Return the variables of torchrun that libraries look for.

    ``LOCAL_RANK`` is what they hand to ``torch.cuda.set_device``, so on GPUs it is the
    index of this rank's GPU, as with torchrun's ``--virtual-local-rank``.
    """
    return {
        "RANK": str(world.rank),
        "WORLD_SIZE": str(world.world_size),
        "LOCAL_RANK": world.device.partition(":")[2] or str(world.local_rank),
        "LOCAL_WORLD_SIZE": str(world.local_world_size),
        "MASTER_ADDR": world.master_addr,
        "MASTER_PORT": str(world.master_port),
    }


def init_process_group(
    job: Job, world: World, timeout_seconds: float, store: Store | None = None
) -> None:
    """Start torch.distributed's default process group. Collective over all ranks."""
    import torch
    import torch.distributed as dist

    with job.start_step("process group"):
        dist.init_process_group(
            backend=world.backend,
            store=store or job.store,
            rank=world.rank,
            world_size=world.world_size,
            timeout=timedelta(seconds=timeout_seconds),
            # With it NCCL connects now, not in the first collective.
            device_id=torch.device(world.device) if "ccl" in world.backend else None,
        )


def _prepare_torch(
    world: World, rendezvous: select.Rendezvous, variables: Mapping[str, str]
) -> None:
    import torch

    import mpitrain.backend  # noqa: F401 - torch finds it then, installed or not

    cpu.keep_freed_memory(variables)
    warning = transports.check_gloo(rendezvous, world.backend, variables)
    if warning and world.is_rank_zero:
        logger.warning("%s", warning)
    torch.set_num_threads(world.num_threads)
    if world.device != "cpu":
        torch.get_device_module(world.device).set_device(world.device)


def _read_config(**arguments: Any) -> LaunchConfig:
    """Return the configuration of arguments of `init`; its errors name these."""
    suffix = "_seconds"
    try:
        return LaunchConfig(
            **{name.removesuffix(suffix): it for name, it in arguments.items()}
        )
    except UsageError as error:
        text = str(error)
        for name in arguments:
            text = text.replace(flag_name(name.removesuffix(suffix)), name)
        raise UsageError(f"mpitrain.init(): {text}") from None


def _check_arguments(timeout_seconds: float) -> None:
    """Refuse what torch would refuse later, in words of its own."""
    is_number = isinstance(timeout_seconds, int | float)
    if not is_number or not 0 < timeout_seconds < math.inf:
        raise UsageError(
            f"mpitrain.init(timeout_seconds={timeout_seconds!r}): expected a number of "
            "seconds, above 0"
        )
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        raise UsageError(
            "mpitrain.init() was called where torch.distributed has a process group "
            "already; it makes that group itself. Expected no init_process_group(), "
            "and no other mpitrain.init(), before it"
        )


def _take_pending(launched: Job | None, config: LaunchConfig) -> LaunchConfig | None:
    """Take the launch of `run`, if there is one, and check that it fits."""
    if launched is None or launched.pending is None:
        return None
    started, launched.pending = launched.pending, None
    default = LaunchConfig()
    for name in ("device", "backend", "interface"):
        asked, found = getattr(config, name), getattr(started, name)
        if asked not in (getattr(default, name), found):
            raise UsageError(
                f"the script calls mpitrain.init({name}={asked!r}), but `run` has "
                f"started with {found!r} already; expected the same.\n"
                f"Type: {PROGRAM} run --{name} {asked} ..."
            ).on_all_ranks()
    hang_timeout = config.hang_timeout or started.hang_timeout
    return replace(config, hang_timeout=hang_timeout)


def init(
    *,
    device: Device = "auto",
    backend: Backend = "auto",
    interface: str | None = None,
    start_timeout_seconds: float | None = None,
    hang_timeout_seconds: float | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
    job: Job | None = None,
) -> Job:
    """Start torch.distributed on all ranks that mpirun started.

    Collective over all ranks.

    Starts MPI, takes rank and node from it, sets the number of threads, gives every
    rank its device, finds an address of rank zero that all nodes reach, and calls
    ``init_process_group``. Sets ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``,
    ``LOCAL_WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT`` for libraries that ask.
    Without mpirun it is a world of one. In a script under ``python -m mpitrain run`` it
    continues the launch that ``run`` has begun; in a trial of a sweep it returns the
    trial's ranks.

    Use it with ``with``: then every way out of the block ends the whole job with the
    right status. Without ``with``, an uncaught exception still ends the job through
    `sys.excepthook`, and the end of the program waits for the others; but
    ``sys.exit(3)`` on one rank cannot be told from success there, and the job ends only
    when the others do not come within `timeout_seconds`.

    Args:
        device: ``"auto"`` for GPUs where there are any; ``"cpu"``; ``"cuda"`` to
            refuse to run without.
        backend: ``"auto"`` for our backend over MPI (``"mpi4py"``), gloo where torch or
            MPI is too old for it, with NCCL on GPUs where it can; or one by name, for
            all tensors that it can carry.
        interface: The network interface of every node by which rank zero is reached;
            ``None`` for the best that works.
        start_timeout_seconds: How long a stage of the start, or the first step, may
            take before the job counts as hung; ``None``: 600, or
            `hang_timeout_seconds` where that is less, but at least 120.
        hang_timeout_seconds: How long all ranks may go without a finished optimizer
            step (or `Job.progress`) before the job is ended with status 76, and the
            screen names the ranks that did not arrive; ``None``: for ever. Take less
            than `timeout_seconds`.
        timeout_seconds: How long one collective, and the last rank at the end, may
            take.
        job: The job that is to be opened; ``None`` to start one.

    Returns:
        The job, already running: a context manager whose value is the `World`; also
        its attribute `world`.

    Raises:
        LaunchError: The job cannot start; raised on every rank or on none. With more
            than one rank the job ends here.
    """
    if multiprocessing.parent_process() is not None:
        raise LaunchError(
            "mpitrain.init() was called in a process that a rank started to read "
            "samples: such workers run the script again.\nExpected what it does, other "
            "than define, under `if __name__ == '__main__':`"
        )
    before = dict(os.environ)  # before start_job, which sets some, too
    launched = Job.current  # by `run`, perhaps
    # Rank zero alone is here, and the others would wait.
    if launched is not None and launched.is_preparing:
        raise UsageError(
            "mpitrain.init(), or fit() of a Trainer without a world, was called while "
            "the module of --task was imported; expected it under "
            "`if __name__ == '__main__':`"
        )
    read_config = partial(
        _read_config,  # its errors belong into the guard: they end all ranks
        device=device,
        backend=backend,
        interface=interface,
        start_timeout_seconds=start_timeout_seconds,
        hang_timeout_seconds=hang_timeout_seconds,
    )
    if launched is not None and launched.part_began is not None:
        _take_pending(launched, read_config())
        return launched
    limit = START_TIMEOUT_SECONDS
    with contextlib.suppress(UsageError):  # raised again below
        config = read_config()
        limit = default_start_timeout(config.hang_timeout, config.start_timeout)
    job = job or start_job(start_timeout_seconds=limit)
    with job.guard:
        config = read_config()
        _check_arguments(timeout_seconds)
        pending = _take_pending(launched, config)
        if launched is None or pending is None:
            world = prepare(job, config, timeout_seconds, os.environ)
        else:
            world, config = launched.world, pending
            job.store = launched.store
            job.early_return, launched.early_return = launched.early_return, None
        init_process_group(job, world, timeout_seconds)
        job.watch_steps(config)
        if job.early_return is None:
            job.watch_early_returns(world)
    changed = os.environ.items() - before.items()
    variables_before = {it: before.get(it) for it, _ in changed if it != RANK_PID}
    job.open(world, timeout_seconds, variables_before)
    return job
