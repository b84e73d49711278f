"""Point-to-point messages, by MPI's non-blocking calls.

A message is on its way when the call returns. A thread of the group tests those that
nobody waits for, so that large ones progress; it runs only while there are any.
"""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor

from mpitrain.backend.inter_node import MESSAGE_BYTES, as_mpi_buffer, wait
from mpitrain.backend.op_queue import GroupError, PendingWork
from mpitrain.backend.tensors import HostTensors
from mpitrain.mpi.collectives import abandon
from mpitrain.torch_compat import set_source_rank

_FIRST_TAG = 1  # those below are of collectives
_PAUSES_SECONDS = (0.0002, 0.005)  # between two tests, the first and the longest


class MessageWork(PendingWork):
    """A message that is sent or received; `host` is a copy of `tensor`, or the same."""

    def __init__(
        self,
        request: MPI.Request,
        tensor: Tensor,
        host: HostTensors,
        name: str,
        timeout_seconds: float,
        *,
        is_receive: bool,
    ) -> None:
        super().__init__([tensor], self._wait_for_request)
        self._request = request
        self._tensor = tensor
        self._host = host
        self._name = name
        self._deadline = time.monotonic() + timeout_seconds
        self._is_receive = is_receive
        self._status = MPI.Status()
        # A request may be tested by one thread at a time, which frees it when it is
        # done.
        self._testing = threading.Lock()
        self._is_complete = False

    def _wait_for_request(self, _: PendingWork) -> None:
        def wait_until_done() -> None:
            wait(self._request, self._host, self._deadline, self._name, self._status)

        self._testing.acquire()
        self._complete_after(wait_until_done)

    def test(self) -> bool:
        """Test the request; return whether it is done."""

        def check() -> bool:
            if time.monotonic() > self._deadline:
                raise GroupError(f"{self._name} was not done before its timeout ended")
            return self._request.Test(self._status)

        # The thread that holds it waits for this message; do not wait for that thread.
        if self._testing.acquire(blocking=False):
            self._complete_after(check)
        return self.is_done

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        """Wait as `PendingWork.wait` does, and test: there may be no thread for it."""
        end = time.monotonic() + timeout.total_seconds()
        pause_seconds, longest = _PAUSES_SECONDS
        while (left := end - time.monotonic()) > 0 and not self.test():
            time.sleep(min(pause_seconds, left))
            pause_seconds = min(pause_seconds * 1.5, longest)
        return super().wait(timedelta(seconds=max(left, 1e-3)) if timeout else timeout)

    def get_future(self) -> torch.futures.Future[Any]:
        """Test the request; as `PendingWork.get_future`."""
        self.test()
        return super().get_future()

    def _complete_after(self, check: Callable[[], bool | None]) -> None:
        """Complete the work unless `check` returns false; releases `_testing`."""
        try:
            # By another thread, which may not have called `finish` yet.
            if self._is_complete:
                return
            error: Exception | None = None
            try:
                if check() is False:
                    return
                with torch.inference_mode():
                    self._receive()
            except Exception as raised:
                error = raised
                abandon(self._request, self._host)
            self._is_complete = True
        finally:
            self._testing.release()
        # Without the lock: a callback of the future may wait for this message.
        self.finish(error)

    def _receive(self) -> None:
        if not self._is_receive:
            return
        found = self._status.Get_elements(MPI.BYTE)
        expected = self._host.bytes[0].numel()
        if found != expected:
            raise GroupError(
                f"{self._name}: received {found} bytes, expected {expected}"
            )
        self._host.write_back()
        set_source_rank(self._tensor, self._status.Get_source())


class P2P:
    """The messages of one group."""

    def __init__(
        self, comm: MPI.Intracomm, names: list[str], *, has_thread: bool
    ) -> None:
        self._comm = comm
        self._names = names
        self._progress = _ProgressThread() if has_thread else None

    def send(self, tensor: Tensor, to: int, tag: int, seconds: float) -> MessageWork:
        """Send a tensor to a rank of the group."""
        name = f"send to {self._names[to]}"
        return self._start(tensor, to, tag, name, seconds, is_receive=False)

    def receive(
        self, tensor: Tensor, source: int | None, tag: int, seconds: float
    ) -> MessageWork:
        """Receive a tensor from a rank of the group; ``None``: from any."""
        rank = MPI.ANY_SOURCE if source is None else source
        name = f"receive from {'any rank' if source is None else self._names[source]}"
        return self._start(tensor, rank, tag, name, seconds, is_receive=True)

    def _start(
        self,
        tensor: Tensor,
        rank: int,
        tag: int,
        name: str,
        seconds: float,
        *,
        is_receive: bool,
    ) -> MessageWork:
        if tag < 0:
            raise ValueError(f"mpi4py: expected a tag of 0 or more, found {tag}")
        host = HostTensors([tensor], read=not is_receive)
        start = self._comm.Irecv if is_receive else self._comm.Isend
        data = host.bytes[0]
        message = [as_mpi_buffer(data), data.numel(), MPI.BYTE]
        if data.numel() > MESSAGE_BYTES:
            message = [as_mpi_buffer(data), 1, _message_type(data.numel())]
        request = start(message, rank, _FIRST_TAG + tag)
        work = MessageWork(request, tensor, host, name, seconds, is_receive=is_receive)
        if self._progress is not None:
            self._progress.add(work)
        return work


@functools.cache
def _message_type(num_bytes: int) -> MPI.Datatype:
    """Return a type of so many bytes, which no count of 31 bits can hold."""
    num_blocks, rest = divmod(num_bytes, MESSAGE_BYTES)
    block = MPI.BYTE.Create_contiguous(MESSAGE_BYTES)
    places = [0, num_blocks * MESSAGE_BYTES]
    lengths, types = [num_blocks, rest], [block, MPI.BYTE]
    return MPI.Datatype.Create_struct(lengths, places, types).Commit()


class _ProgressThread:
    """Tests messages that nobody waits for, while there are any."""

    def __init__(self) -> None:
        self._works: list[MessageWork] = []
        self._lock = threading.Lock()
        self._is_running = False

    def add(self, work: MessageWork) -> None:
        with self._lock:
            self._works.append(work)
            if self._is_running:
                return
            self._is_running = True
        threading.Thread(target=self._run, name="mpi4py messages", daemon=True).start()

    def _run(self) -> None:
        first, longest = _PAUSES_SECONDS
        pause_seconds = first
        while True:
            time.sleep(pause_seconds)
            if MPI.Is_finalized():
                return
            pause_seconds = min(pause_seconds * 1.5, longest)
            with self._lock:
                # With the lock: `add` must see that this thread ends, and start another
                # one.
                self._works = [work for work in self._works if not work.is_done]
                if not self._works:
                    self._is_running = False
                    return
                works = list(self._works)
            for work in works:
                if work.test():
                    pause_seconds = first
