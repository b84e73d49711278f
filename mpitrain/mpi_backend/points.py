"""Messages from one rank to one other, by MPI's non-blocking calls.

A message is on its way when the call returns. One thread of the process tests those
that nobody waits for, so that large ones get on; it runs only while there are any.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import torch
from mpi4py import MPI

from mpitrain.mpi_backend.failures import GroupError
from mpitrain.mpi_backend.over_mpi import MESSAGE_BYTES, buffer, give_up, wait
from mpitrain.mpi_backend.tensors import InHostMemory
from mpitrain.mpi_backend.works import Operation, received_from

_FIRST_TAG = 1
"""Those before are of collectives."""

_PAUSES_SECONDS = (0.0002, 0.005)
"""Of the thread between two looks, the first and the longest."""


class Message(Operation):
    """A message that was sent, or is to come.

    Args:
        request: MPI's.
        tensor: The user's.
        host: The same in host memory.
        what: In words.
        timeout_seconds: How long it may take.
        is_received: Whether it comes.
    """

    def __init__(
        self,
        request: MPI.Request,
        tensor: torch.Tensor,
        host: InHostMemory,
        what: str,
        timeout_seconds: float,
        *,
        is_received: bool,
    ) -> None:
        super().__init__([tensor], self._wait_for_it)
        self._request = request
        self._tensor = tensor
        self._host = host
        self._what = what
        self._deadline = time.monotonic() + timeout_seconds
        self._is_received = is_received
        self._status = MPI.Status()
        self._testing = threading.Lock()
        self._is_settled = False

    def _wait_for_it(self, _: Operation) -> None:
        def to_the_end() -> None:
            wait(self._request, self._host, self._deadline, self._what, self._status)

        self._testing.acquire()
        self._attend(to_the_end)

    def test(self) -> bool:
        """Look whether it has arrived; return whether that is settled."""

        def look() -> bool:
            if time.monotonic() > self._deadline:
                raise GroupError(f"{self._what} was not done before its timeout ended")
            return self._request.Test(self._status)

        # Who holds it waits for this message: others must not wait for that.
        if self._testing.acquire(blocking=False):
            self._attend(look)
        return self.is_done

    def wait(self, timeout: timedelta = timedelta()) -> bool:
        """Wait as `Operation.wait` does, and look: there may be no thread that does."""
        end = time.monotonic() + timeout.total_seconds()
        pause_seconds, longest = _PAUSES_SECONDS
        while (left := end - time.monotonic()) > 0 and not self.test():
            time.sleep(min(pause_seconds, left))
            pause_seconds = min(pause_seconds * 1.5, longest)
        return super().wait(timedelta(seconds=max(left, 1e-3)) if timeout else timeout)

    def get_future(self) -> torch.futures.Future[Any]:
        """Look whether it has arrived; as `Operation.get_future`."""
        self.test()
        return super().get_future()

    def _attend(self, look: Callable[[], bool | None]) -> None:
        """Settle it if it has arrived; gives `_testing` back."""
        try:
            if self._is_settled:
                return
            error: Exception | None = None
            try:
                if look() is False:
                    return
                with torch.inference_mode():
                    self._arrive()
            except Exception as raised:
                error = raised
                give_up(self._request, self._host)
            self._is_settled = True
        finally:
            self._testing.release()
        self.finish(error)

    def _arrive(self) -> None:
        if not self._is_received:
            return
        found = self._status.Get_elements(MPI.BYTE)
        expected = self._host.bytes[0].numel()
        if found != expected:
            raise GroupError(f"{self._what}: {found} bytes came, expected {expected}")
        self._host.write_back()
        received_from(self._tensor, self._status.Get_source())


class Points:
    """The messages of one group.

    Args:
        comm: Its ranks.
        names: Each of them in words, for messages.
        timeout_seconds: How long one may take.
        has_thread: Whether a thread may test.
    """

    def __init__(
        self,
        comm: MPI.Intracomm,
        names: list[str],
        timeout_seconds: float,
        *,
        has_thread: bool,
    ) -> None:
        self._comm = comm
        self._names = names
        self.timeout_seconds = timeout_seconds
        self._has_thread = has_thread

    def send(self, tensor: torch.Tensor, to: int, tag: int) -> Message:
        """Send a tensor to a rank of the group."""
        _check_tag(tag)
        host = InHostMemory([tensor])
        with _one_message(host.bytes[0]) as given:
            request = self._comm.Isend(given, to, _FIRST_TAG + tag)
        what = f"send to {self._names[to]}"
        return self._on_its_way(request, tensor, host, what, is_received=False)

    def receive(self, tensor: torch.Tensor, source: int | None, tag: int) -> Message:
        """Receive a tensor from a rank of the group; ``None``: from any."""
        _check_tag(tag)
        host = InHostMemory([tensor], read=False)
        given = MPI.ANY_SOURCE if source is None else source
        given_tag = _FIRST_TAG + tag
        with _one_message(host.bytes[0]) as room:
            request = self._comm.Irecv(room, given, given_tag)
        what = f"receive from {'any rank' if source is None else self._names[source]}"
        return self._on_its_way(request, tensor, host, what, is_received=True)

    def _on_its_way(
        self,
        request: MPI.Request,
        tensor: torch.Tensor,
        host: InHostMemory,
        what: str,
        *,
        is_received: bool,
    ) -> Message:
        seconds = self.timeout_seconds
        message = Message(request, tensor, host, what, seconds, is_received=is_received)
        if self._has_thread:
            _tester.add(message)
        return message


@contextlib.contextmanager
def _one_message(data: torch.Tensor) -> Iterator[list[Any]]:
    """Give MPI ``uint8 (N,)`` as one message, however long; until it has begun."""
    num_bytes = data.numel()
    if num_bytes <= MESSAGE_BYTES:
        yield [buffer(data), num_bytes, MPI.BYTE]
        return
    num_blocks, rest = divmod(num_bytes, MESSAGE_BYTES)
    block = MPI.BYTE.Create_contiguous(MESSAGE_BYTES)
    whole = MPI.Datatype.Create_struct(
        [num_blocks, rest], [0, num_blocks * MESSAGE_BYTES], [block, MPI.BYTE]
    )
    try:
        yield [buffer(data), 1, whole.Commit()]
    finally:
        whole.Free()
        block.Free()


def _check_tag(tag: int) -> None:
    if tag < 0:
        raise ValueError(f"mpi4py: a message's tag {tag} expected to be 0 or more")


class Tester:
    """Tests messages that nobody waits for, in a thread, while there are any."""

    def __init__(self) -> None:
        self._messages: list[Message] = []
        self._lock = threading.Lock()
        self._is_running = False

    def add(self, message: Message) -> None:
        """Test a message until it is settled."""
        with self._lock:
            self._messages.append(message)
            if self._is_running:
                return
            self._is_running = True
        threading.Thread(
            target=self._serve, name="mpi4py messages", daemon=True
        ).start()

    def _serve(self) -> None:
        first, longest = _PAUSES_SECONDS
        pause_seconds = first
        while True:
            time.sleep(pause_seconds)
            if MPI.Is_finalized():
                return
            pause_seconds = min(pause_seconds * 1.5, longest)
            with self._lock:
                self._messages = [m for m in self._messages if not m.is_done]
                if not self._messages:
                    self._is_running = False
                    return
                messages = list(self._messages)
            for message in messages:
                if message.test():
                    pause_seconds = first


_tester = Tester()
"""Of this process."""
