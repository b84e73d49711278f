"""MPI's own all-reduce, to measure torch's backends against."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from mpi4py import MPI
    from numpy.typing import NDArray


def all_reduce(comm: MPI.Intracomm, values: NDArray[np.float32]) -> None:
    """Replace values by their sums over all ranks.

    Collective over `comm`.

    Args:
        comm: The ranks.
        values: float32 ``(N,)``, contiguous; equal N on all ranks.
    """
    from mpi4py import MPI

    comm.Allreduce(MPI.IN_PLACE, values, op=MPI.SUM)
