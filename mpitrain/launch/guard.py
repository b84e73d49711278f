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
import os
import secrets
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Literal, NoReturn

from mpitrain.errors import LaunchError, LeftEarly, TopologyError
from mpitrain.launch.config import START_TIMEOUT_SECONDS
from mpitrain.launch.contradictions import (
    MPI_RANK_VARIABLES,
    check_size,
    foreign_library,
    is_on_one_node,
    launched_rank,
    launched_size,
    launcher_sockets,
    speaks_before_mpi,
)
from mpitrain.launch.deadline import ends_within
from mpitrain.launch.ending import (
    exit_status,
    flush,
    hear_no_children,
    is_consequence,
    message,
)
from mpitrain.topology import start_mpi, wait_for_all
from mpitrain.watchdog.client import WatchdogClient
from mpitrain.watchdog.coordinator import HANG_STATUS
from mpitrain.watchdog.heartbeat import State
from mpitrain.world import World, place

if TYPE_CHECKING:
    from mpi4py import MPI
    from torch._C._distributed_c10d import Store
    from torch.utils.hooks import RemovableHandle

    from mpitrain.launch.network import Rendezvous
    from mpitrain.launch.returned import Returned

CONSEQUENCE_SECONDS = 4.0
"""How long a rank whose peer went away waits for that peer's own message."""

_FORWARD_SECONDS = 0.5
"""Time for mpirun to forward the message: after an abort MPICH's drops what is left."""

_CALLBACK_SECONDS = 3.0
_CLAIM_SECONDS = 2.0
_CLAIM_KEY = "mpitrain/failures"
_RECORD_SECONDS = 2.5
"""How long other ranks leave the one that writes a hang into the record."""


