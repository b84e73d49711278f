"""Every way out of one rank ends the whole job, and says why once.

Under plain ``mpirun python`` a rank that raises leaves the others waiting for it for
ever (mpi4py issue 290): its interpreter reaches MPI_Finalize, which waits for them.
The guard stands around everything between MPI_Init and the end.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import functools
import logging
import operator
import os
import secrets
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, NoReturn

from mpitrain.config import START_TIMEOUT_SECONDS
from mpitrain.errors import EarlyReturnError, LaunchError, TopologyError
from mpitrain.launch.env_checks import (
    check_size,
    foreign_library,
    forget_parent,
    hide_from_children,
    is_on_one_node,
    launched_rank,
    launched_size,
    launcher_sockets,
    was_launched,
)
from mpitrain.launch.process_exit import (
    error_message,
    exit_after,
    exit_status,
    flush,
    ignore_children,
    is_consequence,
    write_status,
)
from mpitrain.mpi.collectives import barrier, merge_on_rank_zero
from mpitrain.mpi.implementation import start_mpi
from mpitrain.mpi.launchers import ON_ONE_NODE
from mpitrain.mpi.world import World, rank_label
from mpitrain.watchdog.client import WatchdogClient
from mpitrain.watchdog.coordinator import HANG_STATUS
from mpitrain.watchdog.heartbeat import State

if TYPE_CHECKING:
    from mpi4py import MPI
    from torch._C._distributed_c10d import Store
    from torch.utils.hooks import RemovableHandle

    from mpitrain.launch.early_return import EarlyReturnMonitor
    from mpitrain.launch.rendezvous.select import Rendezvous

logger = logging.getLogger("mpitrain")

MAX_DIRECT_LINKS = 4096  # to rank zero's watchdog; of more ranks they are a tree
FAN_OUT = 128  # nodes whose watchdogs report to one
CONSEQUENCE_SECONDS = 4.0  # how long to wait for the message of a peer that went away
_FORWARD_SECONDS = 0.5  # to forward the message: an abort of MPICH's drops it
_CALLBACK_SECONDS = 3.0
_CLAIM_SECONDS = 2.0
_CLAIM_KEY = "mpitrain/failures"
_RECORD_SECONDS = 2.5  # for another rank to write a hang into the record


class ExitGuard:
    """A context manager around all that a rank does with others.

    Leaving it by an exception, by `sys.exit` with a status other than 0 or by Ctrl-C
    ends every rank of the job with that status. Only the first rank to fail prints its
    error. A world of one has nobody to end: there the exception just propagates.
    """

    # This process's guard, once MPI has started; the watchdog's thread uses it.
    current: ClassVar[ExitGuard | None] = None

    def __init__(self, comm: MPI.Intracomm, watched: WatchdogClient) -> None:
        self.comm = comm
        self.watched = watched
        self.world: World | None = None  # of the job that runs now
        self.store: Store | None = None  # where ranks agree who failed first
        self.rendezvous: Rendezvous | None = None
        self.early_return: EarlyReturnMonitor | None = None
        self.stage_seconds: dict[str, float] = {}
        self.step_hook: RemovableHandle | None = None  # counts optimizer steps
        # Called with the message on the rank that prints it, before the end.
        self.on_failure: list[Callable[[str], object]] = []
        # Called on every rank that the watchdog is about to end.
        self.on_end: list[Callable[[], object]] = []
        # Called when all ranks have left without an error.
        self.on_leave: list[Callable[[], object]] = []
        self.run_dir: Path | None = None  # into which `on_failure` writes
        self.status = 1  # with which the job fails
        self._rank, self._size = comm.rank, comm.size  # after MPI_Finalize, too
        self._label = rank_label(comm.rank, comm.size, socket.gethostname())
        self._failed = False
        self._is_reported = False  # the watchdog has said why the job ends
        self._pid = os.getpid()

    def __enter__(self) -> ExitGuard:
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if error is not None and exit_status(error) != 0:
            self.fail(error)

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Name a stage of the start for the watchdog, and measure its time."""
        self.watched.start(name)
        started = time.perf_counter()
        yield
        self.stage_seconds[name] = time.perf_counter() - started

    def fail(self, error: BaseException) -> None:
        """End the job because of an error on this rank.

        Returns only in a world of one, where the caller re-raises `error`. A process
        forked off a rank ends alone.
        """
        if os.getpid() != self._pid:
            if not isinstance(error, SystemExit):
                traceback.print_exception(error)
            flush()
            # Not through MPI_Finalize: MPI is its parent's.
            os._exit(exit_status(error))
        if self._failed:
            return
        self._failed = True
        self.on_leave.clear()  # also where a world of one continues
        self.status = status = exit_status(error) or 1
        if self._size > 1:
            ignore_children()
            if not is_consequence(error):
                write_status(status)  # now: another rank that fails may be the first
        try:
            self._report_if_first(error)
        finally:
            # Whatever went wrong on the way (no memory, a second Ctrl-C): the job ends.
            if self._size > 1:
                write_status(status)
                self._abort(status)

    def _report_if_first(self, error: BaseException) -> None:
        reporting_rank = getattr(error, "reporting_rank", None)
        if reporting_rank is not None:
            first = reporting_rank == self._rank
        else:
            first = self._size == 1 or self._is_first(error)
        if self._size > 1:
            # Its sidecar need not: this rank, or another, reports the cause.
            self.watched.set_state(State.FAILING)
        if first:
            self._report(error)
        if self._size > 1 and reporting_rank is not None:
            barrier(self.comm, timeout_seconds=_CLAIM_SECONDS)
        elif not first:
            time.sleep(CONSEQUENCE_SECONDS)  # the first one's abort comes before this

    def _report(self, error: BaseException) -> None:
        if self._size == 1:
            self.watched.idle()  # a world of one may continue after it
        try:
            text = error_message(error, self._label)
        except Exception:
            text = f"[{self._label}] {type(error).__name__} that cannot be printed"
        if self.early_return is not None and is_consequence(error):
            with contextlib.suppress(Exception):  # the store may be gone
                text += self.early_return.note()
        if self._size > 1:
            flush()
            sys.stderr.write(text + "\n")
            flush()
            time.sleep(_FORWARD_SECONDS)
        # After the message, and not for long: a dead file server may be the reason.
        for callback in self.on_failure:
            _call_within(_CALLBACK_SECONDS, functools.partial(callback, text))

    def _is_first(self, error: BaseException) -> bool:
        """Whether no other rank has said why the job ends."""
        if is_consequence(error):
            time.sleep(CONSEQUENCE_SECONDS)
        if self._is_reported:
            return False
        if self.store is None:
            # Nothing to agree by: the lower ranks report, and abort, first.
            time.sleep(1.5 * min(self._rank, 2))
            return True
        store, claims = self.store, list[bool]()

        def claim() -> None:
            try:
                claims.append(store.add(_CLAIM_KEY, 1) == 1)
            except Exception:
                # Rank zero holds the store: it ended first, and mpirun names it.
                claims.append(False)

        _call_within(_CLAIM_SECONDS, claim)  # a stopped store would never answer
        return claims[0] if claims else True

    def connect_watchdogs(
        self, world: World, on_node: MPI.Intracomm, own_address: str
    ) -> None:
        """Connect the ranks' sidecars to rank zero's, at the rendezvous address.

        Beyond `MAX_DIRECT_LINKS` ranks in a tree: the ranks of a node report through
        that of its first rank, and each group of `FAN_OUT` nodes through that of its
        first node. Collective over all ranks; `on_node` has those of this node, which
        other nodes reach at `own_address`.
        """
        watched, token, size = self.watched, "", world.world_size

        def listen(address: str) -> tuple[str, int] | None:
            try:
                return address, watched.listen(address, token, world.rank, size)
            except OSError as error:
                logger.warning("hangs may be seen late: %s", error)
                return None

        place = None
        if world.is_rank_zero and not watched.is_connected:
            token = secrets.token_hex(16)
            place = listen(world.master_addr if size > 1 else "")
        place, token = self.comm.bcast((place, token))
        if place is None:
            return  # also for a second job of these processes: the first's stands
        watched.is_connected = True
        places = [place]
        if size > MAX_DIRECT_LINKS:
            node, is_first = world.node_rank, world.local_rank == 0
            is_hub = 0 < node < world.num_nodes - 1 and node % FAN_OUT == 0
            local = None
            if is_first and node > 0:
                local = listen(own_address if is_hub else "127.0.0.1")
            found = {node: local} if is_first and is_hub else {}
            hubs = merge_on_rank_zero(self.comm, found, operator.or_)
            hub = self.comm.bcast(hubs).get(node - node % FAN_OUT)
            local = on_node.bcast(local)
            # Rank zero's, too: a relay may be out of reach, or end before others.
            wanted = (None if is_first else local, None if is_hub else hub, place)
            places = list(dict.fromkeys(filter(None, wanted)))
        if not world.is_rank_zero:
            watched.connect(places, token, world.rank, size)

    def obey_watchdog(self, status: int | None, text: str) -> None:
        """Record `text`; end the job if there is a `status`; called in a thread."""
        self._is_reported = True
        calls = [*self.on_end] if status is not None else []
        if text:
            calls += [functools.partial(callback, text) for callback in self.on_failure]
        for call in calls:
            _call_within(1.0, call)
        if status is not None:
            time.sleep(_FORWARD_SECONDS if text else _RECORD_SECONDS)
            self._abort(status)

    def _abort(self, status: int) -> NoReturn:
        flush()
        self.watched.end_stopped_sidecar()
        if not sys.modules["mpi4py.MPI"].Is_finalized():
            self.comm.Abort(status)
        os._exit(status)  # after MPI_Finalize, or where Abort should ever return


