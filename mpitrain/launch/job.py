"""This rank's job: what it has, from MPI's start to its end.

start_job()       MPI, the watchdog and the exit guard
init.prepare()    the start steps: world, rendezvous, store
init.init()       the process group; the job is open
Job.close()       all ranks leave together
"""

from __future__ import annotations

import atexit
import contextlib
import copy
import faulthandler
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NoReturn, TypeVar, cast

from mpitrain.config import START_TIMEOUT_SECONDS, LaunchConfig
from mpitrain.errors import (
    EarlyReturnError,
    LaunchError,
    MpiNotFoundError,
    MpitrainError,
    TopologyError,
)
from mpitrain.launch.env_checks import (
    STATUS_FILE,
    check_size,
    foreign_library,
    forget_parent,
    hide_from_children,
    is_on_one_node,
    launched_rank,
    launched_size,
    launcher_sockets,
    may_be_alone,
    may_restart,
    was_launched,
)
from mpitrain.launch.exit_guard import FORWARD_SECONDS, ExitGuard
from mpitrain.launch.process_exit import (
    error_message,
    exit_after,
    exit_now,
    exit_status,
    flush,
)
from mpitrain.mpi.collectives import MPI_PROCESS, all_or_none, barrier
from mpitrain.mpi.implementation import start_mpi
from mpitrain.mpi.launchers import ON_ONE_NODE
from mpitrain.mpi.single_process import SingleProcess
from mpitrain.mpi.world import World, rank_label
from mpitrain.watchdog.client import Watchdog
from mpitrain.watchdog.coordinator import HANG_STATUS
from mpitrain.watchdog.heartbeat import State
from mpitrain.watchdog.process import age_seconds

if TYPE_CHECKING:
    from mpi4py import MPI
    from torch.utils.hooks import RemovableHandle

    from mpitrain.launch.early_return import EarlyReturnMonitor
    from mpitrain.launch.rendezvous.select import Rendezvous
    from mpitrain.torch_compat import Store

T = TypeVar("T")

LOST_HOST_SECONDS = 6.0  # without a word, where `supervise` starts the job again

logger = logging.getLogger("mpitrain")

_CLAIM_KEY = "mpitrain/failures"