class Guard:
    """A context manager around all that a rank does with others.

    Leaving it by an exception, by `sys.exit` with a status other than 0 or by Ctrl-C
    ends every rank of the job with that status. Only the first rank to fail speaks. A
    world of one has nobody to end: there the exception just goes on.

    Attributes:
        comm: All ranks of the job.
        store: Where ranks agree who failed first; ``None`` before it stands.
        returned: Which ranks have returned; ``None`` where that is not watched.
        rendezvous: Where rank zero is reached; ``None`` before that is known.
        step_hook: Tells the watchdog of optimizer steps; ``None`` while none count.
        stage_seconds: How long each stage of the start took here, in their order.
        watched: This process as the watchdog sees it; ``None`` where none could start.
        on_failure: Called with the message on the rank that speaks, before the end.
        on_end: Called on every rank that the watchdog is about to end.
    """

    def __init__(
        self, comm: MPI.Intracomm, watched: WatchdogClient | None = None
    ) -> None:
        self.comm = comm
        self.watched = watched
        self.store: Store | None = None
        self.rendezvous: Rendezvous | None = None
        self.returned: Returned | None = None
        self.stage_seconds: dict[str, float] = {}
        self.step_hook: RemovableHandle | None = None
        self.on_failure: list[Callable[[str], object]] = []
        self.on_end: list[Callable[[], object]] = []
        self._rank, self._size = comm.rank, comm.size  # after MPI_Finalize, too
        self._place = place(comm.rank, comm.size, socket.gethostname())
        self._failed = False
        self._is_told = False  # the watchdog has said why the job ends
        self._pid = os.getpid()

    def __enter__(self) -> Guard:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> Literal[False]:
        if error is not None and exit_status(error) != 0:
            self.fail(error)
        return False

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Name what the start does in this block, and note how long it took."""
        if self.watched is not None:
            self.watched.start(name)
        started = time.perf_counter()
        yield
        self.stage_seconds[name] = time.perf_counter() - started

    def fail(self, error: BaseException) -> None:
        """End the job because of an error on this rank.

        Returns only in a world of one, where the caller re-raises `error`. A process
        forked off a rank ends alone.

        Args:
            error: What happened; its rank, host and traceback are printed.
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
        status = exit_status(error) or 1
        if self._size > 1:
            hear_no_children()
        try:
            self._tell_if_first(error)
        finally:
            # Whatever went wrong on the way (no memory, a second Ctrl-C): the job ends.
            if self._size > 1:
                self._abort(status)

    def _tell_if_first(self, error: BaseException) -> None:
        agreed_by = getattr(error, "speaker", None)
        if agreed_by is not None:
            first = agreed_by == self._rank
        else:
            first = self._size == 1 or self._is_first(error)
        if self.watched is not None and self._size > 1:
            # Its sidecar need not: the cause is told, by this rank or by another.
            self.watched.set_state(State.FAILING)
        if first:
            self._tell(error)
        if self._size > 1 and agreed_by is not None:
            wait_for_all(self.comm, timeout_seconds=_CLAIM_SECONDS)
        elif not first:
            time.sleep(CONSEQUENCE_SECONDS)  # the first one's abort comes before this

    def _tell(self, error: BaseException) -> None:
        if self.watched is not None and self._size == 1:
            self.watched.idle()  # who is alone may go on after it
        try:
            text = message(error, self._place)
        except Exception:
            text = f"[{self._place}] {type(error).__name__} that cannot be printed"
        if self.returned is not None and is_consequence(error):
            with contextlib.suppress(Exception):  # the store may be gone
                text += self.returned.note()
        if self._size > 1:
            flush()
            sys.stderr.write(text + "\n")
            flush()
            time.sleep(_FORWARD_SECONDS)
        # After the message, and not for long: a dead file server may be the reason.
        for callback in self.on_failure:
            _within(_CALLBACK_SECONDS, functools.partial(callback, text))

    def _is_first(self, error: BaseException) -> bool:
        """Whether no other rank has said why the job ends."""
        if is_consequence(error):
            time.sleep(CONSEQUENCE_SECONDS)
        if self._is_told:
            return False
        if self.store is None:
            # Nothing to agree by: the lower ranks speak, and abort, first.
            time.sleep(1.5 * min(self._rank, 2))
            return True
        store, answer = self.store, list[bool]()

        def claim() -> None:
            try:
                answer.append(store.add(_CLAIM_KEY, 1) == 1)
            except Exception:
                # Rank zero holds the store: it went first, and mpirun names it.
                answer.append(False)

        _within(_CLAIM_SECONDS, claim)  # a store that is stopped would never answer
        return answer[0] if answer else True

    def watch(self, world: World, address: str) -> None:
        """Let the ranks' sidecars find each other.

        Collective over all ranks.

        Args:
            world: Where this process stands.
            address: An address of rank zero's host that all nodes reach.
        """
        found: tuple[int, str] | None = None
        first = self.watched is not None and not self.watched.is_connected
        if world.is_rank_zero and self.watched is not None and first:
            token = secrets.token_hex(16)
            where = address if world.world_size > 1 else ""
            with contextlib.suppress(OSError):
                found = self.watched.listen(where, token, world.world_size), token
        found = self.comm.bcast(found)
        if found is None or self.watched is None:
            return  # also for a second job of these processes: the first's stands
        self.watched.is_connected = True
        if not world.is_rank_zero:
            port, token = found
            self.watched.connect(address, port, token, world.rank, world.world_size)

    def obey_watchdog(self, status: int | None, text: str) -> None:
        """Do what the watchdog wants; in a thread, as the main thread may be stuck.

        Args:
            status: The job's exit status if this is to end it; ``None``: not yet.
            text: What the screen was told and this rank shall record; may be empty.
        """
        self._is_told = True
        calls = [*self.on_end] if status is not None else []
        if text:
            calls += [functools.partial(it, text) for it in self.on_failure]
        for call in calls:
            _within(1.0, call)
        if status is not None:
            time.sleep(_FORWARD_SECONDS if text else _RECORD_SECONDS)
            self._abort(status)

    def _abort(self, status: int) -> NoReturn:
        flush()
        if self.watched is not None:
            self.watched.end_stopped_sidecar()
        if not sys.modules["mpi4py.MPI"].Is_finalized():
            self.comm.Abort(status)
        os._exit(status)  # after MPI_Finalize, or where Abort should ever return


_standing: list[Guard] = []
"""This process's guard, once MPI has started; the watchdog's thread looks here."""


