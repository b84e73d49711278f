"""The flags of --task: what a signature says, in flags, files and records."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from mpitrain.errors import UsageError
from mpitrain.flags import HelpShown
from mpitrain.tools.train.prepare import read_config
from mpitrain.tools.train.task_flags import task_in

TASK = ("--task", "own_tasks:build")


@pytest.fixture(autouse=True)
def user_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "jobs"))


def test_arguments_are_flags_and_the_default_config_counts() -> None:
    config = read_config([*TASK, "--task.hidden_size=3", "--no-task.has-bias"])
    assert dict(config.task_arguments) == {
        "hidden_size": 3,
        "activation": "relu",
        "has_bias": False,
        "folder": None,
    }
    assert (config.epochs, config.global_batch_size, config.lr) == (3, 8, 0.05)
    config = read_config([*TASK, "--lr", "0.1", "--task.folder", "data"])
    assert config.lr == 0.1
    assert dict(config.task_arguments)["folder"] == Path("data")


def test_a_file_has_the_same_and_flags_win_over_it(tmp_path: Path) -> None:
    config = read_config([*TASK, "--task.hidden-size", "3", "--name", "x"])
    file = tmp_path / "config.yaml"
    file.write_text(config.as_yaml("x"))
    assert "task.hidden_size: 3" in file.read_text()
    assert read_config(["--config", str(file)]) == config
    found = read_config([f"--config={file}", "--task.hidden-size=4"])
    assert dict(found.task_arguments)["hidden_size"] == 4
    assert task_in(["--config", str(tmp_path / "none.yaml")]) is None


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--task.hiden-size", "3"], "Did you mean '--task.hidden-size'"),
        (["--task.hidden-size", "a"], "--task.hidden-size: found 'a', expected a who"),
        (["--task.activation", "rely"], "expected relu or tanh. Did you mean 'relu'"),
        (["--task.layer", "1"], "unknown flag --task.layer"),
        (["--task", "own_tasks:bild"], "no callable 'bild'. Did you mean 'build'"),
        (["--task", "own_tasks:takes_a_network"], "'network' has no default, and no"),
    ],
)
def test_a_wrong_flag_is_named(words: list[str], error: str) -> None:
    with pytest.raises(UsageError, match=error):
        read_config([*TASK, *words])


def test_flags_of_a_task_need_one() -> None:
    with pytest.raises(UsageError, match=r"unknown flag --task\.hidden-size"):
        read_config(["--task.hidden-size", "3"])


def test_the_help_has_the_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(HelpShown):
        read_config([*TASK, "--help"], only_common=True)
    shown = capsys.readouterr().out
    assert "--task.hidden-size INT" in shown
    assert "Of the network. [8]" in shown
    assert "--task.activation {relu,tanh}" in shown
    assert "Number of epochs. [3]" in shown  # the task's default


def test_a_module_with_an_error_of_its_own_shows_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "broken_task.py").write_text("import no_such_package\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ModuleNotFoundError, match="no_such_package"):
        read_config(["--task", "broken_task:build"])
    assert "broken_task" not in sys.modules


def test_annotations_for_type_checkers_do_not_hide_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "checked_task.py").write_text(
        "from __future__ import annotations\n"
        "from typing import TYPE_CHECKING\n"
        "if TYPE_CHECKING:\n    from mpitrain import TrainConfig\n"
        "def build(config: TrainConfig, width: int = 5): ...\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    config = read_config(["--task", "checked_task:build", "--task.width", "7"])
    arguments: dict[str, Any] = dict(config.task_arguments)
    assert arguments == {"width": 7}
