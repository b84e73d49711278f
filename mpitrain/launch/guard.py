"""Every way out of one rank ends the whole job, and says why once.

Under plain ``mpirun python`` a rank that raises leaves the others waiting for it for
ever (mpi4py issue 290): its interpreter reaches MPI_Finalize, which waits for them.
The guard stands around everything between MPI_Init and the end.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import faulthandler
import functools
import gc
import io
import os
import socket
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import TYPE_CHECKING, Literal, NoReturn

from mpitrain.errors import (
    LaunchError,
    LeftEarly,
    MpitrainError,
    TopologyError,
    UsageError,
)
from mpitrain.launch.contradictions import (
    check_size,
    foreign_library,
    launched_rank,
    speaks_before_mpi,
)
from mpitrain.topology import start_mpi, wait_for_all
from mpitrain.world import place

if TYPE_CHECKING:
    from mpi4py import MPI
    from torch._C._distributed_c10d import Store

CONSEQUENCE_SECONDS = 4.0
"""How long a rank whose peer went away waits for that peer's own message."""

_FORWARD_SECONDS = 0.5
"""Time for mpirun to forward the message: after an abort MPICH's drops what is left."""

_CALLBACK_SECONDS = 3.0
_CLAIM_SECONDS = 2.0
_CLAIM_KEY = "mpitrain/failures"


