"""The order of one group's operations: first asked for, first done, on every rank.

Who asks for an operation and waits for it does it in its own thread, after those that
were asked for before. What is asked for asynchronously is done by a thread of the
group; who waits for it helps. One thread for each group: operations of one may wait for
other ranks that are busy with another.
"""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable

import torch

from mpitrain.mpi_backend.failures import GroupError
from mpitrain.mpi_backend.works import Operation

CLOSE_SECONDS = 2.0
"""How long what was asked for, and not waited for, may take at the end."""

Action = Callable[[float], None]
"""Does an operation until a deadline on the monotonic clock."""

OnFailure = Callable[[BaseException, int], str]


class Line:
    """The operations of one group, in their order.

    Args:
        name: Of the group, for the thread and for messages.
        timeout_seconds: How long an operation may take from where its turn comes.
        has_thread: Whether asynchronous operations may have a thread of their own;
            without, they are done when they are asked for.
        on_failure: Called, once, with what failed, and the number of the operation,
            which is equal on all ranks; returns what else there is to say.
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
        self._name = name
        self._has_thread = has_thread
        self._on_failure = on_failure
        self._waiting: collections.deque[tuple[Operation, Action, float]]
        self._waiting = collections.deque()
        self._turn = threading.Lock()  # held by who does an operation
        self._news = threading.Condition()
        self._thread: threading.Thread | None = None
        self._is_closed = False
        self._broken: str = ""
        self._is_over = False
        self.number = 0
        """Operations that were begun; equal on all ranks that stand at the same one."""

    def do(self, action: Action, timeout_seconds: float | None = None) -> None:
        """Do an operation now, after all that were asked for before.

        Args:
            action: It.
            timeout_seconds: How long it may take; ``None``: as long as others.

        Raises:
            GroupError: It failed, or one before it did.
        """
        self.drain()
        with self._turn:
            self._run(action, self._seconds(timeout_seconds))

    def add(
        self,
        action: Action,
        results: list[torch.Tensor],
        timeout_seconds: float | None = None,
    ) -> Operation:
        """Ask for an operation, and return at once.

        Args:
            action: It.
            results: The tensors that it gives.
            timeout_seconds: How long it may take; ``None``: as long as others.

        Returns:
            To wait for.
        """
        operation = Operation(results, self._help)
        seconds = self._seconds(timeout_seconds)
        with self._news:
            self._waiting.append((operation, action, seconds))
            if self._has_thread:
                self._start_thread()
                self._news.notify()
        is_own = threading.current_thread() is self._thread
        if is_own or not self._has_thread or self._is_closed:
            self.drain()  # nobody else would: neither in what follows on a future
        return operation

    def _seconds(self, asked: float | None) -> float:
        return self.timeout_seconds if asked is None else asked

    def drain(self) -> None:
        """Do all that waits."""
        while self._waiting:
            self._do_next()

    def leave(self) -> None:
        """Let the thread go when it has done what was asked for."""
        with self._news:
            self._is_closed = True
            self._news.notify_all()

    def end(self) -> None:
        """Refuse all that is asked for from now on."""
        self._is_over = True

    def close(self) -> bool:
        """Let the thread go; return whether it has nothing to do any more.

        A rank that fails may close while others will never come for what it asked for.
        """
        self.leave()
        if self._thread is None or self._thread is threading.current_thread():
            return True
        self._thread.join(CLOSE_SECONDS)
        return not self._thread.is_alive()

    def _help(self, operation: Operation) -> None:
        while self._waiting and not operation.is_done:
            self._do_next()

    def _do_next(self) -> None:
        """Do the next operation, unless another thread has taken it."""
        error: BaseException | None = None
        with self._turn:
            try:
                operation, action, seconds = self._waiting.popleft()
            except IndexError:
                return
            try:
                self._run(action, seconds)
            except BaseException as raised:
                error = raised
        # Not while it is our turn: what waits for it may ask for an operation itself.
        if error is None or isinstance(error, Exception):
            operation.finish(error)
        else:  # Ctrl-C
            operation.finish(GroupError(f"{self._name}: {self._broken}"))
            raise error

    def _run(self, action: Action, seconds: float) -> None:
        if self._is_over:
            raise GroupError(
                f"{self._name} is closed, and was asked for an operation; expected it "
                "before destroy_process_group() and the end of mpitrain.init()'s block"
            )
        if self._broken:
            raise GroupError(f"{self._name} failed before: {self._broken}")
        self.number += 1
        try:
            with torch.inference_mode():  # tensors made in it are written, too
                action(time.monotonic() + seconds)
        except BaseException as error:
            # Ctrl-C, too: this rank left the operation in its middle.
            self._broken = str(error) or type(error).__name__
            more = self._on_failure(error, self.number)
            self._broken = f"{self._broken}\n{more}".strip()
            if isinstance(error, GroupError):
                raise type(error)(f"{self._name}: {self._broken}") from None
            raise

    def _start_thread(self) -> None:
        if self._thread is None:
            self._thread = threading.Thread(
                target=self._serve, name=f"mpi4py {self._name}", daemon=True
            )
            self._thread.start()

    def _serve(self) -> None:
        while True:
            with self._news:
                while not self._waiting and not self._is_closed:
                    self._news.wait()
                if not self._waiting:
                    return
            self._do_next()