class Job:
    """A running job: a context manager whose value is this process's `World`.

    Made by `mpitrain.init`. When it is over the environment is as it was before.
    """

    # The job of this process, once MPI has started. A class variable: users have only
    # the world in hand when they make a Trainer or Checkpointer, which beat and leave.
    current: ClassVar[Job | None] = None

    def __init__(self, comm: MPI.Intracomm, watchdog: Watchdog) -> None:
        self.watchdog = watchdog
        self.guard = ExitGuard(comm, watchdog, self._claim_report, self._note)
        watchdog.on_command = self.guard.handle_watchdog_command
        self.mpi = MPI_PROCESS
        self.start_seconds: dict[str, float] = {}  # of each step of the start
        self.is_running = False  # whether a training or a script may call
        self.is_preparing = False  # whether a command reads its flags, on rank zero
        self.rendezvous: Rendezvous | None = None
        self.store: Store | None = None  # of torch.distributed, and of failures
        self.early_return: EarlyReturnMonitor | None = None
        # A launch by `run`, without process group, for the script's `init`.
        self.pending: LaunchConfig | None = None
        self.run_dir: Path | None = None  # where it is recorded how the job ends
        self.run_dirs: set[Path] = set()  # that this process has opened, resolved
        self.locks: list[int] = []  # of these: descriptors; a `part` closes its own
        # What `replay` or a sweep lets a `Trainer` have instead of its callbacks.
        self.replace_callbacks: Callable[[Sequence[Any]], list[Any]] | None = None
        self.is_replay = False  # which writes nothing
        # The `PreemptionHandler` that all trainings share; `None`: each has its own.
        self.preemption_handler: Any = None
        # Some of the ranks, see `part`: when it began, by `time.monotonic`.
        self.part_began: float | None = None
        # Of torch, that a training has changed, as they were before it.
        self.torch_settings: dict[str, Any] = {}
        self._comm = comm
        self._world: World | None = None
        self._step_hook: RemovableHandle | None = None  # counts optimizer steps
        self._timeout_seconds: float | None = None
        self._variables_before: Mapping[str, str | None] = {}
        self._is_open = False  # from `init` on, until all leave
        self._pid = os.getpid()
        self._previous_hook = sys.excepthook

    # --- what users have of it --------------------------------------------------------

    @property
    def world(self) -> World:
        """This process's place among all ranks."""
        assert self._world is not None, "the start has not come so far"
        return self._world

    @property
    def comm(self) -> MPI.Intracomm:
        """All ranks, as an MPI communicator."""
        return self._comm

    def on_end(self, action: Callable[[], object]) -> None:
        """Call `action` on this rank, in a thread, when the watchdog ends the job.

        Not for an exception on this rank.
        """
        self.guard.on_end.append(action)

    def __enter__(self) -> World:
        return self.world

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if self.part_began is not None:
            return
        if error is not None and exit_status(error) != 0:
            self._is_open = False
            self.guard.fail(error)
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
        self.watchdog.progress(phase)

    def close(self) -> None:
        """Wait for the other ranks and destroy the process group.

        Collective over all ranks. A second call does nothing.
        """
        if not self._is_open or os.getpid() != self._pid:
            return
        self._is_open = False
        with self.guard:
            raised = sys.exc_info()[1]
            if raised is not None and exit_status(raised) != 0:
                self.guard.fail(raised)  # called from a `finally`
            sys.excepthook = self._previous_hook
            self.leave(self._timeout_seconds)
            # A thread of gloo drops the tensors of the last collective just after it
            # is done. If Python has begun to end by then, that kills the process
            # ("terminate called without an active exception"; torch 2.15, by gdb).
            time.sleep(0.05)
            self._destroy_process_group()

    @contextlib.contextmanager
    def part(self, world: World, comm: MPI.Intracomm) -> Iterator[Job]:
        """Let `Job.current` be of some ranks in this block, as in `sub_world`; local.

        It is what `mpitrain.init` returns to a script there; its end ends nothing.
        """
        # Not a deep copy: guard, watchdog and store stay those of the job.
        part = copy.copy(self)
        of_part = {"_comm": comm, "_world": world, "_is_open": False, "locks": []}
        vars(part).update(of_part, part_began=time.monotonic())
        Job.current = part
        try:
            yield part
        finally:
            Job.current = self
            for lock in part.locks:
                os.close(lock)

    # --- the start --------------------------------------------------------------------

    @contextlib.contextmanager
    def start_step(self, name: str) -> Iterator[None]:
        """Name a step of the start for the watchdog, and measure its time."""
        self.watchdog.start(name)
        started = time.perf_counter()
        yield
        self.start_seconds[name] = time.perf_counter() - started

    def run_in(self, world: World) -> None:
        """Let `current_world` and `heartbeat` know the world; local."""
        self._world, self.is_running = world, True

    def open(
        self,
        world: World,
        timeout_seconds: float,
        variables_before: Mapping[str, str | None],
    ) -> None:
        """Let every way out of this process close the job; local.

        `close` waits `timeout_seconds` for the others, and then gives the environment
        `variables_before` again.
        """
        self.run_in(world)
        self._timeout_seconds = timeout_seconds
        self._variables_before = variables_before
        self._is_open = True
        self._previous_hook = sys.excepthook
        sys.excepthook = self._excepthook
        atexit.register(self.close)

    def watch_steps(
        self, config: LaunchConfig, phase: str = "before the first step"
    ) -> None:
        """Let every optimizer step count as progress, until the ranks leave."""
        watchdog = self.watchdog
        watchdog.hang_timeout_seconds = config.hang_timeout or 0.0
        watchdog.expect_steps(phase)
        if not watchdog.counts_steps:  # under `run` its job does
            from torch.optim.optimizer import register_optimizer_step_post_hook

            def count(optimizer: object, *_: object) -> None:
                # ZeRO-1 has an optimizer inside, whose steps count already.
                if type(optimizer).__name__ != "ZeroRedundancyOptimizer":
                    watchdog.step_done()

            self._step_hook = register_optimizer_step_post_hook(count)
            watchdog.counts_steps = True

    def watch_early_returns(self, world: World) -> None:
        """Let ranks that have returned be known to those that wait for them."""
        from mpitrain.launch.early_return import EarlyReturnMonitor

        if self.store is not None and world.world_size > 1:
            self.early_return = EarlyReturnMonitor(
                self.store, world.rank, world.world_size, self.guard.fail
            )

    # --- the end ----------------------------------------------------------------------

    def leave(self, timeout_seconds: float | None) -> None:
        """Wait for the other ranks at the end, asleep; ``None``: for ever. Collective.

        Raises:
            EarlyReturnError: They did not come in time.
        """
        self.watchdog.set_state(State.LEFT)  # who waits here is no hang
        # Before the barrier: ranks that wait for this one in a collective look there.
        if self.early_return is not None:
            self.early_return.returned()
            self.early_return = None
        if not barrier(self.comm, timeout_seconds=timeout_seconds):
            raise EarlyReturnError(
                f"this rank was done, but others still worked {timeout_seconds:.0f} s "
                "later.\nExpected every rank to leave at about the same time: look for "
                "a return or sys.exit() that only some ranks reach."
            )
        # Only now is it known that no rank has failed.
        while self.guard.on_leave:
            self.guard.on_leave.pop()()
        if self._step_hook is not None:
            self._step_hook.remove()
            self._step_hook, self.watchdog.counts_steps = None, False
        self.watchdog.set_state(State.RUNNING)
        self.watchdog.idle()

    def _destroy_process_group(self) -> None:
        import torch.distributed as dist

        atexit.unregister(self.close)
        if dist.is_initialized():
            dist.destroy_process_group()
        self.store, self.is_running = None, False
        for name, value in self._variables_before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value

    def _excepthook(self, kind: Any, error: BaseException, trace: Any) -> None:
        self._is_open = False
        self.guard.fail(error)
        self._previous_hook(kind, error, trace)
        # Alone; Python would end with 1. Not where another hook calls this one.
        is_last = sys.excepthook == self._excepthook and not hasattr(sys, "ps1")
        if isinstance(error, MpitrainError) and is_last:
            exit_now(error.exit_status)

    def _claim_report(self) -> bool | None:
        return self.store.add(_CLAIM_KEY, 1) == 1 if self.store is not None else None

    def _note(self) -> str:
        return self.early_return.note() if self.early_return is not None else ""