class Guard:
    """A context manager around all that a rank does with others.

    Leaving it by an exception, by `sys.exit` with a status other than 0 or by Ctrl-C
    ends every rank of the job with that status. Only the first rank to fail speaks. A
    world of one has nobody to end: there the exception just goes on.

    Attributes:
        comm: All ranks of the job.
        store: Where ranks agree who failed first; ``None`` before it stands.
        stage_seconds: How long each stage of the start took here, in their order.
        on_failure: Called with the message on the rank that speaks, before the end.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self.comm = comm
        self.store: Store | None = None
        self.stage_seconds: dict[str, float] = {}
        self.on_failure: list[Callable[[str], object]] = []
        self._place = place(comm.rank, comm.size, socket.gethostname())
        self._failed = False
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
            _flush()
            # Not through MPI_Finalize: MPI is its parent's.
            os._exit(exit_status(error))
        if self._failed:
            return
        self._failed = True
        status = exit_status(error) or 1
        try:
            self._tell_if_first(error)
        finally:
            # Whatever went wrong on the way (no memory, a second Ctrl-C): the job ends.
            if self.comm.size > 1:
                self._abort(status)

    def _tell_if_first(self, error: BaseException) -> None:
        agreed_by = getattr(error, "speaker", None)
        if agreed_by is not None:
            first = agreed_by == self.comm.rank
        else:
            first = self.comm.size == 1 or self._is_first(error)
        if first:
            self._tell(error)
        if self.comm.size == 1:
            return
        if agreed_by is not None:
            wait_for_all(self.comm, timeout_seconds=_CLAIM_SECONDS)
        elif not first:
            time.sleep(CONSEQUENCE_SECONDS)  # the first one's abort comes before this

    def _tell(self, error: BaseException) -> None:
        try:
            text = message(error, self._place)
        except Exception:
            text = f"[{self._place}] {type(error).__name__} that cannot be printed"
        if self.comm.size > 1:
            _flush()
            sys.stderr.write(text + "\n")
            _flush()
            time.sleep(_FORWARD_SECONDS)
        # After the message, and not for long: a dead file server may be the reason.
        for callback in self.on_failure:
            _within(_CALLBACK_SECONDS, functools.partial(callback, text))

    def _is_first(self, error: BaseException) -> bool:
        """Whether no other rank has said why the job ends."""
        if is_consequence(error):
            time.sleep(CONSEQUENCE_SECONDS)
        if self.store is None:
            # Nothing to agree by: the lower ranks speak, and abort, first.
            time.sleep(1.5 * min(self.comm.rank, 2))
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

    def _abort(self, status: int) -> NoReturn:
        _flush()
        self.comm.Abort(status)
        os._exit(status)  # where Abort should ever return


def guarded() -> Guard:
    """Start MPI and return the guard of this process, to be entered with ``with``.

    Also prints the stacks of all threads if the process is killed by a fault of its
    own (SIGSEGV, SIGFPE, SIGABRT, SIGBUS, SIGILL).

    Returns:
        The guard over all ranks.

    Raises:
        LaunchError: There is no MPI library.
        TopologyError: The launcher started several processes, but each is alone.
    """
    if not faulthandler.is_enabled():
        with contextlib.suppress(Exception):  # stderr may not be a file
            faulthandler.enable()
    speaks = speaks_before_mpi(os.environ)
    try:
        comm = start_mpi(before=_tell_foreign_library)
    except LaunchError:
        # Where all ranks fail alike, rank 0's end ends this one before it speaks.
        time.sleep(0.0 if speaks else 3.0)
        raise
    try:
        check_size(comm.size, os.environ)
    except TopologyError as error:
        if error.speaker == launched_rank(os.environ):
            raise
        time.sleep(1.0)  # this one's end may end rank 0, which is to speak for all
        os._exit(1)
    return Guard(comm)


def _tell_foreign_library(library: str) -> None:
    odd = foreign_library(library, os.environ)
    if not odd:
        return
    if speaks_before_mpi(os.environ):
        # Not by a logger: MPI_Init may end the process before anything is set up.
        sys.stderr.write(f"warning: {odd}\n")
        _flush()
        time.sleep(_FORWARD_SECONDS)
    else:
        time.sleep(3.0)  # this one's end in MPI_Init would end rank 0 before it speaks


def exit_status(error: BaseException) -> int:
    """Tell with which status a process ends because of an exception.

    Args:
        error: What left the program.

    Returns:
        0 to 255: what `sys.exit` was given, 130 for Ctrl-C, 1 or 2 for the rest.

    >>> exit_status(SystemExit(3)), exit_status(SystemExit("text"))
    (3, 1)
    >>> exit_status(KeyboardInterrupt()), exit_status(ValueError())
    (130, 1)
    """
    if isinstance(error, SystemExit):
        if error.code is None:
            return 0
        if isinstance(error.code, int):
            return error.code & 0xFF or (1 if error.code else 0)
        return 1
    if isinstance(error, KeyboardInterrupt):
        return 130
    if isinstance(error, MpitrainError):
        return error.exit_status
    return 1


def message(error: BaseException, where: str) -> str:
    """Word an error for the screen.

    Args:
        error: What happened.
        where: Who says it, ``"rank 2/4 gpu03"``; left out where it is no single
            rank's matter.

    Returns:
        The traceback first, where it is not the user's mistake, then one line that
        begins with ``[rank 2/4 gpu03]``.
    """
    everywhere = getattr(error, "everywhere", False)
    if isinstance(error, UsageError) and everywhere:
        return str(error)
    if isinstance(error, SystemExit):
        return f"[{where}] sys.exit({error.code!r})"
    if isinstance(error, KeyboardInterrupt):
        return f"[{where}] interrupted by Ctrl-C (SIGINT)"
    line = f"{type(error).__name__}: {error}"
    if not everywhere:
        line = f"[{where}] {line}"
    if isinstance(error, MpitrainError):
        return line
    trace = "".join(traceback.format_exception(error)).rstrip()
    return f"{trace}\n{line}"


def is_consequence(error: BaseException) -> bool:
    """Whether an error looks like another rank's death seen from here.

    torch.distributed raises its own classes for the store and NCCL, and a bare
    RuntimeError for gloo, whose text names the source file or the peer.

    >>> is_consequence(RuntimeError("Connection closed by peer [127.0.0.1]:1234"))
    True
    >>> is_consequence(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
    False
    """
    torch_distributed = sys.modules.get("torch.distributed")
    if torch_distributed is not None and isinstance(error, torch_distributed.DistError):
        return True
    signs = ("gloo", "closed by peer", "reset by peer", "Broken pipe")
    return isinstance(error, RuntimeError | ConnectionError) and any(
        sign in str(error) for sign in signs
    )


def leave(guard: Guard, timeout_seconds: float) -> None:
    """Wait for the other ranks at the end, asleep and not for ever.

    Collective over all ranks.

    Args:
        guard: This process's guard.
        timeout_seconds: How long others may still work.

    Raises:
        LeftEarly: They did not come.
    """
    if not wait_for_all(guard.comm, timeout_seconds=timeout_seconds):
        raise LeftEarly(
            f"this rank was done, but others still worked {timeout_seconds:.0f} s "
            "later.\nExpected every rank to leave at about the same time: look for a "
            "return or sys.exit() that only some ranks reach."
        )


def exit_now(status: int) -> NoReturn:
    """End this process without taking the interpreter apart.

    Collective over all ranks, where MPI was started.

    Python frees some 3,000 modules one by one at its end, on every rank after all work
    is done, and torch's own threads were seen to die of that ("terminate called without
    an active exception"; docs/decisions/0004). What others want of the end still comes:
    threads are waited for, `atexit` runs, open files are flushed, MPI is finalized.

    Args:
        status: The exit status.
    """
    threading._shutdown()  # type: ignore[attr-defined]  # noqa: SLF001
    atexit._run_exitfuncs()  # noqa: SLF001 - os._exit would skip both
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()
    for found in gc.get_objects():
        if issubclass(type(found), io.IOBase):
            with contextlib.suppress(Exception):  # closed, or read only
                found.flush()
    # C's exit, not os._exit: MPICH says goodbye to its mpiexec in a handler of C's end,
    # and takes a process without goodbye for dead (4 in 10 tries). Not PyDLL: a thread
    # of gloo that wants Python's lock must get it.
    ctypes.CDLL(None).exit(status)
    os._exit(status)


def _within(seconds: float, action: Callable[[], object]) -> None:
    """Do something in a thread, and go on without it when it takes too long."""

    def quietly() -> None:
        with contextlib.suppress(Exception):
            action()

    thread = threading.Thread(target=quietly, daemon=True)
    try:
        thread.start()
    except RuntimeError:  # no memory for a thread
        return
    thread.join(seconds)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()
