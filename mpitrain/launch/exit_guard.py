"""Every way out of one rank ends the whole job, and says why once.

Under plain ``mpirun python`` a rank that raises leaves the others waiting for it for
ever (mpi4py issue 290): its interpreter reaches MPI_Finalize, which waits for them.
The guard stands around everything between MPI_Init and the end.

A rank that fails

1. waits, where its error looks like the end of a peer, for the message of that peer;
2. claims the report: the first to add to a counter in rank zero's store has it;
3. prints its message, if it is the first, and lets the launcher forward it;
4. aborts, which ends all ranks. The others wait for that, and abort after a while.

Where all ranks know who reports (`reporting_rank`), there is no claim, and a barrier
keeps the others from aborting before the message. Each wait has a limit: whatever is
slow or dead, the job ends.
"""

from __future__ import annotations

import contextlib
import functools
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

from mpitrain.launch.process_exit import (
    error_message,
    exit_status,
    flush,
    ignore_children,
    is_consequence,
    write_status,
)
from mpitrain.mpi.collectives import barrier
from mpitrain.mpi.implementation import is_finalized
from mpitrain.mpi.world import rank_label
from mpitrain.watchdog.client import Watchdog
from mpitrain.watchdog.heartbeat import State

if TYPE_CHECKING:
    from mpi4py import MPI

CONSEQUENCE_SECONDS = 4.0  # how long to wait for the message of a peer that went away
FORWARD_SECONDS = 0.5  # to forward the message: an abort of MPICH's drops it
_CALLBACK_SECONDS = 3.0
_CLAIM_SECONDS = 2.0
_RECORD_SECONDS = 2.5  # for another rank to write a hang into the record
_OTHER_THREAD_SECONDS = 20.0  # for the thread that failed first: more than its waits


class ExitGuard:
    """A context manager around all that a rank does with others.

    Leaving it by an exception, by `sys.exit` with a status other than 0 or by Ctrl-C
    ends every rank of the job with that status. Only the first rank to fail prints its
    error. A world of one has nobody to end: there the exception just propagates.

    Args:
        comm: All ranks.
        watchdog: Of this rank.
        claim: Returns whether this rank is the first to claim the report of a failure;
            ``None`` while the ranks have no store to agree by. May hang.
        note: Returns what to add to an error that another rank may have caused.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        watchdog: Watchdog,
        claim: Callable[[], bool | None],
        note: Callable[[], str],
    ) -> None:
        self.status = 1  # with which the job fails
        # Called with the message on the rank that prints it, before the end.
        self.on_failure: list[Callable[[str], object]] = []
        # Called on every rank that the watchdog is about to end.
        self.on_end: list[Callable[[], object]] = []
        # Called when all ranks have left without an error.
        self.on_leave: list[Callable[[], object]] = []
        self._comm, self._watchdog = comm, watchdog
        self._claim, self._note = claim, note
        self._rank, self._size = comm.rank, comm.size  # after MPI_Finalize, too
        self._label = rank_label(comm.rank, comm.size, socket.gethostname())
        self._failed_in: int | None = None  # the thread that failed first
        self._is_reported = False  # the watchdog has said why the job ends
        self._pid = os.getpid()

    @property
    def has_failed(self) -> bool:
        """Whether this rank has said, or is about to say, why the job ends."""
        return self._failed_in is not None

    def __enter__(self) -> ExitGuard:
        return self

    def __exit__(self, kind: object, error: BaseException | None, _: object) -> None:
        if error is not None and exit_status(error) != 0:
            self.fail(error)

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
        if self._failed_in is not None:
            if self._size > 1:
                # Were the main thread to return while another one ends the job, the end
                # of Python would stop that one, and the other ranks would wait.
                if self._failed_in != threading.get_ident():
                    with contextlib.suppress(BaseException):
                        time.sleep(_OTHER_THREAD_SECONDS)
                self._abort(self.status)
            return  # an outer guard sees the same error
        self._failed_in = threading.get_ident()
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
            self._watchdog.set_state(State.FAILING)
        if first:
            self._report(error)
        if self._size > 1 and reporting_rank is not None:
            # No abort before the report; a rank that never comes does not hold it up.
            barrier(self._comm, timeout_seconds=_CLAIM_SECONDS)
        elif not first:
            time.sleep(CONSEQUENCE_SECONDS)  # the first one's abort comes before this

    def _report(self, error: BaseException) -> None:
        if self._size == 1:
            self._watchdog.idle()  # a world of one may continue after it
        try:
            text = error_message(error, self._label)
        except Exception:
            text = f"[{self._label}] {type(error).__name__} that cannot be printed"
        if is_consequence(error):
            with contextlib.suppress(Exception):  # the store may be gone
                text += self._note()
        if self._size > 1:
            flush()
            sys.stderr.write(text + "\n")
            flush()
            time.sleep(FORWARD_SECONDS)
        # After the message, and not for long: a dead file server may be the reason.
        for callback in self.on_failure:
            _call_within(_CALLBACK_SECONDS, functools.partial(callback, text))

    def _is_first(self, error: BaseException) -> bool:
        """Whether no other rank has said why the job ends."""
        if is_consequence(error):
            time.sleep(CONSEQUENCE_SECONDS)
        if self._is_reported:
            return False
        claims = list[bool | None]()

        def claim() -> None:
            try:
                claims.append(self._claim())
            except Exception:
                # Rank zero holds the store: it ended first, and mpirun names it.
                claims.append(False)

        _call_within(_CLAIM_SECONDS, claim)  # a stopped store would never answer
        if claims[:1] == [None]:
            # Nothing to agree by: the lower ranks report, and abort, first.
            time.sleep(1.5 * min(self._rank, 2))
        # Without an answer this rank reports: two messages are better than none.
        return not claims or claims[0] is not False

    def handle_watchdog_command(self, status: int | None, text: str) -> None:
        """Record `text`; end the job if there is a `status`; called in a thread."""
        self._is_reported = True
        calls = [*self.on_end] if status is not None else []
        if text:
            calls += [functools.partial(callback, text) for callback in self.on_failure]
        for call in calls:
            _call_within(1.0, call)
        if status is not None:
            write_status(status)
            time.sleep(FORWARD_SECONDS if text else _RECORD_SECONDS)
            self._abort(status)

    def _abort(self, status: int) -> NoReturn:
        flush()
        # mpirun waits for every process that holds its pipes, for a stopped one, too.
        self._watchdog.end_stopped_sidecar()
        if not is_finalized():
            self._comm.Abort(status)
        os._exit(status)  # after MPI_Finalize, or where Abort should ever return


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
