"""What a run leaves behind, and what it says."""

from __future__ import annotations

import dataclasses
import errno
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
from types import SimpleNamespace
from typing import Any

import pytest

from mpitrain import files
from mpitrain.errors import UsageError
from mpitrain.mpi.world import Node, World
from mpitrain.record import recorder, run_dir
from mpitrain.record.background import BackgroundWriter
from mpitrain.record.environment import VARIABLES
from mpitrain.record.jsonl import JsonlWriter
from mpitrain.record.rank_times import RankTimes
from mpitrain.record.result import record_failure, update_result
from mpitrain.record.runs import open_run
from mpitrain.train.evaluate import Evaluation
from mpitrain.train.metrics import COMMUNICATION, PHASES, StepMetrics, TrainState
from mpitrain.train.timer import StepSeconds, StepTimes, Timer


def a_world() -> World:
    nodes = (Node(hostname="a", ranks=(0, 1)), Node(hostname="b", ranks=(2, 3)))
    return World(
        rank=2, world_size=4, local_rank=0, local_world_size=2, node_rank=1, nodes=nodes
    )


def test_the_log_begins_with_whose_it_is(tmp_path: Path) -> None:
    with run_dir.open_log(tmp_path, 3, 16, "gpu03") as log:
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
            log = run_dir.open_log(tmp_path, rank, 2, "host")
            log_file = run_dir.start_logging(log, is_rank_zero=rank == 0)
            logger.info("told the file")
            logger.warning("from rank %d", rank)
            log_file.close()
            written = (tmp_path / f"logs/rank-{rank}.log").read_text()
            assert "INFO told the file" in written
            assert f"WARNING from rank {rank}" in written
        assert capsys.readouterr().err == "warning: from rank 0\n"
    finally:
        logger.handlers.clear()
        logger.propagate = True


def test_doubles_are_written_whole(tmp_path: Path) -> None:
    lines = JsonlWriter(tmp_path / "file.jsonl")
    value = 0.1 + 0.2
    lines.write({"train_loss": value})
    lines.close()
    assert json.loads((tmp_path / "file.jsonl").read_text()) == {"train_loss": value}


def trainer_of(world: World) -> Any:
    """What a recorder asks of a trainer."""
    plan = SimpleNamespace(total_steps=4, num_epochs=2, steps_per_epoch=2)
    return SimpleNamespace(
        engine=SimpleNamespace(
            world=world, plan=plan, strategy=SimpleNamespace(micro_batch_counts=[])
        ),
        task=SimpleNamespace(inputs={}),
        state=TrainState(),
        config=SimpleNamespace(global_batch_size=64),
        best_by=None,
    )


def record_of(
    tmp_path: Path, *, is_open: bool = False
) -> tuple[recorder.Recorder, Any]:
    record = recorder.Recorder(tmp_path, is_open=is_open)
    trainer = trainer_of(dataclasses.replace(a_world(), rank=0))
    record.on_fit_start(trainer)
    return record, trainer


def times_of(tmp_path: Path, start_seconds: float = 0.0, step: int = 0) -> RankTimes:
    times = RankTimes(tmp_path, start_seconds)
    times.open(a_world(), Timer(), step)
    return times


def close(times: RankTimes) -> None:
    times.on_fit_end(SimpleNamespace(timer=times._timer))


def test_what_is_not_finite_is_null(tmp_path: Path) -> None:
    begun, trainer = record_of(tmp_path)
    step = StepMetrics(epoch=1, step=1, loss=math.nan, lr=math.inf, grad_norm=1.0)
    begun.on_metrics(trainer, [step])
    begun.on_stop(trainer, "because")
    row = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[1])
    assert (row["train_loss"], row["lr"], row["gradient_norm"]) == (None, None, 1.0)


def test_learning_rates_of_groups_stand_beside_the_first(tmp_path: Path) -> None:
    begun, trainer = record_of(tmp_path)
    rates = (0.1, 0.01, math.inf)
    begun.on_metrics(trainer, [StepMetrics(1, 1, 0.5, 0.1, 1.0, rates)])
    begun.on_metrics(trainer, [StepMetrics(1, 2, 0.5, 0.1, 1.0)])
    begun.on_stop(trainer, "because")
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()[1:3]
    differing, equal = map(json.loads, lines)
    assert (differing["lr"], differing["lr_groups"]) == (0.1, [0.1, 0.01, None])
    assert equal["lr"] == 0.1
    assert "lr_groups" not in equal


