"""`init` and `Job`: a whole start of torch.distributed, for scripts."""

from __future__ import annotations

import atexit
import multiprocessing
import os
import sys
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING, Literal, TypeVar

from mpitrain.config import (
    TIMEOUT_SECONDS,
    Backend,
    Device,
    LaunchConfig,
    default_start_timeout,
)
from mpitrain.errors import LaunchError
from mpitrain.launch import stages
from mpitrain.launch.current import set_current, unset_current
from mpitrain.launch.exit_guard import ExitGuard, abort_on_error, leave
from mpitrain.launch.process_exit import exit_status
from mpitrain.launch.run_script import take_pending_launch
from mpitrain.mpi.collectives import all_or_none
from mpitrain.mpi.world import World

if TYPE_CHECKING:
    from mpi4py import MPI

T = TypeVar("T")


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
        pending = take_pending_launch(guard, config)
        if pending is None:
            world = stages.prepare(guard, config, timeout_seconds, os.environ)
        else:
            world, config = pending.world, pending.config
        stages.init_process_group(guard, world, timeout_seconds)
        stages.watch_steps(guard, config)
        if guard.early_return is None:
            stages.watch_early_returns(guard, world)
    set_current(guard, world)
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
        if self._guard.watched is not None:
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
        unset_current()
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
