"""From MPI to a ready process group: the stages, `init`, and the running `Job`."""

from __future__ import annotations

import atexit
import ctypes
import logging
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from mpitrain.config import (
    TIMEOUT_SECONDS,
    Backend,
    Device,
    LaunchConfig,
    default_start_timeout,
)
from mpitrain.errors import LaunchError, MpitrainError, UsageError
from mpitrain.flags import PROGRAM
from mpitrain.launch import cpu, gpu
from mpitrain.launch.consistency import check_consistency
from mpitrain.launch.env_checks import RANK_PID, lone_in_allocation, part_of_het_job
from mpitrain.launch.exit_guard import ExitGuard, abort_on_error, leave
from mpitrain.launch.process_exit import exit_now, exit_status
from mpitrain.launch.read_ahead import read_ahead
from mpitrain.launch.rendezvous import select, store, transports
from mpitrain.mpi.collectives import all_or_none, barrier
from mpitrain.mpi.topology import discover_world, node_comm
from mpitrain.mpi.world import World

if TYPE_CHECKING:
    from mpi4py import MPI
    from torch._C._distributed_c10d import Store

T = TypeVar("T")

logger = logging.getLogger("mpitrain")


def prepare_without_torch(
    guard: ExitGuard,
    config: LaunchConfig,
    timeout_seconds: float,
    variables: MutableMapping[str, str],
) -> tuple[World, select.Rendezvous, MPI.Intracomm]:
    """Do what can be done before torch is imported; writes to `variables`.

    The communicator that is returned has the ranks of this node.
    """
    comm = guard.comm
    start_timeout = default_start_timeout(config.hang_timeout, config.start_timeout)
    guard.watched.start_timeout_seconds = start_timeout
    with guard.stage("who is where"):
        on_node = node_comm(comm)
        world = discover_world(comm, on_node)
        check_consistency(comm, world, config, timeout_seconds)
    with guard.stage("network"):
        rendezvous = select.find_rendezvous(comm, on_node, world, config.interface)
        guard.rendezvous = rendezvous
    world = replace(world, master_addr=rendezvous.address, master_port=rendezvous.port)
    with guard.stage("watchdog"):
        guard.connect_watchdogs(world, on_node, rendezvous.own_address)
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
        world = cpu.configure_threads(comm, on_node, world, variables)
    return world, rendezvous, on_node


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
    world, rendezvous, on_node = prepare_without_torch(
        guard, config, timeout_seconds, variables
    )
    # torch's C++ warns of each client of the store whose address has no name.
    variables.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    with guard.stage("import torch"):
        if on_node.rank == 0:
            try:
                read_ahead(lambda: guard.watched.start("import torch"))
            except Exception as error:  # the import does without
                logger.info("torch was not read ahead: %r", error)
        barrier(on_node)  # the others would fetch the same pages one by one
        all_or_none(comm, _import_torch, "import torch")
    with guard.stage("devices"):
        world = gpu.assign_devices(comm, on_node, world, config, variables)
        on_node.Free()
    variables.update(torchrun_variables(world))
    with guard.stage("store"):
        prepare_here = partial(_prepare_torch, world, rendezvous, variables)
        all_or_none(comm, prepare_here, f"use {world.device}")
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
    guard: ExitGuard, world: World, timeout_seconds: float, store: Store | None = None
) -> None:
    """Start torch.distributed's default process group. Collective over all ranks."""
    import torch
    import torch.distributed as dist

    with guard.stage("process group"):
        dist.init_process_group(
            backend=world.backend,
            store=store or guard.store,
            rank=world.rank,
            world_size=world.world_size,
            timeout=timedelta(seconds=timeout_seconds),
            device_id=torch.device(world.device) if "ccl" in world.backend else None,
        )


def watch_steps(
    guard: ExitGuard, config: LaunchConfig, phase: str = "before the first step"
) -> None:
    """Let every optimizer step count as progress, until the ranks leave."""
    watched = guard.watched
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
    """Import torch; without the package ``cuda.bindings`` if there is no CUDA driver.

    It takes 7 % of the CPU time of the import (torch 2.14.1). Torch does without where
    it is not installed, as beside torch's builds for CPUs.
    """
    name = "cuda.bindings"
    is_hidden = not {"torch", name} & sys.modules.keys() and not _has_cuda_driver()
    if is_hidden:
        sys.modules[name] = None  # type: ignore[assignment] # as if not installed
    try:
        import torch.distributed  # noqa: F401
    finally:
        if is_hidden:
            del sys.modules[name]


def _has_cuda_driver() -> bool:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        return False
    return True


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


# A launch by ``mpitrain run``, without process group, for the script's `init`.
_pending: list[tuple[ExitGuard, LaunchConfig, World]] = []


def set_pending(guard: ExitGuard, config: LaunchConfig, world: World) -> None:
    """Let the next `init` take this launch, instead of making its own."""
    _pending[:] = [(guard, config, world)]


