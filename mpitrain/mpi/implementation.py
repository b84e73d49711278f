"""The MPI implementation of this process: its start, version and threads."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING

from mpitrain.errors import LaunchError
from mpitrain.mpi.launchers import NO_FABRIC_PROBE, missing_library

if TYPE_CHECKING:
    from mpi4py import MPI


def start_mpi(before: Callable[[str], object] | None = None) -> MPI.Intracomm:
    """Start MPI in this process, if it is not started yet, and return all its ranks.

    `before` gets the library's version text before MPI_Init, which may end the process.
    """
    for name, value in NO_FABRIC_PROBE.items():
        os.environ.setdefault(name, value)
    try:
        from mpi4py import rc

        if "mpi4py.MPI" not in sys.modules:  # imported, it has started already
            rc.initialize, rc.finalize = False, True
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise _no_library(error) from None
    if not MPI.Is_initialized():
        if before is not None:
            before(MPI.Get_library_version())
        with warnings.catch_warnings():
            # "suspicious MPI execution environment" on each rank: we say it once.
            warnings.simplefilter("ignore", RuntimeWarning)
            MPI.Init_thread(getattr(MPI, f"THREAD_{rc.thread_level.upper()}"))
    return MPI.COMM_WORLD


def _no_library(error: Exception) -> LaunchError:
    remedy = missing_library(str(error))
    return LaunchError(f"mpi4py could not load an MPI library: {error}\n{remedy}")


def has_thread_multiple() -> bool:
    """Whether any thread may call MPI at any time; MPI has started."""
    from mpi4py import MPI

    return bool(MPI.Query_thread() >= MPI.THREAD_MULTIPLE)


def mpi_library_version() -> str:
    """Return the first line of the MPI library's version text."""
    from mpi4py import MPI

    return MPI.Get_library_version().strip("\0 \n").splitlines()[0]
