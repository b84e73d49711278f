"""What torch hands out for an operation that goes on: torch.distributed.Work.

Torch wraps the work of a backend written in Python and forwards only ``wait`` and
``get_future`` (torch 2.15, PyProcessGroup.hpp, PyWorkHolder). So the other questions,
asked of the wrapper, are answered here through the future: see `teach_work`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    Work as _Work,
)  # the base that Python derives from

from mpitrain.mpi_backend.failures import GroupError

Help = Callable[["Operation"], None]

_UNKNOWN = 100
"""The kind of operation that torch has for works from Python (OpType, Work.hpp)."""

_SOURCE = "_mpitrain_source"
"""Attribute of a tensor that was received: the rank that it came from."""


class Operation(_Work):
    """An operation that was asked for, and perhaps is done.

    Args:
        results: The tensors that it gives, for its future.
        help_on: Called by who waits, to do what is not done yet; may return early.
    """

    def __init__(self, results: list[torch.Tensor], help_on: Help) -> None:
        super().__init__()
        self._results = results
        self._help_on = help_on
        self._settled = threading.Event()
        self._finisher = 0  # the thread that finished it
        self._error: Exception | None = None
        self._told: torch.futures.Future[Any] | None = None
        self._future: torch.futures.Future[Any] | None = None
        self._lock = threading.Lock()

    def finish(self, error: Exception | None = None) -> None:
        """Note that it is done, or failed; runs what waits for its future.

        Who waits goes on after that: torch looks at the future, which is done then.
        """
        with self._lock:
            self._error = error
            self._finisher = threading.get_ident()
            told = self._told
        if told is not None:
            self._tell(told)
        self._settled.set()

    def _tell(self, future: torch.futures.Future[Any]) -> None:
        if self._error is None:
            future.set_result(self._results)
        else:
            future.set_exception(self._error)

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        """Wait until it is done.

        Args:
            timeout: How long at most; 0 for as long as the group's operations may take.

        Returns:
            True.

        Raises:
            GroupError: It was not done in time.
            Exception: What it failed with.
        """
        seconds = timeout.total_seconds()
        if self._finisher == threading.get_ident():
            pass  # asked by what follows on its future
        elif seconds > 0:
            if not self._settled.wait(seconds):
                raise GroupError(f"not done within {seconds} s")
        else:
            if not self.is_done:
                self._help_on(self)
            self._settled.wait()
        if self._error is not None:
            raise self._error
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future whose value is the list of tensors.

        It follows another one: an exception that Python sets is a value to all who
        wait in C++, such as DDP; one raised by what follows is an error.
        """
        with self._lock:
            if self._future is not None:
                return self._future
            self._told = torch.futures.Future()
            self._future = self._told.then(lambda told: told.value())
            is_done = self.is_done
        if is_done:
            self._tell(self._told)
        return self._future

    @property
    def is_done(self) -> bool:
        """Whether it is done, or failed."""
        return self._finisher != 0


def received_from(tensor: torch.Tensor, rank: int) -> None:
    """Note the rank from which a tensor came."""
    setattr(tensor, _SOURCE, rank)


def teach_work() -> None:
    """Let torch's wrapper of our operations answer all that a Work is asked.

    Torch's own answers stand where it has any. A second call does nothing.
    """
    if getattr(dist.Work, "_mpitrain_taught", False):
        return
    own_completed, own_success = dist.Work.is_completed, dist.Work.is_success
    own_source = dist.Work._source_rank  # noqa: SLF001

    def future_of(work: dist.Work) -> torch.futures.Future[Any] | None:
        kind = work._get_op_type()  # type: ignore[attr-defined]  # noqa: SLF001
        if kind != _UNKNOWN:  # NCCL's future is done when its kernel has only begun
            return None
        try:
            return work.get_future()
        except RuntimeError:  # others' works need not have one
            return None

    def is_completed(work: dist.Work) -> bool:
        if own_completed(work):
            return True
        future = future_of(work)
        return future is not None and future.done()

    def is_success(work: dist.Work) -> bool:
        future = None if own_completed(work) else future_of(work)
        if future is None or not future.done():
            return own_success(work)
        try:
            future.value()
        except Exception:
            return False
        return True

    def source_rank(work: dist.Work) -> int:
        try:
            return own_source(work)
        except RuntimeError:
            future = future_of(work)
            value = future.value() if future is not None and future.done() else None
            if isinstance(value, list) and value and hasattr(value[0], _SOURCE):
                return int(getattr(value[0], _SOURCE))
            raise

    for name, method in (
        ("is_completed", is_completed),
        ("is_success", is_success),
        ("_source_rank", source_rank),
        ("source_rank", source_rank),
        ("_mpitrain_taught", True),
    ):
        setattr(dist.Work, name, method)


class Together(_Work):
    """Several operations as one.

    Args:
        operations: In the order in which they were asked for.
    """

    def __init__(self, operations: list[Operation]) -> None:
        super().__init__()
        self._operations = operations

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        """Wait until all are done; as `Operation.wait`, each of them."""
        for operation in self._operations:
            operation.wait(timeout)
        return True

    def get_future(self) -> torch.futures.Future[Any]:
        """Return a future whose value is the list of all tensors."""
        futures = [operation.get_future() for operation in self._operations]
        return torch.futures.collect_all(futures).then(
            lambda all_of: [t for one in all_of.value() for t in one.value()]
        )
