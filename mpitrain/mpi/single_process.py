"""A communicator of one process, for a world of one where there is no MPI library.

It has the methods of `MPI.Intracomm` that a world of one calls. What calls others is
for several ranks, which only MPI starts.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import NoReturn, Self, TypeVar

T = TypeVar("T")


class SingleProcess:
    """This process alone; also the request of its `Ibarrier`, which is done at once."""

    rank, size = 0, 1

    def Dup(self) -> Self:
        """Return the same process."""
        return self

    def Split(self, color: int = 0, key: int = 0) -> Self:
        """Return the same process."""
        return self

    def Free(self) -> None:
        """Do nothing: it holds nothing."""

    def Ibarrier(self) -> Self:
        """Wait for nobody."""
        return self

    def Test(self) -> bool:
        """Return whether all are here."""
        return True

    def bcast(self, value: T, root: int = 0) -> T:
        """Return the value."""
        return value

    def allgather(self, value: T) -> list[T]:
        """Return the values of all."""
        return [value]

    gather = allgather

    def reduce(self, value: T, op: Callable[[T, T], T]) -> T:
        """Return the value: there is no other to combine it with."""
        return value

    def Abort(self, status: int = 0) -> NoReturn:
        """End this process."""
        os._exit(status)
