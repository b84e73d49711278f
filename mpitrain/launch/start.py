"""The stages between MPI and a ready process group, in their order."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, MutableMapping
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING

from mpitrain.launch import (
    agreement,
    devices,
    environ,
    heap,
    network,
    store,
    threads,
    transports,
)
from mpitrain.launch.config import LaunchConfig, default_start_timeout
from mpitrain.launch.contradictions import lone_in_allocation, part_of_het_job
from mpitrain.launch.guard import Guard
from mpitrain.launch.launcher import find_launcher
from mpitrain.launch.requirements import check_requirements
from mpitrain.topology import all_or_none, locate
from mpitrain.world import World

if TYPE_CHECKING:
    from mpi4py import MPI
    from torch._C._distributed_c10d import Store, TCPStore

logger = logging.getLogger("mpitrain")


def meet(
    guard: Guard,
    config: LaunchConfig,
    timeout_seconds: float,
    variables: MutableMapping[str, str],
) -> tuple[World, network.Rendezvous]:
    """Settle all that can be settled without torch.

    Collective over all ranks.

    Args:
        guard: The guard that stands.
        config: What was asked for.
        timeout_seconds: Compared over the ranks.
        variables: The environment, which is written to.

    Returns:
        Where this process stands, with its cores and threads; and where rank zero is
        reached.

    Raises:
        LaunchError: On every rank or on none.
    """
    comm = guard.comm
    start_timeout = default_start_timeout(config.hang_timeout, config.start_timeout)
    if guard.watched is not None:
        guard.watched.start_timeout_seconds = start_timeout
    with guard.stage("who is where"):
        world = locate(comm)
        launcher = find_launcher(os.getpid(), variables)
        agreement.compare(comm, world, config, timeout_seconds, launcher, variables)
        check_requirements()  # of the same versions on all ranks
    with guard.stage("network"):
        rendezvous = network.find_rendezvous(comm, world, config.interface)
        guard.rendezvous = rendezvous
    world = replace(world, master_addr=rendezvous.address, master_port=rendezvous.port)
    with guard.stage("watchdog"):
        guard.watch(world, world.master_addr)
    if world.num_nodes > 1:
        with guard.stage("MPI between nodes"):
            network.try_mpi(comm, world, rendezvous, start_timeout)
    alone = lone_in_allocation(variables) if world.world_size == 1 else None
    odd = part_of_het_job(variables, world.num_nodes) if world.is_rank_zero else None
    if odd or alone:
        logger.warning("%s", odd or alone)
    with guard.stage("threads"):
        world = threads.settle(comm, world, launcher, variables)
    return world, rendezvous


def prepare(
    guard: Guard,
    config: LaunchConfig,
    timeout_seconds: float,
    variables: MutableMapping[str, str],
) -> World:
    """Settle all that a process group needs, and open its store.

    Collective over all ranks.

    Args:
        guard: The guard that stands; its store is set.
        config: What was asked for.
        timeout_seconds: How long one answer of the store may take.
        variables: The environment, which is written to.

    Returns:
        Where this process stands, with its device, backend and rendezvous.

    Raises:
        LaunchError: On every rank or on none.
    """
    comm = guard.comm
    world, rendezvous = meet(guard, config, timeout_seconds, variables)
    if world.rank > 0:
        # What torch's C++ warns of on every rank is said by rank zero alone; errors
        # still come.
        variables.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    with guard.stage("import torch"):
        all_or_none(comm, _import_torch, "import torch")
    with guard.stage("devices"):
        world = devices.settle(comm, world, config, variables)
    variables.update(environ.torchrun_variables(world))
    with guard.stage("store"):
        all_or_none(
            comm,
            lambda: _prepare_torch(world, rendezvous, variables),
            f"use {world.device}",
        )
        variables.update(transports.socket_variables(rendezvous, variables))
        with store.errors_alone():
            guard.store = _open_store(comm, world, rendezvous, timeout_seconds)
    logger.info(
        "%s, local rank %d, computes on %s with %d threads; %s, rendezvous at %s:%d "
        "(%s), from %s (%s)",
        *(world, world.local_rank, world.device, world.num_threads, world.backend),
        *(world.master_addr, world.master_port, rendezvous.why),
        *(rendezvous.own_address, rendezvous.interface),
    )
    return world


def join(
    guard: Guard, world: World, timeout_seconds: float, store: Store | None = None
) -> None:
    """Start torch.distributed's default process group.

    Collective over all ranks of `world`.

    Args:
        guard: The guard that stands, with the store.
        world: Where this process stands, as `prepare` returned it.
        timeout_seconds: How long one collective may take.
        store: Where they meet, if it is not the first time; ``None``: the guard's.
    """
    import torch
    import torch.distributed as dist

    with guard.stage("process group"):
        dist.init_process_group(
            backend=world.backend,
            store=store or guard.store,
            rank=world.rank,
            world_size=world.world_size,
            timeout=timedelta(seconds=timeout_seconds),
            device_id=torch.device(world.device) if "nccl" in world.backend else None,
        )


def watch_steps(
    guard: Guard, config: LaunchConfig, phase: str = "before the first step"
) -> None:
    """Let every optimizer step count as progress, until the ranks leave.

    Args:
        guard: The guard that stands.
        config: What was asked for.
        phase: What comes before the first step.
    """
    watched = guard.watched
    if watched is None:
        return
    watched.hang_timeout_seconds = config.hang_timeout or 0.0
    watched.expect_steps(phase)
    if guard.step_hook is None:
        from torch.optim.optimizer import register_optimizer_step_post_hook

        def count(optimizer: object, *_: object) -> None:
            # ZeRO-1 has an optimizer inside, whose steps count already.
            if type(optimizer).__name__ != "ZeroRedundancyOptimizer":
                watched.step_done()

        guard.step_hook = register_optimizer_step_post_hook(count)


def watch_returns(guard: Guard, world: World) -> None:
    """Let ranks that have returned be known to those that wait for them.

    Args:
        guard: The guard that stands, with the store.
        world: Where this process stands.
    """
    from mpitrain.launch.returned import Returned

    if guard.store is not None and world.world_size > 1:
        guard.returned = Returned(guard.store, world.rank, world.world_size, guard.fail)


def _open_store(
    comm: MPI.Intracomm,
    world: World,
    rendezvous: network.Rendezvous,
    timeout_seconds: float,
) -> TCPStore:
    """Open the store on rank zero, then reach it from the others.

    Collective over `comm`. In two stages: a client of a server that failed would wait.
    """

    def open_it() -> TCPStore:
        return store.open_store(rendezvous, world, timeout_seconds)

    server = all_or_none(
        comm, lambda: open_it() if world.is_rank_zero else None, "open the store"
    )
    where = f"{world.master_addr}:{world.master_port}"
    return all_or_none(comm, lambda: server or open_it(), f"reach the store at {where}")


def _import_torch() -> None:
    import torch.distributed  # noqa: F401


def _prepare_torch(
    world: World, rendezvous: network.Rendezvous, variables: Mapping[str, str]
) -> None:
    import torch

    import mpitrain.mpi_backend  # noqa: F401 - torch finds it then, installed or not

    heap.keep_freed_memory(variables)
    transports.bind_gloo(rendezvous, variables)
    torch.set_num_threads(world.num_threads)
    if world.device != "cpu":
        torch.cuda.set_device(world.device)