def abort_on_error(
    *, start_timeout_seconds: float = START_TIMEOUT_SECONDS, may_spawn: bool = True
) -> ExitGuard:
    """Start the watchdog and MPI; return this process's guard, to be used by ``with``.

    A fault such as SIGSEGV prints the stacks of all threads.
    """
    if not faulthandler.is_enabled():
        with contextlib.suppress(Exception):  # stderr may not be a file
            faulthandler.enable()
    if forget_parent(os.environ):
        logger.warning("a rank of another job started this process: a world of one")
    if not may_spawn and is_on_one_node(os.environ):
        for name, value in ON_ONE_NODE.items():
            os.environ.setdefault(name, value)
    before = ExitGuard.current
    watched = None
    started = time.perf_counter()
    try:
        watched = before.watched if before else _start_watchdog(start_timeout_seconds)
        # The sidecar reports it just before.
        with exit_after(start_timeout_seconds + 1.5, HANG_STATUS):
            comm = start_mpi(before=_warn_of_foreign_library)
    except LaunchError:
        # Where all ranks fail alike, rank 0's end ends this one before it reports.
        time.sleep(0.0 if launched_rank(os.environ) == 0 else 3.0)
        raise
    except BaseException as error:
        # MPI may have started: through its end this rank would wait for the others.
        if launched_size(os.environ) > 1 and watched is not None:
            _exit_without_guard(error, watched)
        raise
    try:
        check_size(comm.size, os.environ)
    except TopologyError as error:
        if error.reporting_rank == launched_rank(os.environ):
            raise
        time.sleep(1.0)  # this one's end may end rank 0, which is to report for all
        os._exit(1)
    if was_launched(os.environ):
        hide_from_children(os.environ)
    guard = ExitGuard(comm, watched)
    guard.stage_seconds["starting MPI"] = time.perf_counter() - started
    if before is None:
        watched.idle()
    ExitGuard.current = guard
    return guard


