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
from torch.distributed import Work

from mpitrain.backend.errors import GroupError

CLOSE_SECONDS = 2.0
"""How long submitted operations that nobody waited for may take at the end."""

Action = Callable[[float], None]
"""Performs an operation until a deadline on the monotonic clock."""

OnFailure = Callable[[BaseException, int], str]


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
        """Mark it as finished or failed, and run the callbacks of its future.

        Only then do waiting threads continue: torch asks the future whether the work is
        completed.
        """
        with self._lock:
            self._error = error
            self._finished_by = threading.get_ident()
            source = self._source
        if source is not None:
            self._complete(source)
        self._done.set()

    def _complete(self, future: torch.futures.Future[Any]) -> None:
        if self._error is None:
            future.set_result(self._results)
        else:
            future.set_exception(self._error)

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        """Wait until it is done.

        A timeout of 0 means the group's. The operation goes on after a shorter one.

        Raises:
            GroupError: It was not done in time.
            Exception: The operation failed.
        """
        seconds = timeout.total_seconds()
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

    Args:
        name: Of the group, for messages.
        timeout_seconds: Default limit of an operation, from when it starts to run.
        has_thread: Whether asynchronous operations run in a thread, or in `submit`.
        on_failure: Called once, with the first error and the number of the operation,
            which is equal on all ranks. Returns text to add to the error.
    """

    def __init__(
        self,
        name: str,
        timeout_seconds: float,
        *,
        has_thread: bool = True,
        on_failure: OnFailure = lambda _error, _number: "",
    ) -> None:
        self.timeout_seconds = timeout_seconds
        self.num_started = 0
        self._name = name
        self._has_thread = has_thread
        self._on_failure = on_failure
        self._pending: collections.deque[tuple[PendingWork, Action, float]]
        self._pending = collections.deque()
        self._running = threading.Lock()  # held by the thread that runs an operation
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_closing = False
        self._is_closed = False
        self._failure = ""

    def run(self, action: Action, timeout_seconds: float | None = None) -> None:
        """Run an operation now, after all that were submitted before.

        Raises:
            GroupError: It failed, or one before it did.
        """
        self.drain()
        with self._running:
            self._run(action, self._timeout(timeout_seconds))

    def submit(
        self,
        action: Action,
        results: Sequence[Tensor],
        timeout_seconds: float | None = None,
    ) -> PendingWork:
        """Queue an operation with its output tensors, and return at once."""
        work = PendingWork(results, self._help)
        with self._changed:
            self._pending.append((work, action, self._timeout(timeout_seconds)))
            if self._has_thread:
                self._start_thread()
                self._changed.notify()
        is_queue_thread = threading.current_thread() is self._thread
        if is_queue_thread or not self._has_thread or self._is_closing:
            self.drain()  # nobody else would
        return work

    def drain(self) -> None:
        """Run all pending operations."""
        while self._pending:
            self._run_next()

    def close(self) -> bool:
        """Let the thread end; return whether it has finished its operations.

        Other ranks may never come to the operations of a rank that fails.
        """
        self._stop_thread()
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

    def _timeout(self, seconds: float | None) -> float:
        return self.timeout_seconds if seconds is None else seconds

    def _help(self, work: PendingWork) -> None:
        while self._pending and not work.is_done:
            self._run_next()

    def _run_next(self) -> None:
        """Run the next operation, unless another thread has taken it."""
        error: BaseException | None = None
        with self._running:
            try:
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
        self.num_started += 1
        try:
            with torch.inference_mode():  # else tensors made in it cannot be written
                action(time.monotonic() + seconds)
        except BaseException as error:
            # Ctrl-C, too: this rank left the operation in its middle.
            self._failure = str(error) or type(error).__name__
            more = self._on_failure(error, self.num_started)
            self._failure = f"{self._failure}\n{more}".strip()
            if isinstance(error, GroupError):
                raise type(error)(f"{self._name}: {self._failure}") from None
            raise

    def _start_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._serve, name=f"mpi4py {self._name}", daemon=True
            )
            self._thread.start()

    def _serve(self) -> None:
        while True:
            with self._changed:
                while not self._pending and not self._is_closing:
                    self._changed.wait()
                if not self._pending:
                    return
            self._run_next()
