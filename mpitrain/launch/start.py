"""The stages between MPI and a ready process group, in their order."""

from __future__ import annotations

import logging
from collections.abc import Mapping, MutableMapping
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING

from mpitrain.launch import devices, environ, network, store, threads, transports
from mpitrain.launch.config import Device, LaunchConfig
from mpitrain.launch.guard import Guard
from mpitrain.topology import all_or_none, locate
from mpitrain.world import World

if TYPE_CHECKING:
    from mpi4py import MPI
    from torch._C._distributed_c10d import TCPStore

logger = logging.getLogger("mpitrain")


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
    with guard.stage("who is where"):
        world = locate(comm)
    with guard.stage("threads"):
        world = _settle_threads(comm, world, variables)
    if world.rank > 0:
        # What torch's C++ warns of on every rank is said by rank zero alone, such as
        # "hostname of the client socket cannot be retrieved"; errors still come.
        variables.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    with guard.stage("import torch"):
        all_or_none(comm, _import_torch, "import torch")
    with guard.stage("devices"):
        world, shared = _plan_devices(comm, world, config.device)
    with guard.stage("network"):
        rendezvous = network.find_rendezvous(comm, world, config.interface)
    world = replace(world, master_addr=rendezvous.address, master_port=rendezvous.port)
    variables.update(environ.torchrun_variables(world))
    with guard.stage("store"):
        all_or_none(
            comm,
            lambda: _prepare_torch(world, rendezvous, variables),
            f"use {world.device}",
        )
        variables.update(transports.socket_variables(rendezvous, variables))
        guard.store = _open_store(comm, world, rendezvous, timeout_seconds)
    logger.info(
        "%s, local rank %d, computes on %s with %d threads; %s, rendezvous at %s:%d "
        "(%s), from %s (%s)",
        *(world, world.local_rank, world.device, world.num_threads, world.backend),
        *(world.master_addr, world.master_port, rendezvous.why),
        *(rendezvous.own_address, rendezvous.interface),
    )
    if shared and world.is_rank_zero:
        logger.warning(
            "some ranks share a GPU: gloo instead of NCCL, which refuses that; "
            "gradients travel through host memory"
        )
    return world


def join(guard: Guard, world: World, timeout_seconds: float) -> None:
    """Start torch.distributed's default process group.

    Collective over all ranks.

    Args:
        guard: The guard that stands, with the store.
        world: Where this process stands, as `prepare` returned it.
        timeout_seconds: How long one collective may take.
    """
    import torch
    import torch.distributed as dist

    with guard.stage("process group"):
        dist.init_process_group(
            backend=world.backend,
            store=guard.store,
            rank=world.rank,
            world_size=world.world_size,
            timeout=timedelta(seconds=timeout_seconds),
            device_id=torch.device(world.device) if "nccl" in world.backend else None,
        )


def _settle_threads(
    comm: MPI.Intracomm, world: World, variables: MutableMapping[str, str]
) -> World:
    """Count the cores of every node and settle this rank's threads.

    Collective over `comm`. Before torch is imported: it reads OMP_NUM_THREADS once.
    """
    records = comm.allgather((threads.usable_cores(), threads.cpu_quota()))
    masks = [
        ([records[rank][0] for rank in node.ranks], records[node.ranks[0]][1])
        for node in world.nodes
    ]
    nodes = tuple(
        replace(node, num_cores=threads.count_cores(*of_node))
        for node, of_node in zip(world.nodes, masks, strict=True)
    )
    fair = threads.share(*masks[world.node_rank])[world.local_rank]
    num_threads = all_or_none(
        comm, lambda: threads.settle(fair, variables), "read OMP_NUM_THREADS"
    )
    return replace(world, nodes=nodes, num_threads=num_threads)


def _plan_devices(
    comm: MPI.Intracomm, world: World, device: Device
) -> tuple[World, bool]:
    """Give every rank its device; also tell whether some GPU is shared.

    Collective over `comm`.
    """
    seen = all_or_none(
        comm, lambda: devices.visible_gpus() if device != "cpu" else (), "ask for GPUs"
    )
    plan = devices.plan(comm.allgather(seen), world.nodes, required=device == "cuda")
    nodes = tuple(
        replace(node, devices=tuple(plan.devices[rank] for rank in node.ranks))
        for node in world.nodes
    )
    device_here = plan.devices[world.rank]
    world = replace(world, nodes=nodes, device=device_here, backend=plan.backend)
    return world, plan.shared


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

    transports.bind_gloo(rendezvous, variables)
    torch.set_num_threads(world.num_threads)
    if world.device != "cpu":
        torch.cuda.set_device(world.device)
