"""The mpi4py backend over two hosts: the whole table of tests/mpi, between nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from .hosts import VirtualHosts

MPICH = Path(__file__).parents[2] / ".venv-mpich"
TESTS = Path(__file__).parents[1] / "mpi"
SECONDS = 240
RANK = """
exec "$0" -m mpi4py -m pytest -x -q --with-mpi --color=no "$@" \
    > "rank-$OMPI_COMM_WORLD_RANK" 2>&1
"""
"""A log for each rank: what a rank says as it ends the others would be lost."""

TABLES = (
    "test_collectives.py",
    "test_groups.py",
    "test_group_failures.py",
    "test_parallel_training.py",
)

WHICH = (
    "not two-nodes and not "
    "(reductions and (float64 or complex128 or int8 or int16 or int32))"
)
"""Which types are added up makes no difference between hosts: all are on one."""


@pytest.mark.slow  # in CI the table of tests/mpi, on one host
@pytest.mark.parametrize(
    ("slots", "tables"),
    [
        pytest.param((2, 2), TABLES, id="two-each"),
        pytest.param((2, 1), TABLES[:1], id="uneven"),
        pytest.param((1, 1), TABLES[1:], id="one-each"),
    ],
)
def test_collectives_are_right_between_hosts(
    hosts: VirtualHosts, folder: Path, slots: tuple[int, int], tables: tuple[str, ...]
) -> None:
    lines = zip(hosts.names, slots, strict=False)
    (folder / "hosts").write_text("".join(f"{n} slots={s}\n" for n, s in lines))
    path = f"{folder}/.venv/bin:{hosts.environ['PATH']}"
    command = ["mpirun", "--prefix", f"{folder}/.venv", "--hostfile", "hosts"]
    command += [
        "-x",
        "PATH",
        "bash",
        "-c",
        RANK,
        f"{folder}/.venv/bin/python",
        "-k",
        WHICH,
        *(str(TESTS / n) for n in tables),
    ]
    done = hosts.run(
        hosts.names[0],
        command,
        cwd=folder,
        timeout_seconds=SECONDS,
        environ={"PATH": path},
    )
    said = {path.name: path.read_text() for path in sorted(folder.glob("rank-*"))}
    told = "\n".join(f"{name}: {text[-3000:]}" for name, text in said.items())
    assert done.returncode == 0, told + done.stdout
    assert [" passed, " in text for text in said.values()] == [True] * sum(slots)


SUMS = """
import sys
import torch, torch.distributed as dist
import mpitrain

TYPES = (torch.float32, torch.float64, torch.bfloat16, torch.complex64, torch.int64)

with mpitrain.init(device="cpu") as world:
    num, num_sums = world.world_size, 0
    for power in range(0, 21, int(sys.argv[1])):
        for size in (2**power - 1, 2**power, 2**power + 1):
            for dtype in TYPES if size < 70_000 else TYPES[:1]:
                mine = ((torch.arange(size) + world.rank) % 7).to(dtype)
                all_ = [((torch.arange(size) + rank) % 7) for rank in range(num)]
                expected = torch.stack(all_).sum(0).to(dtype)
                found = mine.clone()
                dist.all_reduce(found)
                assert torch.equal(found, expected), ("all_reduce", size, dtype)
                for root in range(num):
                    found = mine.clone()
                    dist.reduce(found, root)
                    wanted = expected if world.rank == root else mine
                    assert torch.equal(found, wanted), ("reduce", root, size, dtype)
                num_sums += 1 + num
    if world.is_rank_zero:
        print("sums:", num_sums)
"""


@pytest.mark.parametrize(
    ("slots", "step"),
    [
        # In CI fewer sizes, on a number of ranks that is no power of two.
        ((2, 2, 1), 5),
        pytest.param((2, 2), 2, marks=pytest.mark.slow),
        pytest.param((2, 2, 1), 2, marks=pytest.mark.slow),
    ],
)
def test_sums_by_mpich_between_hosts_are_right_at_every_size(
    slots: tuple[int, ...], step: int, hosts: VirtualHosts, folder: Path
) -> None:
    """Its algorithm changes by size and number of ranks (mpich issues 6893, 7911)."""
    (folder / "sums.py").write_text(SUMS)
    places = ",".join(f"{n}:{s}" for n, s in zip(hosts.names, slots, strict=False))
    num, start = sum(slots), [f"{MPICH}/bin/mpiexec", "-launcher", "ssh"]
    start += ["-hosts", places]
    done = hosts.run(
        hosts.names[0],
        [*start, "-n", str(num), f"{folder}/.venv/bin/python", "sums.py", str(step)],
        cwd=folder,
        timeout_seconds=SECONDS,
        environ={
            "MPI4PY_LIBMPI": f"{MPICH}/lib/libmpi.so.12",
            "PYTHONPATH": str(folder),
        },
    )
    assert done.returncode == 0, done.stdout
    assert "sums: " in done.stdout
