"""What a run leaves behind, and what it says."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest

from mpitrain.record import folder, recorder
from mpitrain.record.environment import VARIABLES
from mpitrain.record.metrics import Metrics


def test_the_log_begins_with_whose_it_is(tmp_path: Path) -> None:
    with folder.open_log(tmp_path, 3, 16, "gpu03") as log:
        log.write("more\n")
    first, second = (tmp_path / "logs/rank-03.log").read_text().splitlines()
    assert first.startswith("pid ")
    assert "is rank 3/16 gpu03" in first
    assert second == "more"


def test_warnings_reach_the_screen_from_rank_zero_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    logger = logging.getLogger("mpitrain")
    try:
        for rank in (0, 1):
            logger.handlers.clear()
            with folder.open_log(tmp_path, rank, 2, "host") as log:
                log_file = folder.start_logging(log, is_rank_zero=rank == 0)
                logger.info("told the file")
                logger.warning("from rank %d", rank)
                log_file.flush()
            written = (tmp_path / f"logs/rank-{rank}.log").read_text()
            assert "INFO told the file" in written
            assert f"WARNING from rank {rank}" in written
        assert capsys.readouterr().err == "warning: from rank 0\n"
    finally:
        logger.handlers.clear()
        logger.propagate = True


def test_doubles_are_written_whole(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path)
    value = 0.1 + 0.2
    metrics.write("step", train_loss=value)
    metrics.close()
    row = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert row == {"event": "step", "train_loss": value}


def test_what_is_not_finite_is_null(tmp_path: Path) -> None:
    metrics = Metrics(tmp_path)
    metrics.write("step", train_loss=float("nan"), lr=float("inf"))
    metrics.close()
    row = json.loads((tmp_path / "metrics.jsonl").read_text())
    assert row == {"event": "step", "train_loss": None, "lr": None}


def test_a_result_that_is_not_finite_is_json_still(tmp_path: Path) -> None:
    folder.write_json(tmp_path / "result.json", {"val_loss": float("nan")})
    assert json.loads((tmp_path / "result.json").read_text()) == {"val_loss": None}


def test_a_failure_is_recorded_over_what_is_there(tmp_path: Path) -> None:
    folder.write_json(tmp_path / "result.json", {"status": "running", "x": 1})
    recorder.fail(tmp_path, "rank 2 fell")
    assert json.loads((tmp_path / "result.json").read_text()) == {
        "status": "failed",
        "x": 1,
        "error": "rank 2 fell",
    }


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    folder.write_whole(tmp_path / "f", "old")
    folder.write_whole(tmp_path / "f", "new")
    assert [p.name for p in tmp_path.iterdir()] == ["f"]
    assert (tmp_path / "f").read_text() == "new"


@pytest.mark.parametrize("word", ["KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIAL"])
def test_no_recorded_variable_sounds_like_a_secret(word: str) -> None:
    assert not [name for name in VARIABLES if word in name.upper()]
