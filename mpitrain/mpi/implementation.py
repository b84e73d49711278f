"""The MPI implementation of this process: its start, version and threads."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from mpitrain.errors import MpiNotFoundError
from mpitrain.mpi.launchers import (
    INSTALL,
    INSTALL_ALL,
    NO_FABRIC_PROBE,
    missing_library,
)

if TYPE_CHECKING:
    from mpi4py import MPI


def start_mpi(before: Callable[[str], object] | None = None) -> MPI.Intracomm:
    """Start MPI in this process, if it is not started yet, and return all its ranks.

    `before` gets the library's version text before MPI_Init, which may end the process.
    """
    # Before MPI_Init, which reads them; a user's own value stays.
    for name, value in NO_FABRIC_PROBE.items():
        os.environ.setdefault(name, value)
    try:
        from mpi4py import rc

        if "mpi4py.MPI" not in sys.modules:  # imported, it has started already
            # The import shall not start MPI, before `before` has seen the library. The
            # end of Python finalizes it all the same.
            rc.initialize, rc.finalize = False, True
        from mpi4py import MPI
    except (ImportError, RuntimeError) as error:
        raise _not_found(error) from None
    if not MPI.Is_initialized():
        if before is not None:
            before(MPI.Get_library_version())
        with warnings.catch_warnings():
            # "suspicious MPI execution environment" on each rank: we say it once.
            warnings.simplefilter("ignore", RuntimeWarning)
            # The level that mpi4py would ask for: a script may have set a lower one.
            MPI.Init_thread(getattr(MPI, f"THREAD_{rc.thread_level.upper()}"))
    return MPI.COMM_WORLD


def _not_found(error: Exception) -> MpiNotFoundError:
    is_missing = isinstance(error, ModuleNotFoundError) and error.name == "mpi4py"
    install = INSTALL_ALL if is_missing else INSTALL
    found = MpiNotFoundError(
        f"mpi4py could not load an MPI library: {error}\n"
        f"{install}{missing_library(str(error))}"
    )
    reason = str(error).rpartition("\n")[2]
    more = f"For more ranks, {install[0].lower()}{install[1:]}"
    found.hint = f"no MPI library ({reason}): a world of one. {more}"
    return found


def has_library() -> bool:
    """Whether MPI has started; not in a world of one without an MPI library."""
    return "mpi4py.MPI" in sys.modules


def is_finalized() -> bool:
    """Whether MPI_Finalize was called, perhaps by a script."""
    return has_library() and bool(sys.modules["mpi4py.MPI"].Is_finalized())


def has_thread_multiple() -> bool:
    """Whether any thread may call MPI at any time.

    Raises:
        MpiNotFoundError: There is no MPI library.
    """
    start_mpi()
    from mpi4py import MPI

    return bool(MPI.Query_thread() >= MPI.THREAD_MULTIPLE)


def mpi_abi() -> str:
    """Return which binary interface mpi4py uses: MPI 5's standard, or a library's.

    mpi4py's wheels have a module for each of two libraries, named for it, and load one.
    """
    if not has_library():
        return "none"
    from mpi4py import MPI

    major, minor = MPI.Get_abi_version()
    if major > 0:
        return f"standard {major}.{minor}"
    named = Path(MPI.__file__).name.removeprefix("MPI.").split(".")
    return named[0] if len(named) > 2 else "of the library that it was built for"


def mpi_library_version() -> str:
    """Return the first line of the MPI library's version text, or ``"none"``."""
    if not has_library():
        return "none"
    from mpi4py import MPI

    # Open MPI ends the text with a zero byte.
    return MPI.Get_library_version().strip("\0 \n").splitlines()[0]