def guarded(
    *, start_timeout_seconds: float = START_TIMEOUT_SECONDS, may_spawn: bool = True
) -> Guard:
    """Start MPI and return the guard of this process, to be entered with ``with``.

    Also prints the stacks of all threads if the process is killed by a fault of its
    own (SIGSEGV, SIGFPE, SIGABRT, SIGBUS, SIGILL), and starts the watchdog's process
    beside this one.

    Args:
        start_timeout_seconds: How long a stage of the start may take, MPI_Init the
            first of them, before the job counts as hung.
        may_spawn: Whether MPI_Comm_spawn has to work. Where it has not, and all ranks
            are on one node, Open MPI gets no TCP: its ports are open to the network,
            and one byte from a stranger there stops a rank (5.0.11 and 4.1).

    Returns:
        The guard over all ranks.

    Raises:
        LaunchError: There is no MPI library.
        TopologyError: The launcher started several processes, but each is alone.
    """
    if not faulthandler.is_enabled():
        with contextlib.suppress(Exception):  # stderr may not be a file
            faulthandler.enable()
    if not may_spawn and is_on_one_node(os.environ):
        os.environ.setdefault("OMPI_MCA_btl", "^ofi,tcp")
    speaks = speaks_before_mpi(os.environ)
    watched = _standing[0].watched if _standing else _watch(start_timeout_seconds)
    started = time.perf_counter()
    try:
        # The sidecar says what is the matter, just before.
        with ends_within(start_timeout_seconds + 1.5, HANG_STATUS):
            comm = start_mpi(before=_tell_foreign_library)
    except LaunchError:
        # Where all ranks fail alike, rank 0's end ends this one before it speaks.
        time.sleep(0.0 if speaks else 3.0)
        raise
    except BaseException as error:
        # MPI may have started: through its end this rank would wait for the others.
        if launched_size(os.environ) > 1:
            _leave_without_guard(error, watched)
        raise
    try:
        check_size(comm.size, os.environ)
    except TopologyError as error:
        if error.speaker == launched_rank(os.environ):
            raise
        time.sleep(1.0)  # this one's end may end rank 0, which is to speak for all
        os._exit(1)
    guard = Guard(comm, watched)
    guard.stage_seconds["starting MPI"] = time.perf_counter() - started
    if watched is not None and not _standing:
        watched.idle()
    _standing[:] = [guard]
    return guard


def _leave_without_guard(
    error: BaseException, watched: WatchdogClient | None
) -> NoReturn:
    """Say what happened and end, without MPI; the launcher ends the others."""
    if watched is not None:
        watched.set_state(State.FAILING)
    rank, size = launched_rank(os.environ), launched_size(os.environ)
    print(message(error, place(rank, size, socket.gethostname())), file=sys.stderr)
    flush()
    time.sleep(_FORWARD_SECONDS)
    os._exit(exit_status(error) or 1)


def _tell_foreign_library(library: str) -> None:
    odd = foreign_library(library, os.environ)
    if not odd:
        return
    if speaks_before_mpi(os.environ):
        # Not by a logger: MPI_Init may end the process before anything is set up.
        sys.stderr.write(f"warning: {odd}\n")
        flush()
        time.sleep(_FORWARD_SECONDS)
    else:
        time.sleep(3.0)  # this one's end in MPI_Init would end rank 0 before it speaks


def _watch(start_timeout_seconds: float) -> WatchdogClient | None:
    """Start the watchdog's process beside this one."""
    try:
        watched = WatchdogClient(
            rank=launched_rank(os.environ),
            world_size=launched_size(os.environ),
            rank_variables=MPI_RANK_VARIABLES,
            launcher_sockets=launcher_sockets(os.environ),
            start_timeout_seconds=start_timeout_seconds,
            on_command=_obey_watchdog,
        )
    except OSError as error:
        print(f"warning: no watchdog: {error}", file=sys.stderr, flush=True)
        return None
    atexit.register(watched.close)
    return watched


def _obey_watchdog(status: int | None, text: str) -> None:
    if _standing:
        _standing[0].obey_watchdog(status, text)
    elif status is not None:
        os._exit(status)


def leave(guard: Guard, timeout_seconds: float | None) -> None:
    """Wait for the other ranks at the end, asleep.

    Collective over all ranks.

    Args:
        guard: This process's guard.
        timeout_seconds: How long others may still work; ``None``: for ever.

    Raises:
        LeftEarly: They did not come.
    """
    if guard.watched is not None:
        guard.watched.set_state(State.LEFT)
    if guard.returned is not None:
        guard.returned.say()
        guard.returned = None
    if not wait_for_all(guard.comm, timeout_seconds=timeout_seconds):
        raise LeftEarly(
            f"this rank was done, but others still worked {timeout_seconds:.0f} s "
            "later.\nExpected every rank to leave at about the same time: look for a "
            "return or sys.exit() that only some ranks reach."
        )
    if guard.step_hook is not None:
        guard.step_hook.remove()
        guard.step_hook = None
    if guard.watched is not None:
        guard.watched.set_state(State.RUNNING)
        guard.watched.idle()


def _within(seconds: float, action: Callable[[], object]) -> None:
    """Do something in a thread, and go on without it when it takes too long."""

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
