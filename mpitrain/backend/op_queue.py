"""Runs the operations of one group in the order of the calls, on every rank.

A blocking operation runs in the caller's thread, after all that were submitted before.
Asynchronous operations run in a thread of the group; a caller that waits for one helps.
Each group has its own thread, because its operations may wait for ranks that are busy
in another group.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import Tensor
from torch.distributed import DistBackendError, Work

CLOSE_SECONDS = 2.0  # for submitted operations that nobody waited for, at the end

Action = Callable[[float], None]  # performs an operation until a (monotonic) deadline


class GroupError(DistBackendError):
    """An operation of a group failed. The group cannot be used any more."""

    is_consequence = False  # of another rank's end, which that rank reports


class PendingWork(Work):
    """An asynchronous operation; torch wraps it and returns it to the user.

    The value of its future is `results`, the output tensors. A thread that waits calls
    `help_on`, which runs pending operations.
    """

    def __init__(
        self, results: Sequence[Tensor], help_on: Callable[[PendingWork], None]
    ) -> None:
        super().__init__()
        self._results = results
        self._help_on = help_on
        self._done = threading.Event()
        self._finished_by = 0  # thread id
        self._error: Exception | None = None
        self._source: torch.futures.Future[Any] | None = None
        self._future: torch.futures.Future[Any] | None = None
        self._lock = threading.Lock()

    @property
    def is_done(self) -> bool:
        """Whether it has finished or failed."""
        return self._finished_by != 0

    def finish(self, error: Exception | None = None) -> None:
        """Mark it as finished or failed, and run the callbacks of its future."""
        with self._lock:
            self._error = error
            self._finished_by = threading.get_ident()
            source = self._source
        if source is not None:
            self._complete(source)
        # Only now may waiters continue: torch asks the future whether it is completed.
        self._done.set()

    def _complete(self, future: torch.futures.Future[Any]) -> None:
        if self._error is None:
            future.set_result(self._results)
        else:
            future.set_exception(self._error)

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        """Wait until it is done, or raise its error.

        A timeout of 0 means the group's. The operation continues after a shorter one.
        """
        seconds = timeout.total_seconds()
        # `_done` is set after the callbacks: one that waits here would wait for itself.
        if self._finished_by == threading.get_ident():
            pass  # called by a callback of its own future
        elif seconds > 0:
            if not self._done.wait(seconds):
                raise GroupError(f"not done within {seconds} s")
        else:
            if not self.is_done:
                self._help_on(self)
            self._done.wait()
        if self._error is not None:
            raise self._error
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future whose value is the list of output tensors."""
        with self._lock:
            if self._future is not None:
                return self._future
            self._source = torch.futures.Future()
            # An exception set from Python is a value to those who wait in C++, such as
            # DDP; one that a callback raises is an error.
            self._future = self._source.then(lambda source: source.value())
            is_done = self.is_done
        if is_done:
            self._complete(self._source)
        return self._future


class CoalescedWork(Work):
    """Several operations as one, in the order in which they were submitted."""

    def __init__(self, works: list[PendingWork]) -> None:
        super().__init__()
        self._works = works

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        """Wait until all are done; see `PendingWork.wait`."""
        for work in self._works:
            work.wait(timeout)
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future whose value is the list of all output tensors."""
        futures = [work.get_future() for work in self._works]
        return torch.futures.collect_all(futures).then(
            lambda done: [tensor for one in done.value() for tensor in one.value()]
        )


class OpQueue:
    """The operations of one group, in order.

    An operation may take `timeout_seconds` from when it starts to run. Without a thread
    asynchronous operations run in `submit`. `on_failure` is called once, with the first
    error and the number of the operation, which is equal on all ranks, and returns text
    to add to the error.
    """

    def __init__(
        self,
        name: str,
        timeout_seconds: float,
        *,
        has_thread: bool,
        on_failure: Callable[[BaseException, int], str],
    ) -> None:
        self.timeout_seconds = timeout_seconds
        self._num_started = 0
        self._name = name
        self._has_thread = has_thread
        self._on_failure = on_failure
        self._pending = collections.deque[tuple[PendingWork, Action, float]]()
        self._running = threading.Lock()  # held by the thread that runs an operation
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_closing = False
        self._is_closed = False
        self._failure = ""

    def run(self, action: Action, timeout_seconds: float) -> None:
        """Run an operation now, after all that were submitted before."""
        self._drain()
        with self._running:
            self._run(action, timeout_seconds)

    def submit(
        self, action: Action, results: Sequence[Tensor], timeout_seconds: float
    ) -> PendingWork:
        """Queue an operation with its output tensors, and return at once."""
        work = PendingWork(results, self._help)
        with self._changed:
            self._pending.append((work, action, timeout_seconds))
            if self._has_thread:
                if self._thread is None:
                    self._thread = threading.Thread(
                        target=self._serve, name=f"mpi4py {self._name}", daemon=True
                    )
                    self._thread.start()
                self._changed.notify()
        is_queue_thread = threading.current_thread() is self._thread
        if is_queue_thread or not self._has_thread or self._is_closing:
            self._drain()  # nobody else would
        return work

    def _drain(self) -> None:
        while self._pending:
            self._run_next()

    def close(self) -> bool:
        """Let the thread end; return whether it has finished its operations.

        Other ranks may never come to the operations of a rank that fails.
        """
        self._stop_thread()
        # A thread cannot join itself, as in a callback that destroys the group.
        if self._thread is None or self._thread is threading.current_thread():
            return True
        self._thread.join(CLOSE_SECONDS)
        return not self._thread.is_alive()

    def abort(self) -> None:
        """Refuse all further operations."""
        self._stop_thread()
        self._is_closed = True

    def _stop_thread(self) -> None:
        with self._changed:
            self._is_closing = True
            self._changed.notify_all()

    def _help(self, work: PendingWork) -> None:
        while self._pending and not work.is_done:
            self._run_next()

    def _run_next(self) -> None:
        error: BaseException | None = None
        with self._running:
            try:
                # With the lock: of two threads that help, the second must not run
                # first.
                work, action, seconds = self._pending.popleft()
            except IndexError:
                return
            try:
                self._run(action, seconds)
            except BaseException as raised:
                error = raised
        # Without the lock: a callback of the future may run an operation itself.
        if error is None or isinstance(error, Exception):
            work.finish(error)
        else:  # Ctrl-C
            work.finish(GroupError(f"{self._name}: {self._failure}"))
            raise error

    def _run(self, action: Action, seconds: float) -> None:
        if self._is_closed:
            raise GroupError(
                f"{self._name} is closed; expected no operation after "
                "destroy_process_group() or the end of mpitrain.init()'s block"
            )
        if self._failure:
            raise GroupError(f"{self._name} failed before: {self._failure}")
        self._num_started += 1
        try:
            with torch.inference_mode():  # else tensors made in it cannot be written
                action(time.monotonic() + seconds)
        except BaseException as error:
            # Ctrl-C, too: this rank left the operation in its middle.
            self._failure = str(error) or type(error).__name__
            more = self._on_failure(error, self._num_started)
            self._failure = f"{self._failure}\n{more}".strip()
            if isinstance(error, GroupError):
                raise type(error)(f"{self._name}: {self._failure}") from None
            raise

    def _serve(self) -> None:
        while True:
            with self._changed:
                while not self._pending and not self._is_closing:
                    self._changed.wait()
                if not self._pending:
                    return
            self._run_next()
