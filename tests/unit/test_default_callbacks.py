"""The settings of `default_callbacks`, and what is returned for them."""

from __future__ import annotations

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mpitrain import TrainConfig, default_callbacks
from mpitrain.checkpoint.checkpointer import Checkpointer
from mpitrain.cli import read_config
from mpitrain.errors import UsageError
from mpitrain.record.loggers.callback import Loggers
from mpitrain.record.loop import before_step
from mpitrain.record.result import record_failure
from mpitrain.record.run_dir import progress_of, read_result
from mpitrain.tools.train.callbacks import RunSummary, _yaml_of_script
from mpitrain.train.checks import check_metrics
from mpitrain.train.early_stopping import EarlyStopping
from mpitrain.train.evaluate import score_of


def names_of(*args: Any, **settings: Any) -> list[str]:
    return [type(it).__name__ for it in default_callbacks("runs/a", *args, **settings)]


def test_settings_choose_callbacks_and_the_checkpointer_is_last() -> None:
    plain = names_of()
    assert "Loggers" not in plain
    more = names_of(log="csv", profile=3, early_stopping=2, time_limit=60)
    assert {*more} == {*plain, "Loggers", "Profiler", "EarlyStopping"}
    assert more[-1] == "Checkpointer"
    config = TrainConfig(profile=3, early_stopping=2, best_by="min:mae")
    assert {*names_of(config)} == {*plain, "Profiler", "EarlyStopping"}
    assert names_of(TrainConfig(dry_run=True)) == ["EpochLines"]
    (stopping,) = [
        it
        for it in default_callbacks("a", config, best_by="max:f1")
        if isinstance(it, EarlyStopping)
    ]
    assert stopping.metric == "max:f1"
    (checkpointer,) = [
        it for it in default_callbacks("a") if isinstance(it, Checkpointer)
    ]
    assert checkpointer.run_dir == Path("a")


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"best_bye": "f1"}, "Did you mean 'best_by'"),
        ({"lr": 0.1}, "there is no such setting"),
        ({"new_run": True}, "there is no such setting"),
        ({"checkpoint_every_steps": "10"}, "--checkpoint-every-steps: found '10'"),
        ({"log": 5}, "log=5.*wrong type"),
        ({"log": ["cvs"]}, "--log 'cvs' is not known"),
        ({"run_dir": ""}, "expected one such as runs/mine"),
    ],
)
def test_a_wrong_setting_is_named(settings: dict[str, Any], error: str) -> None:
    run_dir = settings.pop("run_dir", "runs/a")
    with pytest.raises(UsageError, match=error):
        default_callbacks(run_dir, **settings)


def test_the_file_of_a_script_s_flags_is_refused_by_the_command(tmp_path: Path) -> None:
    text = _yaml_of_script(TrainConfig(lr=0.5, log=("csv",)), tmp_path)
    assert "lr: 0.5" in text
    assert "\nmodel: " not in text
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(UsageError, match="script"):
        read_config(["--config", str(tmp_path / "config.yaml")])
    assert RunSummary(tmp_path).uses_settings == ()


def test_images_before_the_loggers_run_are_warned_of(
    caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    world = SimpleNamespace(is_rank_zero=True)
    trainer: Any = SimpleNamespace(engine=SimpleNamespace(world=world))
    with caplog.at_level("WARNING", "mpitrain"):
        Loggers(tmp_path, ["csv"]).on_images(trainer, "a", torch.zeros(1, 1, 2, 2))
    assert "log_images('a'): not logged" in caplog.text


def test_a_loss_without_a_direction_is_no_best_metric() -> None:
    values = {"loss": 2.0, "kl": 1.0}
    with pytest.raises(UsageError, match=r"best_by kl: kl is a loss.*expected min:kl"):
        score_of(values, "kl", losses=["kl"])
    assert score_of(values, "min:kl", losses=["kl"]) == -1.0
    assert score_of(values, "max:kl", losses=["kl"]) == 1.0
    assert score_of(values, "kl") == 1.0


@pytest.mark.parametrize("found", [torch.zeros(2), None, 0.5, [1.0]])
def test_a_validation_step_returns_metrics_by_name(found: Any) -> None:
    with pytest.raises(UsageError, match=r"validation_step returned .*expected a dict"):
        check_metrics(found)


def test_losses_since_the_last_validation_are_read_back(tmp_path: Path) -> None:
    rows = ['{"event": "step", "step": 1, "train_loss": 9.0}']
    rows += ['{"event": "epoch", "step": 1}']
    rows += [
        f'{{"event": "step", "step": {i}, "train_loss": {i}.0}}' for i in (2, 3, 4)
    ]
    file = tmp_path / "metrics.jsonl"
    file.write_text("".join(f"{row}\n" for row in rows))
    size, last, num, losses = before_step(file, 4)
    assert (last, num, losses.tolist()) == (3, 1, [2.0, 3.0])
    assert size == len("".join(f"{row}\n" for row in rows[:-1]))
    # The loop was stopped between a step and its validation, or after that.
    size, last, num, losses = before_step(file, 4, is_validation=True)
    assert (size, last, num) == (file.stat().st_size, 4, 1)
    assert losses.tolist() == [2.0, 3.0, 4.0]
    with file.open("a") as more:
        more.write('{"event": "epoch", "step": 4}\n')
    assert before_step(file, 4, is_validation=True) == (size, last, num, losses)
    # One that is not finite counts, as without a resume: their mean is not, either.
    file.write_text('{"event": "step", "step": 1, "train_loss": null}\n')
    assert math.isnan(*before_step(file, 2)[3])


def test_a_run_that_failed_tells_how_far_it_came(tmp_path: Path) -> None:
    (tmp_path / "result.json").write_text('{"status": "running", "steps": 0}')
    row = '{"event": "step", "epoch": %d, "step": %d, "train_loss": 0.12345678901234}\n'
    text = "".join(row % (2, step) for step in range(1, 3000))
    text += '{"event": "epoch", "epoch": 2, "step": 2999}\n' + row % (3, 3000)
    (tmp_path / "metrics.jsonl").write_text(text + '{"event": "step", "st')
    record_failure(tmp_path, "ArithmeticError: mine")
    found = read_result(tmp_path)
    assert (found["status"], found["steps"], found["epochs"]) == ("failed", 3000, 2)
    # The line of the last epoch is a thousand steps ago.
    more = "".join(row % (3, step) for step in range(3001, 4000))
    (tmp_path / "metrics.jsonl").write_text(text + more)
    assert progress_of(tmp_path / "metrics.jsonl") == {"steps": 3999, "epochs": 2}
    assert progress_of(tmp_path / "none.jsonl") == {}
