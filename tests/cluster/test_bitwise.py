"""With --bitwise two hosts compute the bits that one rank does."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

import pytest
from bitwise_jobs import MODELS, Alone, killed_and_resumed, runs_of, trained
from launcher import MPIS, Mpi, find
from resume_jobs import Runs

from .hosts import VirtualHosts


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Alone:
    return Alone(tmp_path_factory.mktemp("alone"))


# In CI bits between hosts are those of test_recovery.py.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "strategy", "mpi"),
    [
        (model, strategy, mpi)
        for model in MODELS
        for strategy in ("ddp", "fsdp")
        for mpi in MPIS
        if (model, strategy) != ("channels-last", "fsdp")
    ],
)
def test_two_hosts_compute_the_bits_of_one_rank(
    model: str,
    strategy: str,
    mpi: str,
    alone: Alone,
    hosts: VirtualHosts,
    tmp_path: Path,
) -> None:
    def on(*slots: int) -> tuple[Runs, int]:
        place = on_hosts(find(mpi), hosts, slots, tmp_path)
        return runs_of(model, place, tmp_path, TMPDIR=str(hosts.tmpdir)), sum(slots)

    flags = ("--strategy", strategy)
    if (model, strategy) == ("bf16", "fsdp"):  # see tests/jobs/test_bitwise.py
        one_rank = runs_of(model, find(mpi), tmp_path)
        expected = trained(one_rank, "on-1", 1, *flags)
    else:
        expected = alone(model)
    for slots in ((2, 2), (3, 1)):
        runs, size = on(*slots)
        assert trained(runs, "-".join(map(str, slots)), size, *flags) == expected
    parts = [on(2, 2), on(3, 1), on(1, 1), on(1, 2)]
    assert killed_and_resumed(parts, *flags) == expected


def on_hosts(mpi: Mpi, hosts: VirtualHosts, slots: Sequence[int], folder: Path) -> Mpi:
    """An MPI whose mpirun starts on the first host, over ssh, with these slots."""
    script, file = folder / "mpirun.sh", folder / f"hosts-{'-'.join(map(str, slots))}"
    first = shlex.join([*hosts._on(hosts.names[0]), str(mpi.mpirun)])
    script.write_text(f'#!/bin/sh\nexec {first} "$@"\n')
    script.chmod(0o755)
    line = "{}:{}\n" if mpi.name == "mpich" else "{} slots={}\n"
    places = zip(hosts.names, slots, strict=False)
    file.write_text("".join(line.format(*place) for place in places))
    if mpi.name == "mpich":
        flags = ["-launcher", "ssh", "-f", str(file)]
    else:
        prefix = str(mpi.mpirun.parents[1])
        flags = ["--prefix", prefix, "--hostfile", str(file), "--bind-to", "none"]
        names = ["PYTHONPATH", "NOTES", *(["MPI4PY_LIBMPI"] if mpi.libmpi else [])]
        for name in names:
            flags += ["-x", name]
    return Mpi(name=mpi.name, mpirun=script, libmpi=mpi.libmpi, flags=tuple(flags))
