"""The MPIs that every job test runs under."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from launcher import ROOT, Mpi

MPIS = ("openmpi-5", "openmpi-4.1", "mpich")


def find(name: str) -> Mpi:
    """The MPI of our own environment, and those that `make test-jobs` put beside it."""
    here = Path(sys.prefix)
    if name == "openmpi-5":
        # MPIEXEC: a site's own MPI, that mpi4py finds by itself.
        mpirun = Path(os.environ.get("MPIEXEC", here / "bin" / "mpirun"))
        return Mpi(name=name, mpirun=mpirun, libmpi=None, flags=("--oversubscribe",))
    folder = ROOT / (".venv-ompi4" if name == "openmpi-4.1" else ".venv-mpich")
    library = "libmpi.so.40" if name == "openmpi-4.1" else "libmpi.so.12"
    return Mpi(
        name=name,
        mpirun=folder / "bin" / "mpirun",
        libmpi=folder / "lib" / library,
        flags=("--oversubscribe",) if name == "openmpi-4.1" else (),
    )


@pytest.fixture(params=MPIS, scope="module")
def mpi(request: pytest.FixtureRequest) -> Mpi:
    """Each MPI in turn."""
    found = find(request.param)
    if not found.mpirun.exists():
        reason = f"{found.mpirun} is not there; `make test-jobs` installs it"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
    return found


@pytest.fixture(scope="session")
def openmpi() -> Mpi:
    """The MPI of our own environment."""
    return find("openmpi-5")
