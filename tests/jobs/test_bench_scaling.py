"""`bench scaling` as whole jobs: the table, the figures, and that they agree."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from launcher import Mpi, environment, mpirun

SCALING = ("-m", "mpitrain", "bench", "scaling", "--data", "digits")

SMALL = (
    *("--precision", "fp64", "--global-batch-size", "12", "--rank-batch-size", "4"),
    *("--steps", "2", "--warmup-steps", "1", "--rounds", "2", "--output", "out"),
)

SHARED = [(num, name) for num in (2, 4) for name in ("ddp", "fsdp")]


def rows_on(out: str) -> list[dict[str, str]]:
    """The tables on the screen, by the names of their columns."""
    found: list[dict[str, str]] = []
    head: list[str] = []
    for line in out.replace("\r", "").splitlines():
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if not cells:
            head = []
        elif not head:
            head = cells
        elif not set(cells[0]) <= {":", "-"}:
            found.append(dict(zip(head, cells, strict=True)))
    return found


def read(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "out" / "scaling.json").read_text())
    return found


def test_every_row_is_timed_in_one_job(mpi: Mpi, tmp_path: Path) -> None:
    done = mpirun(mpi, 4, *SCALING, *SMALL, cwd=tmp_path)
    assert done.status == 0, done.out + done.err
    report = read(tmp_path)
    names = [(row["num_ranks"], row["strategy"]) for row in report["rows"]]
    assert names == [(1, "single"), *SHARED] * 2
    assert report["left_out"] == ["dp: rank 0 sees no GPU"]
    # One screen, one file, the same figures.
    told = rows_on(done.out)
    page = (tmp_path / "out" / "table.md").read_text()
    assert page.startswith("- `python -m mpitrain bench scaling --data digits")
    tables = page[page.index("Fixed problem") :]
    assert tables in done.out.replace("\r", "")
    for line, row in zip(told, report["rows"], strict=True):
        assert (line["strategy"], line["ranks"]) == (
            row["strategy"],
            str(row["num_ranks"]),
        )
        assert line["nodes"] == "1" == str(row["num_nodes"])
        assert line["batch"] == str(row["global_batch_size"])
        assert line["ms/step"] == f"{1e3 * row['step_seconds']:.1f}"
        assert line["speed-up"] == f"{row['speed_up']:.2f}"
        assert len(row["seconds"]) == 2
        assert min(row["seconds"]) <= row["step_seconds"] <= max(row["seconds"])
        low, high = row["speed_up_range"]
        assert low <= row["speed_up"] <= high
        if row["strategy"] == "single":
            assert row["speed_up"] == low == high == 1.0
            assert row["predicted_seconds"] is None
        else:
            assert row["predicted_seconds"] > 0
        if row["strategy"] == "ddp":
            assert 0 < row["all_reduce_share"] < 1
            assert 0 <= row["wait_share"] < 1
    # The fixed problem is one training, however it is spread.
    first, *others = (row for row in report["rows"] if row["fixed"] == "problem")
    assert len(first["losses"]) == 3
    for row in others:
        assert row["losses"] == pytest.approx(first["losses"], rel=1e-9)
    sizes = {row["num_ranks"]: row["global_batch_size"] for row in report["rows"][5:]}
    assert sizes == {1: 4, 2: 8, 4: 16}
    assert [it["num_ranks"] for it in report["all_reduces"]] == [2, 4]
    assert report["asleep_cores"] < 0.2
    assert {"date", "command", "versions", "hosts", "load_before"} <= report.keys()
    assert report["command"].startswith(
        "python -m mpitrain bench scaling --data digits"
    )
    assert (tmp_path / "out" / "scaling.png").stat().st_size > 10_000
    assert [it.name for it in tmp_path.iterdir()] == ["out"]


def test_alone_there_is_the_row_of_one_rank(openmpi: Mpi, tmp_path: Path) -> None:
    done = subprocess.run(
        ["timeout", "-k", "5", "120", sys.executable, *SCALING, *SMALL],
        cwd=tmp_path,
        env=environment(openmpi),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [row["strategy"] for row in rows_on(done.stdout)] == ["single"] * 2
    assert "ddp: there is one rank" in read(tmp_path)["left_out"]


def test_data_that_would_be_read_is_refused_once(openmpi: Mpi, tmp_path: Path) -> None:
    words = ("-m", "mpitrain", "bench", "scaling", "--data", "folder")
    done = mpirun(openmpi, 2, *words, cwd=tmp_path)
    assert done.status == 2, done.err
    assert done.err.count("expected a set that is held in memory") == 1
