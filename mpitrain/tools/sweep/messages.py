"""What the server, a thread of rank zero, and the ranks tell each other, by MPI.

Through a communicator of their own, with a tag for each direction: so two threads of
rank zero may use it at a time, if MPI has MPI_THREAD_MULTIPLE.

To a rank:

- ``start``: train a trial; ``data``: the ranks, its name, and the flags of the
  training, or a script and its arguments
- ``prune``: the answer to ``epoch``; ``data``: whether the trial is pruned
- ``stop``: write a checkpoint and stop; ``data``: `PreemptionHandler.requested`
- ``abort``: another rank of the trial has failed
- ``end``: leave; ``data``: the exit status

To the server:

- ``epoch``: from a trial's first rank; ``data``: ``epoch`` or, with validations
  within epochs, ``step``; its number; and its metrics. With a pruner it waits for the
  answer.
- ``ended``: this rank has left the trial; ``data``: an `TrialResult`
- ``stop``: a rank without a trial was asked to stop; ``data``: as above
"""

from __future__ import annotations

import threading
import time
from typing import Any, Literal, NamedTuple

TO_SERVER, TO_RANK = 1, 2  # tags
POLL_SECONDS = 0.02  # how often a rank looks for messages


class Message(NamedTuple):
    """One message. ``start_id`` numbers the starts of trials in this job."""

    kind: Literal["start", "prune", "stop", "abort", "end", "epoch", "ended"]
    start_id: int
    data: Any = None


Status = Literal["failed", "aborted", "stopped", "pruned", "finished"]
"""How a rank has left a trial, the worst first; "aborted": since another one failed."""


class TrialResult(NamedTuple):
    """How a rank has left a trial, and why."""

    status: Status
    rank: int
    error: str = ""
    is_usage: bool = False  # whether the flags are wrong
    stop_reason: int = 0  # what this rank was asked to stop for, if it was


class TrialAborted(Exception):
    """Another rank of the trial has failed."""


class Inbox:
    """The server's messages to this rank, which any thread that waits may read.

    Attributes:
        is_aborted: Whether another rank of the trial has failed.
        server_error: What has ended the server of a world of one; raised here.
    """

    def __init__(self, comm: Any) -> None:
        self._comm = comm
        self._lock = threading.Lock()
        self._next = 0.0
        self._waiting: list[Message] = []
        self._start_id, self._stop_reason, self.is_aborted = -1, 0, False
        self.server_error: BaseException | None = None

    def send(self, message: Message) -> None:
        """Send to the server."""
        self._comm.send(message, dest=0, tag=TO_SERVER)

    def begin(self, start_id: int) -> None:
        """Take messages of this start from now on; those of others are late."""
        self._start_id, self.is_aborted = start_id, False

    def take(self) -> Message | None:
        """Return the next ``start``, ``prune`` or ``end``, if there is one."""
        self._poll()
        return self._waiting.pop(0) if self._waiting else None

    def raise_if_aborted(self) -> None:
        """Raise a TrialAborted if another rank of the trial has failed."""
        self._poll()
        if self.is_aborted:
            raise TrialAborted

    def stop_reason(self) -> int:
        """Return why the job is to stop; 0 if it is not."""
        self._poll()
        return self._stop_reason

    def _poll(self) -> None:
        if self.server_error is not None:
            raise self.server_error
        # Called in every wait of every thread: MPI is asked every 20 ms, by one of
        # them; what that one finds is for all.
        if time.monotonic() < self._next or not self._lock.acquire(blocking=False):
            return
        try:
            while self._comm.Iprobe(tag=TO_RANK):
                message: Message = self._comm.recv(tag=TO_RANK)
                kind, is_now = message.kind, message.start_id == self._start_id
                if kind == "stop":  # the whole job is
                    self._stop_reason = message.data
                elif kind in ("start", "end") or (kind == "prune" and is_now):
                    self._waiting.append(message)
                elif kind == "abort" and is_now:
                    self.is_aborted = True
            self._next = time.monotonic() + POLL_SECONDS
        finally:
            self._lock.release()
