"""Fixtures: virtual hosts, SLURM on them, and a folder to submit from.

Where they cannot be had the tests are skipped, with the reason; with CI=true
they fail, so that no green run is green by silence.
"""

from __future__ import annotations

import faulthandler
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import debian
import pytest

from .hosts import VirtualHosts, virtual_hosts
from .needs import MissingError, provide
from .slurm import Slurm

ROOT = Path(__file__).resolve().parents[2]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Lift pytest's own time limit: installing, and two nodes on two cores, take more.

    Every command of these tests is bounded by `timeout -k` instead.
    """
    faulthandler.cancel_dump_traceback_later()


@pytest.fixture(scope="session")
def hosts() -> Iterator[VirtualHosts]:
    """Three hosts with an sshd each, and a login node; SOAK_HOSTS: so many."""
    _require("ip", "sshd")
    with virtual_hosts(int(os.environ.get("SOAK_HOSTS", "3"))) as made:
        yield made


@pytest.fixture(scope="session")
def slurm(hosts: VirtualHosts) -> Slurm:
    """SLURM on the three hosts; it ends with them."""
    _require("munged", "slurmctld", "slurmd", "generate_pbs_nodefile")
    if not list(Path("/usr/lib").glob("*/libpmix.so")):  # slurmd looks as it starts
        debian.install("libpmix-dev")
    made = Slurm(hosts)
    made.start()
    return made


@pytest.fixture(scope="session")
def firewall() -> None:
    """What the hosts' firewalls are made with."""
    _require("nft")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder as a user has it: the scripts, the package, and a `.venv`."""
    for name in ("mpitrain", "slurm", "pbs", "hostfiles"):
        (tmp_path / name).symlink_to(ROOT / name)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    return tmp_path


def _require(*programs: str) -> None:
    try:
        provide(*programs)
    except MissingError as error:
        if os.environ.get("CI") == "true":
            pytest.fail(f"with CI=true this is no reason to skip: {error}")
        pytest.skip(str(error))
