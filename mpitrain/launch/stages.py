"""The stages between MPI and a ready process group, in their order."""

from __future__ import annotations

import logging
from collections.abc import Mapping, MutableMapping
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING

from mpitrain.config import LaunchConfig, default_start_timeout
from mpitrain.launch import cpu, gpu
from mpitrain.launch.consistency import check_consistency
from mpitrain.launch.env_checks import lone_in_allocation, part_of_het_job
from mpitrain.launch.exit_guard import ExitGuard
from mpitrain.launch.rendezvous import select, store, transports
from mpitrain.mpi.collectives import all_or_none
from mpitrain.mpi.topology import discover_world
from mpitrain.mpi.world import World

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store

logger = logging.getLogger("mpitrain")


def prepare_without_torch(
    guard: ExitGuard,
    config: LaunchConfig,
    timeout_seconds: float,
    variables: MutableMapping[str, str],
) -> tuple[World, select.Rendezvous]:
    """Do what can be done before torch is imported; writes to `variables`.

    Collective over all ranks.
    """
    comm = guard.comm
    start_timeout = default_start_timeout(config.hang_timeout, config.start_timeout)
    if guard.watched is not None:
        guard.watched.start_timeout_seconds = start_timeout
    with guard.stage("who is where"):
        world = discover_world(comm)
        check_consistency(comm, world, config, timeout_seconds, variables)
    with guard.stage("network"):
        rendezvous = select.find_rendezvous(comm, world, config.interface)
        guard.rendezvous = rendezvous
    world = replace(world, master_addr=rendezvous.address, master_port=rendezvous.port)
    with guard.stage("watchdog"):
        guard.connect_watchdogs(world)
    if world.num_nodes > 1:
        with guard.stage("MPI between nodes"):
            transports.check_mpi_messages(comm, world, rendezvous, start_timeout)
    if world.is_rank_zero:
        warning = part_of_het_job(variables, world.num_nodes)
        if world.world_size == 1:
            warning = warning or lone_in_allocation(variables)
        if warning:
            logger.warning("%s", warning)
    with guard.stage("threads"):
        world = cpu.configure_threads(comm, world, variables)
    return world, rendezvous


def prepare(
    guard: ExitGuard,
    config: LaunchConfig,
    timeout_seconds: float,
    variables: MutableMapping[str, str],
) -> World:
    """Do all that comes before the process group, and open its store.

    Collective over all ranks. `variables`, the environment, is written to.
    """
    comm = guard.comm
    world, rendezvous = prepare_without_torch(guard, config, timeout_seconds, variables)
    if world.rank > 0:
        # Warnings of torch's C++ come from rank zero alone; errors from all.
        variables.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    with guard.stage("import torch"):
        all_or_none(comm, _import_torch, "import torch")
    with guard.stage("devices"):
        world = gpu.assign_devices(comm, world, config, variables)
    variables.update(torchrun_variables(world))
    with guard.stage("store"):
        all_or_none(
            comm,
            lambda: _prepare_torch(world, rendezvous, variables),
            f"use {world.device}",
        )
        variables.update(transports.socket_variables(rendezvous, variables))
        guard.store = store.open_store(comm, rendezvous, world, timeout_seconds)
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

    (https://docs.pytorch.org/docs/stable/elastic/run.html#environment-variables)
    """
    return {
        "RANK": str(world.rank),
        "WORLD_SIZE": str(world.world_size),
        "LOCAL_RANK": str(world.local_rank),
        "LOCAL_WORLD_SIZE": str(world.local_world_size),
        "MASTER_ADDR": world.master_addr,
        "MASTER_PORT": str(world.master_port),
    }


def init_process_group(
    guard: ExitGuard, world: World, timeout_seconds: float, store: Store | None = None
) -> None:
    """Start torch.distributed's default process group.

    Collective over all ranks of `world`.
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
    guard: ExitGuard, config: LaunchConfig, phase: str = "before the first step"
) -> None:
    """Let every optimizer step count as progress, until the ranks leave."""
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


def watch_early_returns(guard: ExitGuard, world: World) -> None:
    """Let ranks that have returned be known to those that wait for them."""
    from mpitrain.launch.early_return import EarlyReturnMonitor

    if guard.store is not None and world.world_size > 1:
        guard.early_return = EarlyReturnMonitor(
            guard.store, world.rank, world.world_size, guard.fail
        )


def _import_torch() -> None:
    import torch.distributed  # noqa: F401


def _prepare_torch(
    world: World, rendezvous: select.Rendezvous, variables: Mapping[str, str]
) -> None:
    import torch

    import mpitrain.backend  # noqa: F401 - torch finds it then, installed or not

    cpu.keep_freed_memory(variables)
    transports.bind_gloo(rendezvous, variables)
    torch.set_num_threads(world.num_threads)
    if world.device != "cpu":
        torch.cuda.set_device(world.device)
