"""How a training goes, in words."""

from __future__ import annotations

import logging
import time
from dataclasses import replace
from pathlib import Path

import pytest

from mpitrain.record.run_dir import Screen
from mpitrain.train.metrics import EpochMetrics, StepMetrics, Throughput
from mpitrain.train.progress import EpochLines, ProgressBar

STEPS = [
    StepMetrics(epoch=1, step=step, loss=loss, lr=0.1, grad_norm=1.0)
    for step, loss in ((99, 0.25), (100, 0.75))
]


def throughput(step: int) -> Throughput:
    return Throughput(
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


EPOCH = EpochMetrics(
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
    text = EpochLines()
    text.start(1, 400, 0, began=time.time() - 100)
    text.on_metrics(None, STEPS)
    text.on_throughput(None, throughput(100))
    text.on_epoch_end(None, EPOCH)
    assert text.line == (
        "train_loss 0.5000 | val_accuracy 87.50% | 256 samples/s | done in 5:00"
    )


def test_the_metric_of_the_best_checkpoint_is_told() -> None:
    lines = EpochLines()
    lines._is_on, lines.best_by = False, "max:val_f1"
    lines.on_epoch_end(None, replace(EPOCH, values={**EPOCH.values, "f1": 0.75}))
    assert lines.line == "val_f1 0.7500"


def test_what_earlier_jobs_did_does_not_make_this_one_faster() -> None:
    text = EpochLines()
    text.start(1, 400, 300, began=time.time() - 100)
    text.on_throughput(None, throughput(350))
    assert text.line.endswith("done in 1:40")


@pytest.mark.parametrize(
    ("left", "words"), [(600.0, "done in 5:00"), (60.0, "5:00 to go, limit in 1:00")]
)
def test_the_end_is_held_against_the_limit(left: float, words: str) -> None:
    text = EpochLines(lambda: left)
    text.start(1, 400, 0, began=time.time() - 100)
    text.on_throughput(None, throughput(100))
    assert text.line.endswith(words)


def test_steps_of_unknown_number_have_no_end() -> None:
    text = EpochLines()
    text.start(1, None, 0, began=time.time() - 100)
    text.on_throughput(None, throughput(100))
    assert text.line == "256 samples/s"


def test_a_long_epoch_has_lines_between(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    lines = EpochLines()
    lines.start(1, 4000, 0)
    for step in range(1, 3601):
        now[0] += 1.0
        lines.on_metrics(None, STEPS)
        lines.on_throughput(None, throughput(step))
    said = capsys.readouterr().out.splitlines()
    assert 55 <= len(said) <= 60
    assert said[0].startswith("at step 61 of epoch 1/1 | train_loss 0.5000 | 256")


def test_a_bar_has_its_words_and_leaves_the_screen_tidy(
    capsys: pytest.CaptureFixture[str],
) -> None:
    bar = ProgressBar()
    bar.start(2, 100, 25)
    for step in range(26, 101):
        bar.move(step)
    bar.on_metrics(None, STEPS)
    bar.on_throughput(None, throughput(100))
    bar.on_epoch_end(None, EPOCH)
    bar.close()
    said = capsys.readouterr().out
    assert "100/100 | train_loss 0.5000" in said
    assert "\nepoch 1/2 | step 100" in said.replace("\r", "\n")
    assert said.endswith("\r\x1b[2K\x1b[A\n")  # cleared, and on that line again


def test_a_warning_stands_on_a_line_of_its_own_beside_a_bar(
    capfd: pytest.CaptureFixture[str],
) -> None:
    screen = Screen()
    bar = ProgressBar()
    bar.start(1, 10, 0)
    screen.emit(logging.LogRecord("x", logging.WARNING, "", 0, "late", None, None))
    bar.close()
    assert capfd.readouterr().err == "late\n"


def test_a_watched_run_need_not_be_there(tmp_path: Path) -> None:
    from mpitrain.record.runs import is_held

    assert is_held(tmp_path) is None
