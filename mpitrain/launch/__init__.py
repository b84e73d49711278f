"""From `mpirun` to a ready process group; useful without our trainer.

    import mpitrain

    with mpitrain.init() as world:
        model = DistributedDataParallel(model.to(world.device))
        ...

Read in the order of the start: `topology` (who am I), `threads`, `devices`, `network`
and `store` (where rank zero is reached), `environ`; and `guard`, which stands around
all of it.
"""

from __future__ import annotations

import atexit
import logging
import os
import sys
import time
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import replace
from datetime import timedelta
from types import TracebackType
from typing import TYPE_CHECKING, Literal, TypeVar

from mpitrain.launch import devices, environ, network, store, threads
from mpitrain.launch.guard import Guard, exit_status, guarded, leave
from mpitrain.topology import all_or_none, locate
from mpitrain.world import World

if TYPE_CHECKING:
    from mpi4py import MPI
    from torch._C._distributed_c10d import TCPStore

__all__ = ["Device", "Guard", "Job", "guarded", "init"]

T = TypeVar("T")

Device = Literal["auto", "cpu", "cuda"]

logger = logging.getLogger("mpitrain")


def init(
    *,
    device: Device = "auto",
    timeout_seconds: float = 1800.0,
    guard: Guard | None = None,
) -> Job:
    """Start torch.distributed on all ranks that mpirun started.

    Collective over all ranks.

    Starts MPI, learns rank and node from it, sets the number of threads, gives every
    rank its device, finds an address of rank zero that all nodes reach, and calls
    ``init_process_group``. Sets ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``,
    ``LOCAL_WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT`` for libraries that ask.
    Without mpirun it is a world of one.

    Use it with ``with``: then every way out of the block ends the whole job with the
    right status. Without ``with``, an uncaught exception still ends the job through
    `sys.excepthook`, and the end of the program waits for the others; but
    ``sys.exit(3)`` on one rank cannot be told from success there, and the job ends only
    when the others do not come within `timeout_seconds`.

    Args:
        device: ``"auto"`` for GPUs where there are any; ``"cpu"``; ``"cuda"`` to
            refuse to run without.
        timeout_seconds: How long one collective, and the last rank at the end, may
            take.
        guard: The guard that already stands; ``None`` to make one.

    Returns:
        The job, already running: a context manager whose value is the `World`; also
        its attribute `world`.

    Raises:
        LaunchError: The job cannot start; raised on every rank or on none. With more
            than one rank the job ends here.
    """
    guard = guard or guarded()
    before = dict(os.environ)
    with guard:
        world = _start(guard, device, timeout_seconds, os.environ)
    changed = {
        name: before.get(name)
        for name, value in os.environ.items()
        if before.get(name) != value
    }
    return Job(world, guard, timeout_seconds, changed)


class Job:
    """A running job: a context manager whose value is this process's `World`.

    Made by `init`. When it is over the environment is as it was before.
    """

    def __init__(
        self,
        world: World,
        guard: Guard,
        timeout_seconds: float,
        variables_before: Mapping[str, str | None],
    ) -> None:
        self.world = world
        self._variables_before = variables_before
        self._guard = guard
        self._timeout_seconds = timeout_seconds
        self._closed = False
        self._pid = os.getpid()
        self._previous_hook = sys.excepthook
        sys.excepthook = self._excepthook
        atexit.register(self.close)

    @property
    def comm(self) -> MPI.Intracomm:
        """All ranks, as an MPI communicator."""
        return self._guard.comm

    def __enter__(self) -> World:
        return self.world

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> Literal[False]:
        if error is not None and exit_status(error) != 0:
            self._closed = True
            self._guard.fail(error)
            self._destroy_process_group()
        else:
            self.close()
        return False

    def all_or_none(self, action: Callable[[], T], doing: str) -> T:
        """Do something on every rank; see `mpitrain.topology.all_or_none`.

        Collective over all ranks.
        """
        return all_or_none(self.comm, action, doing)

    def close(self) -> None:
        """Wait for the other ranks and take the process group down.

        Collective over all ranks. A second call does nothing.
        """
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        with self._guard:
            raised = sys.exc_info()[1]
            if raised is not None and exit_status(raised) != 0:
                self._guard.fail(raised)  # called from a `finally`
            leave(self._guard, self._timeout_seconds)
            # A thread of gloo drops the tensors of the last collective just after it
            # is done. If Python has begun to end by then, that kills the process
            # ("terminate called without an active exception"; torch 2.15, by gdb).
            time.sleep(0.05)
            self._destroy_process_group()

    def _destroy_process_group(self) -> None:
        import torch.distributed as dist

        atexit.unregister(self.close)
        sys.excepthook = self._previous_hook
        if dist.is_initialized():
            dist.destroy_process_group()
        self._guard.store = None
        for name, value in self._variables_before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    def _excepthook(
        self,
        kind: type[BaseException],
        error: BaseException,
        trace: TracebackType | None,
    ) -> None:
        self._closed = True
        self._guard.fail(error)
        self._previous_hook(kind, error, trace)


def _start(
    guard: Guard,
    device: Device,
    timeout_seconds: float,
    variables: MutableMapping[str, str],
) -> World:
    """Go from MPI to a ready process group. Collective over all ranks."""
    comm = guard.comm
    world = locate(comm)
    world = _settle_threads(comm, world, variables)
    if world.rank > 0:
        # What torch's C++ warns of on every rank is said by rank zero alone, such as
        # "hostname of the client socket cannot be retrieved"; errors still come.
        variables.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    all_or_none(comm, _import_torch, "import torch")
    world, shared = _plan_devices(comm, world, device)

    rendezvous = network.find_rendezvous(comm, world)
    world = replace(world, master_addr=rendezvous.address, master_port=rendezvous.port)
    variables.update(environ.torchrun_variables(world))
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        if rendezvous.interface:
            variables.setdefault(name, rendezvous.interface)
    all_or_none(comm, lambda: _prepare_torch(world), f"use {world.device}")
    guard.store = _open_store(comm, world, rendezvous, timeout_seconds)

    import torch
    import torch.distributed as dist

    dist.init_process_group(
        backend=world.backend,
        store=guard.store,
        rank=world.rank,
        world_size=world.world_size,
        timeout=timedelta(seconds=timeout_seconds),
        device_id=torch.device(world.device) if "nccl" in world.backend else None,
    )
    logger.info(
        "%s, local rank %d, computes on %s with %d threads; %s, rendezvous at %s:%d",
        *(world, world.local_rank, world.device, world.num_threads, world.backend),
        *(world.master_addr, world.master_port),
    )
    if shared and world.is_rank_zero:
        logger.warning(
            "some ranks share a GPU: gloo instead of NCCL, which refuses that; "
            "gradients travel through host memory"
        )
    return world


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


def _prepare_torch(world: World) -> None:
    import torch

    torch.set_num_threads(world.num_threads)
    if world.device != "cpu":
        torch.cuda.set_device(world.device)
