"""`bench scaling`: which trainings it runs, and its table; without MPI."""

from __future__ import annotations

import pytest

from mpitrain.cli import main
from mpitrain.errors import UsageError
from mpitrain.tools import bench_scaling as scaling
from mpitrain.tools.bench_scaling import BenchScalingConfig, Row


def made(num_ranks: int, rates: list[float]) -> Row:
    """A row of three rounds."""
    row = Row(strategy="ddp", num_ranks=num_ranks, global_batch_size=64, num_nodes=1)
    row.samples_per_second = rates
    row.step_seconds = [64 / rate for rate in rates]
    row.communication_share = row.wait_share = [0.1, 0.2, 0.9]
    return row


def test_speed_up_is_the_median_of_ratios_of_one_round() -> None:
    """The machine is ten times as slow in one round: that changes no ratio."""
    rows = [made(1, [100.0, 10.0, 100.0]), made(4, [200.0, 20.0, 300.0])]
    assert rows[1].speed_up(rows[0]) == 2.0
    last = scaling.table(rows).splitlines()[-1].split("|")
    assert [cell.strip() for cell in last[8:12]] == ["2.00", "50%", "20.0%", "20.0%"]


@pytest.mark.parametrize(
    ("words", "found"),
    [
        (["--ranks", "0"], "--ranks must be at least 1"),
        (["--", "--name", "x"], "--name after -- is set by bench scaling"),
        (["--", "--strategy", "fsdp"], "--strategy after -- is set"),
        (["--", "--epochs", "none"], "--epochs"),
    ],
)
def test_flags_are_checked_before_a_training_starts(
    words: list[str], found: str
) -> None:
    with pytest.raises(UsageError, match=found):
        scaling.bench_scaling(words)


def test_under_mpirun_it_says_how_it_is_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    with pytest.raises(UsageError, match="bench scaling --ranks 1 2 4, without mpirun"):
        scaling.bench_scaling([])


def test_weak_scaling_gives_each_rank_the_same_batch() -> None:
    config = BenchScalingConfig(ranks=(1, 4), strategies=("ddp", "fsdp"), per_rank=True)
    rows = scaling.rows_of(config, 64)
    assert [(it.strategy, it.num_ranks, it.global_batch_size) for it in rows] == [
        *(("single", 1, 64), ("ddp", 4, 256), ("fsdp", 4, 256)),
    ]


@pytest.mark.parametrize("words", [[], ["scales"]])
def test_what_to_measure_must_be_named(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", *words]) == 2
    assert "bench what? expected: bench scaling" in capsys.readouterr().err