def _exit_without_guard(error: BaseException, watched: WatchdogClient) -> NoReturn:
    """Report and end, without MPI; the launcher ends the others."""
    watched.set_state(State.FAILING)
    rank, size = launched_rank(os.environ), launched_size(os.environ)
    label = rank_label(rank, size, socket.gethostname())
    print(error_message(error, label), file=sys.stderr)
    flush()
    time.sleep(_FORWARD_SECONDS)
    os._exit(exit_status(error) or 1)


def _warn_of_foreign_library(library: str) -> None:
    odd = foreign_library(library, os.environ)
    if not odd:
        return
    if launched_rank(os.environ) == 0:
        # Not by a logger: MPI_Init may end the process before anything is set up.
        sys.stderr.write(f"warning: {odd}\n")
        flush()
        time.sleep(_FORWARD_SECONDS)
    else:
        time.sleep(3.0)  # this one's end in MPI_Init would end rank 0 before it reports


def _start_watchdog(start_timeout_seconds: float) -> WatchdogClient:
    try:
        watched = WatchdogClient(
            rank=launched_rank(os.environ),
            world_size=launched_size(os.environ),
            launcher_sockets=launcher_sockets(os.environ),
            start_timeout_seconds=start_timeout_seconds,
            on_command=_obey_watchdog,
        )
    except OSError as error:
        raise LaunchError(
            f"the watchdog's process did not start: {error}.\nExpected room for one "
            "more process beside each rank (ulimit -u)"
        ) from None
    atexit.register(watched.close)
    return watched


def _obey_watchdog(status: int | None, text: str) -> None:
    if ExitGuard.current is not None:
        ExitGuard.current.obey_watchdog(status, text)
    elif status is not None:
        os._exit(status)


def leave(guard: ExitGuard, timeout_seconds: float | None) -> None:
    """Wait for the other ranks at the end, asleep, at most so long (``None``: ever)."""
    guard.watched.set_state(State.LEFT)
    if guard.early_return is not None:
        guard.early_return.returned()
        guard.early_return = None
    if not barrier(guard.comm, timeout_seconds=timeout_seconds):
        raise EarlyReturnError(
            f"this rank was done, but others still worked {timeout_seconds:.0f} s "
            "later.\nExpected every rank to leave at about the same time: look for a "
            "return or sys.exit() that only some ranks reach."
        )
    while guard.on_leave:
        guard.on_leave.pop()()
    if guard.step_hook is not None:
        guard.step_hook.remove()
        guard.step_hook = None
    guard.watched.set_state(State.RUNNING)
    guard.watched.idle()


def _call_within(seconds: float, action: Callable[[], object]) -> None:
    """Call something in a thread, and return without it when it takes too long."""

    def quietly() -> None:
        with contextlib.suppress(Exception):
            action()

    thread = threading.Thread(target=quietly, daemon=True)
    try:
        thread.start()
    except RuntimeError:  # no memory for a thread, or Python 3.12 is about to end
        quietly()
        return
    thread.join(seconds)
