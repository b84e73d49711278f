"""What a run leaves behind, and what it says."""

from __future__ import annotations

import itertools
import json
import logging
import math
import os
import subprocess
import sys
import threading
import time
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mpitrain.errors import UsageError
from mpitrain.record import folder, recorder
from mpitrain.record.environment import VARIABLES
from mpitrain.record.events import Listeners, StepRow
from mpitrain.record.lines import JsonLines
from mpitrain.record.runs import open_run
from mpitrain.record.times import COMMUNICATION, PHASES, Laps, RankTimes
from mpitrain.train.clock import Clock
from mpitrain.train.pace import Untold
from mpitrain.world import Node, World


def a_world() -> World:
    nodes = (Node(hostname="a", ranks=(0, 1)), Node(hostname="b", ranks=(2, 3)))
    return World(
        rank=2,
        world_size=4,
        local_rank=0,
        local_world_size=2,
        node_rank=1,
        nodes=nodes,
    )


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
    lines = JsonLines(tmp_path / "file.jsonl", json.dumps)
    value = 0.1 + 0.2
    lines.write({"train_loss": value})
    lines.close()
    assert json.loads((tmp_path / "file.jsonl").read_text()) == {"train_loss": value}


def test_what_is_not_finite_is_null(tmp_path: Path) -> None:
    begun = recorder.Recorder(tmp_path, a_world(), 1.0)
    step = StepRow(epoch=1, step=1, loss=math.nan, lr=math.inf, gradient_norm=1.0)
    begun.rows_done([step])
    begun.stop("because", "this")
    row = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[0])
    assert (row["train_loss"], row["lr"], row["gradient_norm"]) == (None, None, 1.0)


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


def lap(**seconds: float) -> list[float]:
    return [seconds.get(phase, 0.0) for phase in PHASES]


def laps(*told: list[float]) -> Laps:
    return array("d", itertools.chain(*told))


def test_times_do_not_wait_for_a_pace_through_many_evaluations(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])

    class Slow(Clock):
        def take(self) -> tuple[Laps, list[list[float]]]:
            return laps(lap(forward=0.1)), [lap(evaluation=60.0)]

    times = RankTimes(tmp_path, a_world(), 0.0)
    untold = Untold(Slow(), times, "cpu", int)
    for epoch in range(1, 6):
        now[0] += 60.1
        untold.add(1, 0.1 * epoch, 0.1 * epoch, (epoch, epoch))
        untold.tell(Listeners(), 1.25)
    times.close()
    rows = (tmp_path / "times/rank-2.jsonl").read_text().splitlines()[1:]
    lines = [json.loads(row) for row in rows]
    assert [line[1] for line in lines] == [1, 2, 3, 4, 5]
    ends = [line[0] for line in lines]
    assert max(b - a for a, b in itertools.pairwise(ends)) < 61


def test_the_steps_before_an_evaluation_do_not_end_after_those_behind_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    times = RankTimes(tmp_path, a_world(), 0.0)
    now[0] += 62.0  # half a second of steps, a minute, and 1.5 s of steps
    times.add(4, laps(*4 * [lap(forward=0.5)]), [lap(evaluation=60.0)])
    times.close()
    rows = (tmp_path / "times/rank-2.jsonl").read_text().splitlines()[1:]
    ((end, step, num_steps, *_),) = map(json.loads, rows)
    assert (step, num_steps) == (4, 4)
    assert end - times._wall_began == pytest.approx(62.0, abs=0.01)


def test_lines_that_wait_are_written_when_a_job_is_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mpitrain.record.lines.WRITE_SECONDS", 1000.0)
    record = recorder.Recorder(tmp_path, a_world(), 0.0)
    row = StepRow(epoch=1, step=1, loss=0.5, lr=0.1, gradient_norm=1.0)
    record.rows_done([row])
    record.hasten()
    record.wait(10.0)
    path = tmp_path / "metrics.jsonl"
    assert json.loads(path.read_text())["step"] == 1
    record.sync()  # as a checkpoint does that is about to get its name


