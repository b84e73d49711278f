"""`diff` compares all that was recorded of a step."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mpitrain.tools.diff import DiffConfig, diff


def write_run(path: Path, *logged: dict[str, Any]) -> Path:
    """Write a run whose loop has logged these, one call after the other."""
    path.mkdir()
    (path / "run.json").write_text('{"id": "x"}')
    rows = [{"event": "step", "epoch": 1, **values} for values in logged]
    text = "".join(f"{json.dumps(row)}\n" for row in rows)
    (path / "metrics.jsonl").write_text(text)
    return path


@pytest.mark.parametrize("name", ["train_d", "train_loss", "lr", "train_g"])
def test_a_step_that_was_logged_twice_is_compared_whole(
    tmp_path: Path, name: str
) -> None:
    def run(folder: str, value: float) -> Path:
        steps: list[dict[str, Any]] = []
        for step in (1, 2):
            steps += [{"step": step, name: 0.5 if step == 1 else value}]
            steps += [{"step": step, "train_g": 0.5}]
        return write_run(tmp_path / folder, *steps)

    first = run("a", 1.0)
    for second, differs in ((run("b", 1.0), False), (run("c", 2.0), True)):
        lines, found, _ = diff(DiffConfig(first=first, second=second))
        assert found == differs, lines
    (line,) = [it for it in lines if it.startswith("steps: ")]
    shown = name.removeprefix("train_") if name != "train_loss" else name
    assert line == (
        f"steps: step 2 differs: {shown} 1.0 and 2.0; the same up to step 1"
    )


@pytest.mark.parametrize("name", ["train_d", "train_loss", "lr"])
def test_a_value_that_is_not_finite_is_one_that_was_logged(
    tmp_path: Path, name: str
) -> None:
    def run(folder: str, *values: float | None) -> Path:
        steps: list[dict[str, Any]] = [{"step": 1, name: value} for value in values]
        return write_run(tmp_path / folder, {"step": 1, "train_g": 0.5}, *steps)

    first = run("a", None, 1.0)
    for second, differs in (
        (run("b", None, 1.0), False),
        (run("c", 1.0), True),
        (run("d", 1.0, None), True),
        (run("e", None), True),
    ):
        lines, found, _ = diff(DiffConfig(first=first, second=second))
        assert found == differs, lines
