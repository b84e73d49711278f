"""Messages between single ranks, which a rank looks for when it has the time."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mpi4py import MPI


class Mailbox:
    """Small messages of any kind that can be pickled.

    Collective over `comm`. Threads may use it at a time, each with its own tags, if MPI
    has MPI_THREAD_MULTIPLE.
    """

    def __init__(self, comm: MPI.Intracomm) -> None:
        self._comm = comm.Dup()

    def send(self, message: object, rank: int, tag: int) -> None:
        """Send a message to a rank."""
        self._comm.send(message, dest=rank, tag=tag)

    def receive(self, tag: int) -> Any | None:
        """Return a message that has arrived; ``None`` if none has."""
        return self._comm.recv(tag=tag) if self._comm.Iprobe(tag=tag) else None