def test_a_result_that_is_not_finite_is_json_still(tmp_path: Path) -> None:
    files.write_json(tmp_path / "result.json", {"val_loss": float("nan")})
    assert json.loads((tmp_path / "result.json").read_text()) == {"val_loss": None}


def events_of(folder: Path) -> list[str]:
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line)["event"] for line in lines]


def test_a_recorder_alone_refuses_the_folder_of_another_run(tmp_path: Path) -> None:
    begun, trainer = record_of(tmp_path)
    step = StepMetrics(epoch=1, step=1, loss=0.5, lr=0.1, grad_norm=1.0)
    begun.on_metrics(trainer, [step])
    begun.on_stop(trainer, "because")
    before = (tmp_path / "metrics.jsonl").read_text()
    with pytest.raises(UsageError, match=r"exists. Expected a new one"):
        record_of(tmp_path)
    assert (tmp_path / "metrics.jsonl").read_text() == before


def test_a_recorder_continues_in_a_folder_that_its_job_has_opened(
    tmp_path: Path,
) -> None:
    (tmp_path / "run.json").write_text('{"id": "x"}')
    (tmp_path / "metrics.jsonl").write_text('{"event": "after no checkpoint"}\n')
    open_run(tmp_path.parent, tmp_path.name, exists="resume")
    begun, trainer = record_of(tmp_path, is_open=True)
    begun.on_stop(trainer, "because")
    assert events_of(tmp_path) == ["begin"]


def test_a_test_and_a_second_fit_after_the_end_are_recorded(tmp_path: Path) -> None:
    record, trainer = record_of(tmp_path)
    record.on_stop(trainer, "because")
    found = Evaluation(values={"loss": 0.25}, num_samples=8)
    record.on_test_end(trainer, found, 1)
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["status"], result["test_loss"]) == ("stopped", 0.25)
    assert result["skipped_samples"] == 1
    assert result["stopped"] == "stopped at step 0: because"
    record.on_fit_start(trainer)
    trainer.callbacks = [record]
    record.on_fit_end(trainer)
    result = json.loads((tmp_path / "result.json").read_text())
    assert result["status"] == "finished"
    assert "stopped" not in result
    assert events_of(tmp_path) == ["begin", "test", "begin"]


def test_a_failure_is_recorded_over_what_is_there(tmp_path: Path) -> None:
    files.write_json(tmp_path / "result.json", {"status": "running", "x": 1})
    record_failure(tmp_path, "rank 2 fell")
    assert json.loads((tmp_path / "result.json").read_text()) == {
        "status": "failed",
        "x": 1,
        "error": "rank 2 fell",
    }
    update_result(tmp_path, status="finished")
    assert json.loads((tmp_path / "result.json").read_text()) == {
        "status": "finished",
        "x": 1,
    }


def test_a_record_without_its_last_lines_is_a_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "f.jsonl").write_text('{"step": 1}\n')
    JsonlWriter(tmp_path / "f.jsonl", keep_bytes=12).close()
    assert not caplog.messages
    JsonlWriter(tmp_path / "f.jsonl", keep_bytes=24).close()
    assert "lacks lines: found 12 bytes, expected 24" in caplog.text


def test_a_file_is_replaced_whole(tmp_path: Path) -> None:
    files.write_atomic(tmp_path / "f", "old")
    files.write_atomic(tmp_path / "f", "new")
    assert [p.name for p in tmp_path.iterdir()] == ["f"]
    assert (tmp_path / "f").read_text() == "new"


@pytest.mark.parametrize("word", ["KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIAL"])
def test_no_recorded_variable_sounds_like_a_secret(word: str) -> None:
    assert not [name for name in VARIABLES if word in name.upper()]


def seconds_of(**seconds: float) -> list[float]:
    return [seconds.get(phase, 0.0) for phase in PHASES]


def steps_of(*told: list[float]) -> StepSeconds:
    return array("d", itertools.chain(*told))


