"""With --bitwise two hosts compute the bits that one rank does."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest
from launcher import slow

from .conftest import ROOT
from .hosts import VirtualHosts
from .test_hostfile import mpirun

FLAGS = ("--bitwise", "--device", "cpu", "--model", "users:Attention", "--epochs", "2")


@pytest.mark.parametrize("strategy", ["ddp", slow("fsdp")])
def test_two_hosts_compute_the_bits_of_one_rank(
    strategy: str, hosts: VirtualHosts, folder: Path
) -> None:
    digests = {}
    for name, slots in {"1": [1], "2-2": [2, 2], "3-1": [3, 1]}.items():
        done = mpirun(
            hosts,
            folder,
            hosts.names[: len(slots)],
            slots=slots,
            words=["--name", name, "--strategy", strategy, *FLAGS],
            flags=["--bind-to", "none", "-x", f"PYTHONPATH={ROOT / 'tests/jobs'}"],
        )
        assert done.returncode == 0, done.stdout
        weights = (folder / "runs" / name / "model.pt").read_bytes()
        digests[name] = hashlib.sha256(weights).hexdigest()
    assert len(set(digests.values())) == 1, digests
