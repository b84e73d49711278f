"""How a training goes, in words."""

from __future__ import annotations

import logging
import sys
import time
from pathlib import Path

import pytest

from mpitrain.record.console import Bar, Lines
from mpitrain.record.events import Epoch, Pace, StepRow
from mpitrain.record.folder import Screen
from mpitrain.record.progress import Standing

ROWS = [
    StepRow(epoch=1, step=step, loss=loss, lr=0.1, gradient_norm=1.0)
    for step, loss in ((99, 0.25), (100, 0.75))
]


def pace(step: int) -> Pace:
    return Pace(
        epoch=1,
        step=step,
        num_steps=2,
        num_samples=128,
        seconds=0.5,
        data_seconds=0.0,
        compute_seconds=0.0,
        communication_seconds=0.0,
        wait_seconds=0.0,
        slowest_rank=0,
        slowest_steps=1,
        late_seconds=0.0,
    )


EPOCH = Epoch(
    stage="train",
    epoch=1,
    step=100,
    train_loss=0.5,
    train_samples=6400,
    values={"loss": 0.5, "accuracy": 0.875},
    val_samples=100,
    skipped_samples=0,
    skipped_steps=0,
    steps_seconds=50.0,
    epoch_seconds=60.0,
)


@pytest.fixture(autouse=True)
def no_time_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now)


def test_loss_accuracy_speed_and_end_are_told() -> None:
    standing = Standing(400, 0, lambda: None, began=time.time() - 100)
    standing.rows_done(ROWS)
    standing.pace_done(pace(100))
    standing.epoch_done(EPOCH)
    assert standing.in_words() == (
        "train_loss 0.5000 | val_accuracy 87.50% | 256 samples/s | done in 5:00"
    )


def test_what_earlier_jobs_did_does_not_make_this_one_faster() -> None:
    standing = Standing(400, 300, lambda: None, began=time.time() - 100)
    standing.pace_done(pace(350))
    assert standing.in_words().endswith("done in 1:40")


@pytest.mark.parametrize(
    ("left", "words"),
    [(600.0, "done in 5:00"), (60.0, "5:00 to go, limit in 1:00")],
)
def test_the_end_is_held_against_the_limit(left: float, words: str) -> None:
    standing = Standing(400, 0, lambda: left, began=time.time() - 100)
    standing.pace_done(pace(100))
    assert standing.in_words().endswith(words)


def test_steps_of_unknown_number_have_no_end() -> None:
    standing = Standing(None, 0, lambda: None, began=time.time() - 100)
    standing.pace_done(pace(100))
    assert standing.in_words() == "256 samples/s"


def test_a_long_epoch_has_lines_between(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    lines = Lines(1, Standing(4000))
    for step in range(1, 3601):
        now[0] += 1.0
        lines.rows_done(ROWS)
        lines.pace_done(pace(step))
    said = capsys.readouterr().out.splitlines()
    assert 55 <= len(said) <= 60
    assert said[0].startswith("at step 61 of epoch 1/1 | train_loss 0.5000 | 256")


def test_a_bar_has_its_words_and_leaves_the_screen_tidy(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Bar(2, Standing(100, 25)) as bar:
        for step in range(26, 101):
            bar.step_done(step)
        bar.rows_done(ROWS)
        bar.pace_done(pace(100))
        bar.epoch_done(EPOCH)
    said = capsys.readouterr().out
    assert "100/100 | train_loss 0.5000" in said
    assert "\nepoch 1/2 | step 100" in said.replace("\r", "\n")
    assert said.endswith("\r\x1b[2K\x1b[A\n")  # cleared, and on that line again


def test_a_bar_that_hears_of_no_step_moves_with_their_rows(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Bar(1, Standing(400)) as bar:
        bar.rows_done(ROWS)
        bar.pace_done(pace(100))
    assert "100/400 | train_loss 0.5000" in capsys.readouterr().out


def test_a_warning_stands_on_a_line_of_its_own_beside_a_bar(
    capfd: pytest.CaptureFixture[str],
) -> None:
    screen = Screen(sys.stderr)
    with Bar(1, Standing(10)):
        screen.emit(logging.LogRecord("x", logging.WARNING, "", 0, "late", None, None))
    assert capfd.readouterr().err == "late\n"


def test_a_watched_run_need_not_be_there(tmp_path: Path) -> None:
    from mpitrain.record.runs import is_held

    assert is_held(tmp_path) is None