def test_where_a_ranks_time_went_is_written_down(tmp_path: Path) -> None:
    times = RankTimes(tmp_path, a_world(), 2.5)
    times.add(1, laps(lap(data=0.25, forward=1.0)), [])
    times.clock = Clock()
    times.clock.between = [lap(evaluation=3.0)]
    times.close()
    first, *rows = map(
        json.loads, (tmp_path / "times/rank-2.jsonl").read_text().splitlines()
    )
    assert (first["rank"], first["hostname"], first["node_rank"]) == (2, "b", 1)
    assert first["start_seconds"] == 2.5
    assert first["phases"] == list(PHASES)
    assert sum(row[2] for row in rows) == 1
    assert max(row[3] for row in rows) == 1.25
    sums = [sum(column) for column in zip(*(row[4:] for row in rows), strict=True)]
    assert sums == lap(data=0.25, forward=1.0, evaluation=3.0)


@pytest.mark.parametrize("together", [1, 8, 500])
def test_short_steps_are_taken_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, together: int
) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    times = RankTimes(tmp_path, a_world(), 0.0)
    num_steps, told = 200_000, []
    for step in range(1, num_steps + 1):
        now[0] += 0.25
        told.append(lap(forward=0.25))
        if step % together == 0:
            times.add(step, laps(*told), [])
            told = []
    times.close()
    rows = [
        json.loads(line)
        for line in (tmp_path / "times/rank-2.jsonl").read_text().splitlines()[1:]
    ]
    assert sum(row[2] for row in rows) == num_steps
    assert sum(row[5] for row in rows) == 0.25 * num_steps
    seconds = 0.25 * num_steps
    assert len(rows) < seconds / 30 + 500 * math.log(seconds / 0.25)
    assert max(row[2] for row in rows) * 0.25 < 30.5
    ends = [row[0] for row in rows]
    assert ends == sorted(ends)


def test_a_line_of_several_epochs_ends_with_their_last_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    times = RankTimes(tmp_path, a_world(), 0.0)
    for step in (8, 16):  # of epochs of two short steps, and a long evaluation
        now[0] += 4 * (2 * 0.125 + 9.0)
        told = laps(*8 * [lap(forward=0.125)])
        times.add(step, told, 4 * [lap(evaluation=9.0)])
    times.close()
    rows = (tmp_path / "times/rank-2.jsonl").read_text().splitlines()[1:]
    lines = [json.loads(row) for row in rows]
    assert [(line[1], line[2], line[5], line[9]) for line in lines] == [
        (8, 8, 1.0, 36.0),
        (16, 8, 1.0, 36.0),
    ]
    assert lines[1][0] - lines[0][0] == pytest.approx(37.0)


def test_a_rank_that_is_ended_says_what_it_did(tmp_path: Path) -> None:
    times = RankTimes(tmp_path, a_world(), 0.0, done=6)
    times.clock = Clock()
    not_told = laps(lap(forward=0.25), lap(forward=0.5))
    times.clock.laps = not_told[:]
    times.clock.seconds = lap(data=1.0, backward=2.0)  # of the step under way
    times.clock._marks[:] = COMMUNICATION, time.perf_counter() - 5.0
    times.cut()
    times.cut()  # once more, by the watchdog
    times.add(8, not_told, [])  # by a thread that goes on
    rows = (tmp_path / "times/rank-2.jsonl").read_text().splitlines()
    lines = [json.loads(row) for row in rows[1:-1]]
    assert lines[-1][1] == 8
    assert sum(line[2] for line in lines) == 2
    sums = [sum(column) for column in zip(*(line[4:] for line in lines), strict=True)]
    assert sums == lap(data=1.0, forward=0.75, backward=2.0)
    end = json.loads(rows[-1])
    assert lines[-1][0] <= end["end"] - 4.9
    assert end["phase"] == PHASES[COMMUNICATION]
    assert 5.0 <= end["seconds"] < 6.0


def test_nothing_has_no_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    times = RankTimes(tmp_path, a_world(), 0.0)
    for _ in range(3):
        now[0] += 60.0  # an evaluation; then a checkpoint wants to know what is new
        times.add(1, laps(), [])
    now[0] += 60.0
    times.add(2, laps(lap(forward=1.0)), [lap(evaluation=240.0)])
    times.close()
    rows = (tmp_path / "times/rank-2.jsonl").read_text().splitlines()[1:]
    lines = [json.loads(row) for row in rows]
    assert [len(line) for line in lines] == [4 + len(PHASES)] * len(lines)
    assert sum(line[2] for line in lines) == 1
    sums = [sum(column) for column in zip(*(line[4:] for line in lines), strict=True)]
    assert sums == lap(forward=1.0, evaluation=240.0)