def _take_pending(
    guard: ExitGuard, config: LaunchConfig
) -> tuple[World, LaunchConfig] | None:
    """Take the pending launch, if there is one, and check that it fits."""
    if not _pending:
        return None
    before, started, world = _pending.pop()
    default = LaunchConfig()
    for name in ("device", "backend", "interface"):
        asked, found = getattr(config, name), getattr(started, name)
        if asked not in (getattr(default, name), found):
            raise UsageError(
                f"the script calls mpitrain.init({name}={asked!r}), but `run` has "
                f"started with {found!r} already; expected the same.\n"
                f"Type: {PROGRAM} run --{name} {asked} ..."
            ).on_all_ranks()
    guard.store = before.store
    guard.early_return, before.early_return = before.early_return, None
    hang_timeout = config.hang_timeout or started.hang_timeout
    return world, replace(config, hang_timeout=hang_timeout)


def init(
    *,
    device: Device = "auto",
    backend: Backend = "auto",
    interface: str | None = None,
    start_timeout_seconds: float | None = None,
    hang_timeout_seconds: float | None = None,
    timeout_seconds: float = TIMEOUT_SECONDS,
    guard: ExitGuard | None = None,
) -> Job:
    """Start torch.distributed on all ranks that mpirun started.

    Collective over all ranks.

    Starts MPI, takes rank and node from it, sets the number of threads, gives every
    rank its device, finds an address of rank zero that all nodes reach, and calls
    ``init_process_group``. Sets ``RANK``, ``WORLD_SIZE``, ``LOCAL_RANK``,
    ``LOCAL_WORLD_SIZE``, ``MASTER_ADDR`` and ``MASTER_PORT`` for libraries that ask.
    Without mpirun it is a world of one. In a script under ``python -m mpitrain run`` it
    continues the launch that ``run`` has begun.

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
        guard: The guard that already stands; ``None`` to make one.

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
    before = dict(os.environ)
    limit = default_start_timeout(hang_timeout_seconds, start_timeout_seconds)
    guard = guard or abort_on_error(start_timeout_seconds=limit)
    with guard:
        config = LaunchConfig(
            device=device,
            backend=backend,
            interface=interface,
            start_timeout=start_timeout_seconds,
            hang_timeout=hang_timeout_seconds,
        )
        pending = _take_pending(guard, config)
        if pending is None:
            world = prepare(guard, config, timeout_seconds, os.environ)
        else:
            world, config = pending
        init_process_group(guard, world, timeout_seconds)
        watch_steps(guard, config)
        if guard.early_return is None:
            watch_early_returns(guard, world)
    guard.world = world
    changed = os.environ.items() - before.items()
    variables_before = {it: before.get(it) for it, _ in changed if it != RANK_PID}
    return Job(world, guard, timeout_seconds, variables_before)


class Job:
    """A running job: a context manager whose value is this process's `World`.

    Made by `init`. When it is over the environment is as it was before.
    """

    def __init__(
        self,
        world: World,
        guard: ExitGuard,
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

    def on_end(self, action: Callable[[], object]) -> None:
        """Call `action` on this rank, in a thread, when the watchdog ends the job.

        Not for an exception on this rank.
        """
        self._guard.on_end.append(action)

    def __enter__(self) -> World:
        return self.world

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if error is not None and exit_status(error) != 0:
            self._closed = True
            self._guard.fail(error)
            self._destroy_process_group()
        else:
            self.close()

    def all_or_none(self, action: Callable[[], T], doing: str) -> T:
        """Do something on every rank; see `mpitrain.mpi.collectives.all_or_none`.

        Collective over all ranks.
        """
        return all_or_none(self.comm, action, doing)

    def progress(self, phase: str) -> None:
        """Tell the watchdog that this rank is alive and what it does next.

        Optimizer steps count by themselves. Call this in what takes long without
        them: once a batch of an evaluation, before a checkpoint. Costs a microsecond.

        Args:
            phase: Such as ``"evaluation"``; for a hang's report.
        """
        self._guard.watched.progress(phase)

    def close(self) -> None:
        """Wait for the other ranks and destroy the process group.

        Collective over all ranks. A second call does nothing.
        """
        if self._closed or os.getpid() != self._pid:
            return
        self._closed = True
        with self._guard:
            raised = sys.exc_info()[1]
            if raised is not None and exit_status(raised) != 0:
                self._guard.fail(raised)  # called from a `finally`
            sys.excepthook = self._previous_hook
            leave(self._guard, self._timeout_seconds)
            # A thread of gloo drops the tensors of the last collective just after it
            # is done. If Python has begun to end by then, that kills the process
            # ("terminate called without an active exception"; torch 2.15, by gdb).
            time.sleep(0.05)
            self._destroy_process_group()

    def _destroy_process_group(self) -> None:
        import torch.distributed as dist

        atexit.unregister(self.close)
        if dist.is_initialized():
            dist.destroy_process_group()
        self._guard.store = self._guard.world = None
        for name, value in self._variables_before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    def _excepthook(self, kind: Any, error: BaseException, trace: Any) -> None:
        self._closed = True
        self._guard.fail(error)
        self._previous_hook(kind, error, trace)
        # Alone; Python would end with 1. Not where another hook calls this one.
        is_last = sys.excepthook == self._excepthook and not hasattr(sys, "ps1")
        if isinstance(error, MpitrainError) and is_last:
            exit_now(error.exit_status)
