"""The mpi4py backend over two hosts: the whole table of tests/mpi, between nodes."""

from __future__ import annotations

from pathlib import Path

import pytest

from .hosts import VirtualHosts

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


@pytest.mark.slow
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