def test_lines_that_wait_are_written_when_a_job_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mpitrain.record.background.RETRY_SECONDS", 1000.0)
    record, trainer = record_of(tmp_path)
    row = StepMetrics(epoch=1, step=1, loss=0.5, lr=0.1, grad_norm=1.0)
    record.on_metrics(trainer, [row])
    record.on_exception(trainer, KeyError())
    path = tmp_path / "metrics.jsonl"
    assert json.loads(path.read_text().splitlines()[-1])["step"] == 1
    record.flush()  # as a checkpoint does that is about to be completed


def test_where_a_ranks_time_went_is_written_down(tmp_path: Path) -> None:
    times = times_of(tmp_path, 2.5)
    times.add(1, StepTimes(steps_of(seconds_of(data=0.25, forward=1.0)), []))
    times._timer.pending.between.append(seconds_of(evaluation=3.0))
    close(times)
    first, *rows = map(
        json.loads, (tmp_path / "times/rank-2.jsonl").read_text().splitlines()
    )
    assert (first["rank"], first["hostname"], first["node_rank"]) == (2, "b", 1)
    assert first["start_seconds"] == 2.5
    assert first["phases"] == list(PHASES)
    assert sum(row[2] for row in rows) == 1
    assert max(row[3] for row in rows) == 1.25
    sums = [sum(column) for column in zip(*(row[4:] for row in rows), strict=True)]
    assert sums[:-1] == seconds_of(data=0.25, forward=1.0, evaluation=3.0)[:-1]


@pytest.mark.parametrize("together", [1, 8, 500])
def test_short_steps_are_taken_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, together: int
) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "perf_counter", lambda: now[0])
    times = times_of(tmp_path, 0.0)
    num_steps, told = 200_000, []
    for step in range(1, num_steps + 1):
        now[0] += 0.25
        told.append(seconds_of(forward=0.25))
        if step % together == 0:
            times._timer.since = now[0]
            times.add(step, StepTimes(steps_of(*told), []))
            told = []
    close(times)
    rows = [
        json.loads(line)
        for line in (tmp_path / "times/rank-2.jsonl").read_text().splitlines()[1:]
    ]
    assert sum(row[2] for row in rows) == num_steps
    assert sum(row[5] for row in rows) == 0.25 * num_steps
    seconds = 0.25 * num_steps
    assert len(rows) < seconds / 30 + 500 * math.log(seconds / 0.25)
    assert max(row[2] for row in rows) * 0.25 < 30.5 + 0.25 * together
    ends = [row[0] for row in rows]
    assert ends == sorted(ends)


def test_a_rank_that_is_ended_says_what_it_did(tmp_path: Path) -> None:
    times = times_of(tmp_path, 0.0, 6)
    timer = times._timer
    not_told = steps_of(seconds_of(forward=0.25), seconds_of(forward=0.5))
    timer.pending.steps.extend(not_told)
    timer.seconds = seconds_of(data=1.0, backward=2.0)  # of the unfinished step
    timer.phase, timer.since = COMMUNICATION, time.perf_counter() - 5.0
    times.cut()
    times.cut()  # once more, by the watchdog
    times.add(8, StepTimes(not_told, []))  # by a thread that goes on
    rows = (tmp_path / "times/rank-2.jsonl").read_text().splitlines()
    lines = [json.loads(row) for row in rows[1:-1]]
    assert lines[-1][1] == 8
    assert sum(line[2] for line in lines) == 2
    sums = [sum(column) for column in zip(*(line[4:] for line in lines), strict=True)]
    assert sums == seconds_of(data=1.0, forward=0.75, backward=2.0)
    end = json.loads(rows[-1])
    assert lines[-1][0] <= end["end"] - 4.9
    assert end["phase"] == PHASES[COMMUNICATION]
    assert 5.0 <= end["seconds"] < 6.0


