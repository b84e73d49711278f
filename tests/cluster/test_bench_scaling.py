"""`bench scaling` over two hosts: rows for one node and for two, in one job."""

from __future__ import annotations

import json
from pathlib import Path

from .hosts import VirtualHosts

TIMEOUT_SECONDS = 300

SCALING = (
    *("python", "-m", "mpitrain", "bench", "scaling", "--data", "digits"),
    *("--precision", "fp64", "--global-batch-size", "12", "--rank-batch-size", "4"),
    *("--steps", "2", "--warmup-steps", "1", "--rounds", "2", "--output", "out"),
)


def test_one_job_has_rows_for_one_node_and_for_two(
    hosts: VirtualHosts, folder: Path
) -> None:
    """Ranks are dealt out one by one: the first node has ranks 0 and 2."""
    (folder / "hosts").write_text("".join(f"{n} slots=2\n" for n in hosts.names[:2]))
    mpirun = ["mpirun", "--prefix", f"{folder}/.venv", "--hostfile", "hosts"]
    done = hosts.run(
        hosts.names[0],
        [*mpirun, "--map-by", "node", "-np", "4", "-x", "PATH", *SCALING],
        cwd=folder,
        timeout_seconds=TIMEOUT_SECONDS,
        environ={"PATH": f"{folder}/.venv/bin:{hosts.environ['PATH']}"},
    )
    assert done.returncode == 0, done.stdout
    report = json.loads((folder / "out" / "scaling.json").read_text())
    assert [host["ranks"] for host in report["hosts"]] == [[0, 2], [1, 3]]
    rows = [row for row in report["rows"] if row["fixed"] == "problem"]
    assert [(row["num_ranks"], row["num_nodes"]) for row in rows] == [
        *((1, 1), (2, 1), (2, 1), (4, 2), (4, 2)),
    ]
    for row in rows:
        assert (
            max(
                abs(a / b - 1)
                for a, b in zip(row["losses"], rows[0]["losses"], strict=True)
            )
            < 1e-9
        )
    assert (folder / "out" / "scaling.png").stat().st_size > 10_000
    assert "| ddp      |     2 |     4 |" in (folder / "out" / "table.md").read_text()