def test_a_line_that_cannot_be_made_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines = JsonLines[object](tmp_path / "file.jsonl", json.dumps)
    lines.write(1, object(), 2)
    lines.close()
    assert (tmp_path / "file.jsonl").read_text() == "1\n2\n"
    assert "left out <object object" in caplog.text


def test_times_of_a_second_job_follow_those_of_the_first(tmp_path: Path) -> None:
    for _ in range(2):
        times = RankTimes(tmp_path, a_world(), 0.0)
        times.add(1, laps(lap(forward=1.0)), [])
        times.close()
    rows = (tmp_path / "times/rank-2.jsonl").read_text().splitlines()
    assert [type(json.loads(row)) for row in rows] == [dict, list, dict, list]


def test_a_line_that_was_cut_ends_before_the_next(tmp_path: Path) -> None:
    path = tmp_path / "file.jsonl"
    path.write_text('{"a": 1}\n{"b": 2, "c')
    lines = JsonLines(path, json.dumps)
    lines.write({"d": 4})
    lines.close()
    assert path.read_text() == '{"a": 1}\n{"b": 2, "c\n{"d": 4}\n'


@pytest.fixture
def stuck(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """A disk that takes nothing until it is let go."""
    go = threading.Event()
    write = os.pwrite

    def pwrite(*words: Any) -> int:
        go.wait(60)
        return write(*words)

    monkeypatch.setattr(os, "pwrite", pwrite)
    yield go
    go.set()


def test_who_fails_does_not_wait_for_a_disk(
    tmp_path: Path, stuck: threading.Event
) -> None:
    times = RankTimes(tmp_path, a_world(), 0.0)
    times.add(1, laps(lap(forward=1.0)), [])
    began = time.monotonic()
    times.cut()
    assert time.monotonic() - began < 20
    assert not stuck.is_set()


def test_lines_that_wait_have_an_end(
    tmp_path: Path, stuck: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mpitrain.record import lines as module

    monkeypatch.setattr(module, "MOST_WAITING", 100)
    lines = JsonLines(tmp_path / "file.jsonl", json.dumps)
    for number in range(1000):
        lines.write([number])
    stuck.set()
    lines.close()
    written = (tmp_path / "file.jsonl").read_text().splitlines()
    kept = [json.loads(line)[0] for line in written]
    assert kept == list(range(len(kept)))
    assert 100 <= len(kept) <= 200


def test_a_run_that_was_killed_while_its_folder_was_made_can_begin(
    tmp_path: Path,
) -> None:
    """A child is killed at its first file operation, another at its second, ..."""
    script = """
import itertools, os, signal, sys
from pathlib import Path
from mpitrain.train.beginning import begin
from mpitrain.train.config import TrainConfig

def begin_and_die(config, at):
    moments = itertools.count()
    def hook(event, args):
        words = [os.fsdecode(it) for it in args if isinstance(it, (str, bytes, Path))]
        named = any(name in word for word in words for name in ("runs/", ".lock"))
        if (named or "fcntl" in event) and next(moments) == at:
            os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)
    begin(config)
    os._exit(0)

for at in itertools.count():
    flags = dict(name=f"x{at}", runs_dir=Path("runs"))
    child = os.fork()
    if not child:
        begin_and_die(TrainConfig(**flags), at)
    status = os.waitpid(child, 0)[1]
    if status == 0:
        break
    assert os.WTERMSIG(status) == signal.SIGKILL, status
    refuse = "never" if at % 2 and not Path(f"runs/x{at}/run.json").exists() else "auto"
    begun = begin(TrainConfig(**flags, resume=refuse))
    assert begun.run_dir.name == f"x{at}" and not begun.over, begun
    print(at, begun.is_new, flush=True)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    kinds = [line.split()[1] for line in done.stdout.splitlines()]
    assert kinds == ["True"] * kinds.count("True") + ["False"] * kinds.count("False")
    assert kinds.count("True") >= 4  # nothing, the folder, the lock, the logs
    assert kinds.count("False") >= 2  # run.json, the others


def test_a_folder_with_other_things_in_it_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "x" / "logs").mkdir(parents=True)
    (tmp_path / "x" / "logs" / "mine.txt").touch()
    with pytest.raises(UsageError, match=r"no run that could be gone on with"):
        open_run(tmp_path, "x", exists="go on")
