"""`benchmarks/scaling.py`: which trainings it runs, and its table; without MPI."""

from __future__ import annotations

import importlib
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def scaling(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("scaling")


def made(num_ranks: int, rates: list[float]) -> dict[str, Any]:
    """A row of three rounds."""
    return {
        "strategy": "ddp",
        "num_ranks": num_ranks,
        "global_batch_size": 64,
        "num_nodes": 1,
        "samples_per_second": rates,
        "step_seconds": [64 / rate for rate in rates],
        "communication_share": [0.1, 0.2, 0.9],
        "wait_share": [0.1, 0.2, 0.9],
    }


def test_speed_up_is_the_median_of_ratios_of_one_round(scaling: Any) -> None:
    """The machine is ten times as slow in one round: that changes no ratio."""
    rows = [made(1, [100.0, 10.0, 100.0]), made(4, [200.0, 20.0, 300.0])]
    last = scaling.table(rows).splitlines()[-1].split("|")
    assert [cell.strip() for cell in last[8:12]] == ["2.00", "50%", "20.0%", "20.0%"]


def test_weak_scaling_gives_each_rank_the_same_batch(scaling: Any) -> None:
    options = Namespace(ranks=[1, 4], strategies=["ddp", "fsdp"], per_rank=True)
    rows = scaling.rows_of(options, 64)
    assert [tuple(row.values()) for row in rows] == [
        *(("single", 1, 64), ("ddp", 4, 256), ("fsdp", 4, 256))
    ]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--ranks 0", "expected numbers of at least 1"),
        ("--ranks 1 --rounds 0", "expected numbers of at least 1"),
        ("--ranks 2 --strategies dp", "expected it beside dp"),
        ("--ranks 1 --mpirun no-such-launcher", "'no-such-launcher' cannot be started"),
    ],
)
def test_what_cannot_be_run_is_said_in_a_line(
    scaling: Any, words: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as left:
        scaling.main(words.split())
    assert said in f"{left.value.code} {capsys.readouterr().err}"