def test_a_line_that_cannot_be_made_is_left_out(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    lines = JsonlWriter(tmp_path / "file.jsonl")
    lines.write(1, object(), 2)
    lines.close()
    assert (tmp_path / "file.jsonl").read_text() == "1\n2\n"
    assert "left out <object object" in caplog.text


def test_times_of_a_second_job_follow_those_of_the_first(tmp_path: Path) -> None:
    for _ in range(2):
        times = times_of(tmp_path, 0.0)
        times.add(1, StepTimes(steps_of(seconds_of(forward=1.0)), []))
        close(times)
    rows = (tmp_path / "times/rank-2.jsonl").read_text().splitlines()
    assert [type(json.loads(row)) for row in rows] == [dict, list, dict, list]


def test_a_line_that_was_cut_ends_before_the_next(tmp_path: Path) -> None:
    path = tmp_path / "file.jsonl"
    path.write_text('{"a": 1}\n{"b": 2, "c')
    lines = JsonlWriter(path)
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
    times = times_of(tmp_path, 0.0)
    times.add(1, StepTimes(steps_of(seconds_of(forward=1.0)), []))
    began = time.monotonic()
    times.cut()
    assert time.monotonic() - began < 20
    assert not stuck.is_set()


def test_lines_that_wait_have_an_end(
    tmp_path: Path, stuck: threading.Event, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mpitrain.record import jsonl as module

    monkeypatch.setattr(module, "MAX_WAITING", 100)
    lines = JsonlWriter(tmp_path / "file.jsonl")
    for number in range(1000):
        lines.write([number])
    stuck.set()
    lines.close()
    written = (tmp_path / "file.jsonl").read_text().splitlines()
    kept = [json.loads(line)[0] for line in written]
    assert kept == list(range(len(kept)))
    assert 100 <= len(kept) <= 200


def test_what_a_full_disk_refuses_is_written_once_it_has_room(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Also where it takes a part of it."""
    monkeypatch.setattr("mpitrain.record.background.RETRY_SECONDS", 0.01)
    room, disk = 5, b""

    def write(data: bytes) -> int:
        nonlocal disk
        if room <= len(disk):
            raise OSError(errno.ENOSPC, "No space left on device")
        some = data[: room - len(disk)]
        disk += some
        return len(some)

    writer = BackgroundWriter("disk", write, max_items=3)
    writer.start()
    taken = [writer.put(it) for it in (b"one\n", b"two\n", b"three\n")]
    error = writer.flush(10)
    assert error is not None
    assert error.errno == errno.ENOSPC
    taken += [writer.put(it) for it in (b"four\n", b"five\n")]
    room = 100
    assert writer.flush(10) is None
    assert disk == b"".join(
        it
        for it, is_in in zip(
            (b"one\n", b"two\n", b"three\n", b"four\n", b"five\n"), taken, strict=True
        )
        if is_in
    )
    assert writer.num_dropped == taken.count(False) >= 1
    assert writer.num_waiting == 0
    writer.close()


def test_a_run_that_was_killed_while_its_folder_was_made_can_begin(
    tmp_path: Path,
) -> None:
    """A child is killed at its first file operation, another at its second, ..."""
    script = """
import itertools, os, signal, sys
from pathlib import Path
from mpitrain.tools.train.prepare import prepare
from mpitrain.config import TrainConfig

def begin_and_die(config, at):
    moments = itertools.count()
    def hook(event, args):
        words = [os.fsdecode(it) for it in args if isinstance(it, (str, bytes, Path))]
        named = any(name in word for word in words for name in ("runs/", ".lock"))
        if (named or "fcntl" in event) and next(moments) == at:
            os.kill(os.getpid(), signal.SIGKILL)
    sys.addaudithook(hook)
    prepare(config)
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
    is_new = not Path(f"runs/x{at}/run.json").exists()
    refuse = "never" if at % 2 and is_new else "auto"
    run = prepare(TrainConfig(**flags, resume=refuse))
    assert run.run_dir.name == f"x{at}" and not run.done, run
    print(at, is_new, flush=True)
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
    with pytest.raises(UsageError, match=r"not a run that can be resumed"):
        open_run(tmp_path, "x", exists="resume")


def test_a_rank_may_write_its_times_before_rank_zero_opens_the_run(
    tmp_path: Path,
) -> None:
    (tmp_path / "x" / "times").mkdir(parents=True)
    assert open_run(tmp_path, "x", exists="refuse").run_id


def test_a_script_records_the_time_from_the_start_of_its_process(
    tmp_path: Path,
) -> None:
    record_of(tmp_path)
    assert json.loads((tmp_path / "result.json").read_text())["start_seconds"] > 0.1
