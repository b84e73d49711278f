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
        "task.hidden_size": 3,
        "task.activation": "relu",
        "task.has_bias": False,
        "task.folder": None,
    }
    assert (config.epochs, config.global_batch_size, config.lr) == (3, 8, 0.05)
    config = read_config([*TASK, "--lr", "0.1", "--task.folder", "data"])
    assert config.lr == 0.1
    assert dict(config.task_arguments)["task.folder"] == Path("data")


def test_a_file_has_the_same_and_flags_win_over_it(tmp_path: Path) -> None:
    config = read_config([*TASK, "--task.hidden-size", "3", "--name", "x"])
    file = tmp_path / "config.yaml"
    file.write_text(config.as_yaml("x"))
    assert "task.hidden_size: 3" in file.read_text()
    assert read_config(["--config", str(file)]) == config
    found = read_config([f"--config={file}", "--task.hidden-size=4"])
    assert dict(found.task_arguments)["task.hidden_size"] == 4
    assert task_in(["--config", str(tmp_path / "none.yaml")]) is None


@pytest.mark.parametrize(
    ("words", "error"),
    [
        (["--task.hiden-size", "3"], "Did you mean '--task.hidden-size'"),
        (["--task.hidden-size", "a"], "--task.hidden-size: found 'a', expected a who"),
        (["--task.activation", "rely"], "expected relu or tanh. Did you mean 'relu'"),
        (["--task.layer", "1"], "unknown flag --task.layer"),
        (["--task", "own_tasks:bild"], "no callable 'bild'. Did you mean 'build'"),
        (["--task", "own_tasks:takes_a_network"], "'network' has no default, or no"),
        (["--task", "own_tasks:of_kinds", "--task.width", "5"], "expected 4 or 8"),
    ],
)
def test_a_wrong_flag_is_named(words: list[str], error: str) -> None:
    with pytest.raises(UsageError, match=error):
        read_config([*TASK, *words])


def test_each_kind_is_read_from_words_and_from_a_file(tmp_path: Path) -> None:
    words = ["--task", "own_tasks:of_kinds", "--task.width", "8", "--task.folder", "a"]
    words += ["--task.sizes", "3", "4", "--task.paths", "b", "c", "--task.rate", "None"]
    config = read_config(words)
    found = dict(config.task_arguments)
    assert found == {
        "task.width": 8,
        "task.folder": Path("a"),
        "task.tag": None,
        "task.sizes": (3, 4),
        "task.paths": (Path("b"), Path("c")),
        "task.rate": None,
        "task.is_deep": False,
        "task.text": "1e-3",
        "task.scale": 1.0,
    }
    assert isinstance(found["task.scale"], int | float)
    file = tmp_path / "config.yaml"
    for name in ("x", "y"):
        file.write_text(config.as_yaml(name))
        again = read_config(["--config", str(file)])
        assert again.task_arguments == config.task_arguments


def test_the_last_task_counts(tmp_path: Path) -> None:
    config = read_config([*TASK, "--name", "x"])
    (tmp_path / "own.yaml").write_text(config.as_yaml("x"))
    (tmp_path / "plain.yaml").write_text(read_config([]).as_yaml("y"))
    files = [f"--config={tmp_path / name}.yaml" for name in ("own", "plain")]
    assert task_in(files) is None
    assert task_in(files[::-1]) == "own_tasks:build"
    assert task_in([*files, *TASK]) == "own_tasks:build"
    assert task_in([files[0], "--task", "None"]) is None


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
        "def build(config: TrainConfig, width: int | None = None): ...\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    config = read_config(["--task", "checked_task:build", "--task.width", "7"])
    arguments: dict[str, Any] = dict(config.task_arguments)
    assert arguments == {"task.width": 7}