def current_world() -> World | None:
    """Return the `World` of the job that runs in this process; ``None`` without one."""
    return Job.current.world if Job.current and Job.current.is_running else None


def seconds_since_start() -> float:
    """Return the seconds since this process, or a `Job.part` in it, has begun."""
    began = Job.current.part_began if Job.current else None
    return age_seconds() if began is None else time.monotonic() - began


def require_world(what: str) -> World:
    """Return the `World` of the job that runs in this process, which ``what`` needs."""
    if (world := current_world()) is None:
        raise LaunchError(
            f"no job runs in this process. Expected {what} within `with "
            "mpitrain.init():`, or under `python -m mpitrain run`"
        )
    return world


def heartbeat(phase: str) -> None:
    """Tell the watchdog that this rank is alive, and what it does next; local.

    Costs a microsecond. Without a job nothing happens.
    """
    if Job.current and Job.current.is_running:
        Job.current.watchdog.progress(phase)


def start_job(
    *, start_timeout_seconds: float = START_TIMEOUT_SECONDS, may_spawn: bool = True
) -> Job:
    """Start the watchdog and MPI; use the job's guard by ``with`` at once.

    A fault such as SIGSEGV prints the stacks of all threads.
    """
    if not faulthandler.is_enabled():
        with contextlib.suppress(Exception):  # stderr may not be a file
            faulthandler.enable()
    if forget_parent(os.environ):
        logger.warning("a rank of another job started this process: a world of one")
    if STATUS_FILE in os.environ:
        # `supervise` blocks it for the launcher, and Hydra's ranks inherit that.
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    # Not for scripts: MPI_Comm_spawn needs what these settings leave out.
    if not may_spawn and is_on_one_node(os.environ):
        for name, value in ON_ONE_NODE.items():
            os.environ.setdefault(name, value)
    before = Job.current
    watchdog = before.watchdog if before else None
    started = time.perf_counter()
    try:
        # Before MPI, whose start itself may hang (docs/decisions/0006).
        watchdog = watchdog or _start_watchdog(start_timeout_seconds)
        # The sidecar reports it just before.
        with exit_after(start_timeout_seconds + 1.5, HANG_STATUS):
            comm = MPI_PROCESS.without_mpi or _start_mpi()
    except LaunchError:
        # Where all ranks fail alike, rank 0's end ends this one before it reports.
        time.sleep(0.0 if launched_rank(os.environ) == 0 else 3.0)
        raise
    except BaseException as error:
        # MPI may have started: through its end this rank would wait for the others.
        if launched_size(os.environ) > 1 and watchdog is not None:
            _exit_without_guard(error, watchdog)
        raise
    try:
        check_size(comm.size, os.environ)
    except TopologyError as error:
        if error.reporting_rank == launched_rank(os.environ):
            raise
        time.sleep(1.0)  # this one's end may end rank 0, which is to report for all
        os._exit(1)
    if was_launched(os.environ):  # after MPI_Init, which needs what is hidden
        hide_from_children(os.environ)
    job = Job(comm, watchdog)
    job.start_seconds["starting MPI"] = time.perf_counter() - started
    if before is None:
        watchdog.idle()
    else:  # another job in this process: torch's settings are the process's
        job.torch_settings = before.torch_settings
        job.replace_callbacks = before.replace_callbacks
        job.is_replay = before.is_replay
    Job.current = job
    return job


def _start_mpi() -> MPI.Intracomm:
    """Start MPI; where there is none, this process may be a world of one."""
    try:
        return start_mpi(before=_warn_of_foreign_library)
    except MpiNotFoundError as error:
        if not may_be_alone(os.environ):
            raise
        logger.warning("%s", error.hint)
    MPI_PROCESS.without_mpi = comm = cast("MPI.Intracomm", SingleProcess())
    return comm


def _exit_without_guard(error: BaseException, watchdog: Watchdog) -> NoReturn:
    """Report and end, without MPI; the launcher ends the others."""
    watchdog.set_state(State.FAILING)
    rank, size = launched_rank(os.environ), launched_size(os.environ)
    label = rank_label(rank, size, socket.gethostname())
    print(error_message(error, label), file=sys.stderr)
    flush()
    time.sleep(FORWARD_SECONDS)
    os._exit(exit_status(error) or 1)


def _warn_of_foreign_library(library: str) -> None:
    warning = foreign_library(library, os.environ)
    if not warning:
        return
    if launched_rank(os.environ) == 0:
        # Not by a logger: MPI_Init may end the process before anything is set up.
        sys.stderr.write(f"warning: {warning}\n")
        flush()
        time.sleep(FORWARD_SECONDS)
    else:
        time.sleep(3.0)  # this one's end in MPI_Init would end rank 0 before it reports


def _start_watchdog(start_timeout_seconds: float) -> Watchdog:
    try:
        watchdog = Watchdog(
            rank=launched_rank(os.environ),
            world_size=launched_size(os.environ),
            launcher_sockets=launcher_sockets(os.environ),
            start_timeout_seconds=start_timeout_seconds,
            # A start that follows is cheap; a short cut of the network is not rare.
            lost_host_seconds=LOST_HOST_SECONDS if may_restart(os.environ) else 0.0,
        )
    except (OSError, RuntimeError) as error:  # the second: no thread could be started
        raise LaunchError(
            f"the watchdog's process did not start: {error}.\nExpected room for one "
            "more process beside each rank, and its threads (ulimit -u)"
        ) from None
    atexit.register(watchdog.close)
    return watchdog
