"""What a run has left is read while it is written, and whatever is wrong with it."""

from __future__ import annotations

import json
import math
import random
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mpitrain.checkpoint.manager import WriteResult
from mpitrain.errors import UsageError
from mpitrain.mpi.world import Node, World
from mpitrain.record.jsonl import JsonlReader
from mpitrain.record.rank_times import RankTimes
from mpitrain.record.reading import Metrics, RankFile, Run
from mpitrain.record.recorder import Recorder
from mpitrain.record.runs import open_run
from mpitrain.train.evaluate import Evaluation
from mpitrain.train.metrics import (
    COMMUNICATION,
    OTHER,
    PHASES,
    EpochMetrics,
    StepMetrics,
    Throughput,
    TrainState,
)
from mpitrain.train.timer import Timer


def a_world(rank: int = 0) -> World:
    nodes = (Node(hostname="a", ranks=(0, 1)), Node(hostname="b", ranks=(2, 3)))
    return World(
        rank=rank,
        world_size=4,
        local_rank=rank % 2,
        local_world_size=2,
        node_rank=rank // 2,
        nodes=nodes,
    )


def step_row(step: int, loss: float = 0.5) -> StepMetrics:
    return StepMetrics(epoch=1, step=step, loss=loss, lr=0.1, grad_norm=1.0)


def throughput(step: int) -> Throughput:
    return Throughput(
        epoch=1,
        step=step,
        num_steps=2,
        num_samples=16,
        seconds=2.0,
        data_seconds=0.5,
        compute_seconds=1.0,
        communication_seconds=0.25,
        wait_seconds=0.25,
        slowest_rank=3,
        slowest_steps=2,
        late_seconds=0.25,
    )


def epoch(step: int) -> EpochMetrics:
    return EpochMetrics(
        stage="train",
        epoch=1,
        step=step,
        train_loss=0.5,
        train_samples=16,
        values={"loss": 0.25, "accuracy": 0.75},
        val_samples=8,
        skipped_samples=0,
        skipped_steps=0,
        steps_seconds=1.0,
        epoch_seconds=2.0,
    )


TRAINER: Any = SimpleNamespace(
    callbacks=[],
    best_by=None,
    engine=SimpleNamespace(
        world=a_world(),
        plan=SimpleNamespace(total_steps=4, num_epochs=2, steps_per_epoch=2),
        strategy=SimpleNamespace(micro_batch_counts=[2, 1]),
    ),
    task=SimpleNamespace(inputs={}),
    state=TrainState(step=2),
    resumed_from="step-00000002",
    config=SimpleNamespace(global_batch_size=8),
)


def record(folder: Path) -> Recorder:
    open_run(folder.parent, folder.name, exists="resume")
    (folder / "run.json").write_text(
        '{"id": "x", "begun": "2026-11-22T10:00:00+00:00"}'
    )
    recorder = Recorder(folder, start_seconds=1.5, is_open=True)
    recorder.on_fit_start(TRAINER)
    return recorder


def test_all_that_a_recorder_writes_is_read(tmp_path: Path) -> None:
    recorder = record(tmp_path)
    recorder.on_metrics(TRAINER, [step_row(1), step_row(2, math.nan)])
    recorder.on_throughput(TRAINER, throughput(2))
    recorder.on_epoch_end(TRAINER, epoch(2))
    for error in ("", "the disk is full"):
        outcome = WriteResult(
            step=2, copy_seconds=0.125, write_seconds=0.5, error=error
        )
        recorder.on_checkpoint(TRAINER, outcome)
    recorder.on_test_end(TRAINER, Evaluation(values={"loss": 0.5}, num_samples=8), 0)
    recorder.on_fit_end(TRAINER)
    recorder.on_predict_end(TRAINER, [1, 2, 3], 3)
    run = Run(tmp_path)
    assert run.status == "finished"
    found = run.metrics
    assert [(it.data, it.predicted_samples) for it in found.predicted] == [("list", 3)]
    assert [it.step for it in found.steps] == [1, 2]
    assert found.steps[0].loss == 0.5
    assert math.isnan(found.steps[1].loss)
    (one,) = found.throughputs
    assert (one.samples_per_second, one.slowest_rank, one.gpu_bytes) == (8.0, 3, None)
    assert abs(one.time - time.time()) < 60
    (ended,) = found.epochs
    assert ended.values == {"loss": 0.25, "accuracy": 0.75}
    (began,) = found.began
    assert (began.num_nodes, began.total_steps) == (2, 4)
    assert [it.step for it in found.resumed] == [2]
    assert [it.error for it in run.checkpoints] == ["", "the disk is full"]
    assert found.balance == (2, [2, 1])
    assert found.test == {"loss": 0.5}
    assert run.status == "finished"


def test_a_ranks_times_are_read_job_by_job(tmp_path: Path) -> None:
    for is_cut in (False, True):
        times, timer = RankTimes(tmp_path, 2.5), Timer()
        times.open(a_world(3), timer, 6)
        timer.pending.steps.extend(0.25 * it for it in range(1, 1 + len(PHASES)))
        if is_cut:
            timer.phase, timer.since = COMMUNICATION, time.perf_counter() - 5
            times.cut()
        else:
            timer.since = time.perf_counter()
            times.on_fit_end(SimpleNamespace(timer=timer))
    file = RankFile(tmp_path / "times/rank-3.jsonl")
    file.update()
    first, second = file.jobs
    assert (first.rank, first.hostname, first.node_rank) == (3, "b", 1)
    assert (first.start_seconds, first.cut) == (2.5, None)
    assert first.last_step == 7
    assert list(first.lines[2:]) == [0.25 * (1 + i) for i in range(len(PHASES))]
    assert second.cut is not None
    assert second.cut.phase == COMMUNICATION
    assert 5 <= second.cut.seconds < 6
    assert second.ended == pytest.approx(second.cut.time, abs=0.001)


def test_phases_of_another_version_find_their_place(tmp_path: Path) -> None:
    header = {
        "rank": 0,
        "world_size": 1,
        "node_rank": 0,
        "hostname": "a",
        "time": 10.0,
        "start_seconds": 1.0,
        "phases": ["forward", "napping", "data"],
    }
    bad = [[12.0, 1], ["x", 2, 1, 1.0, 0.5, 0.25, 0.125], [13.0, 2.5, 1, 1, 1, 1, 1]]
    rows = [header, [11.0, 1, 1, 1.0, 0.5, 0.25, 0.125], *bad]
    path = tmp_path / "rank-0.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    file = RankFile(path)
    file.update()
    (job,) = file.jobs
    end, step, *seconds = job.lines  # lines that are wrong are left out as a whole
    assert (end, step) == (11.0, 1)
    found = {PHASES[i]: it for i, it in enumerate(seconds) if it}
    assert found == {"forward": 0.5, "data": 0.125, PHASES[OTHER]: 0.25}


class Lines(JsonlReader):
    def _clear(self) -> None:
        self.rows: list[Any] = []

    def _add(self, row: Any) -> None:
        self.rows.append(row)


def test_a_half_line_waits_for_its_end(tmp_path: Path) -> None:
    path = tmp_path / "f"
    file = Lines(path)
    assert not file.update()
    assert file.rows == []
    whole = b'{"a": 1}\n{"b": 2}\n'
    for end in range(len(whole) + 1):
        path.write_bytes(whole[:end])
        assert not file.update()
        assert file.rows == [{"a": 1}, {"b": 2}][: end // 9]


def test_what_a_training_that_goes_on_drops_is_forgotten(tmp_path: Path) -> None:
    recorder = record(tmp_path)
    recorder.on_metrics(TRAINER, [step_row(step) for step in range(1, 4)])
    before = recorder.state_dict()
    recorder.on_metrics(TRAINER, [step_row(step, 9.0) for step in range(4, 7)])
    recorder.on_stop(TRAINER, "because")
    metrics = Metrics(tmp_path / "metrics.jsonl")
    assert not metrics.update()
    assert [it.step for it in metrics.steps] == [1, 2, 3, 4, 5, 6]
    recorder = Recorder(tmp_path, is_open=True)
    recorder.load_state_dict(before)
    recorder.on_fit_start(TRAINER)
    recorder.on_metrics(TRAINER, [step_row(step, 7.0) for step in range(4, 12)])
    recorder.on_stop(TRAINER, "because")
    assert metrics.update()
    assert [it.step for it in metrics.steps] == list(range(1, 12))
    assert [it.loss for it in metrics.steps] == [0.5] * 3 + [7.0] * 8
    assert not metrics.update()


def test_reading_now_and_then_finds_what_reading_once_finds(tmp_path: Path) -> None:
    numbers = random.Random(5)
    lines = [
        json.dumps({"event": "step", "epoch": 1, "step": step, "train_loss": 1 / step,
                    "lr": 0.1, "gradient_norm": None})
        for step in range(1, 400)
    ]  # fmt: skip
    words = ("]", "{", "", "nul", "[1, 2]", "7", '"a"', "\x00\x00", "\xff{}", "1,2")
    rows = ('{"event": "step"}', '{"event": "throughput", "time": "x"}')
    for garbage in (*words, *rows):
        lines.insert(numbers.randrange(len(lines)), garbage)
    text = "\n".join(lines).encode("latin-1") + b"\n"
    path = tmp_path / "metrics.jsonl"
    metrics = Metrics(path)
    end = 0
    while end < len(text):
        end += numbers.randrange(2000)
        path.write_bytes(text[:end])
        metrics.update()
    at_once = Metrics(path)
    at_once.update()
    assert [it.step for it in metrics.steps] == list(range(1, 400))
    assert metrics.steps == at_once.steps
    assert not metrics.throughputs


def test_a_checkpoint_that_nobody_tells_of_is_found_in_its_folder(
    tmp_path: Path,
) -> None:
    recorder = record(tmp_path)
    outcome = WriteResult(step=8, copy_seconds=0.125, write_seconds=0.5)
    recorder.on_checkpoint(TRAINER, outcome)
    recorder.on_stop(TRAINER, "because")
    for name in ("step-00000004-epoch-2", "step-00000008", "step-00000012.broken"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    (tmp_path / "checkpoints/step-00000004-epoch-2/SHA256SUMS").write_text("")
    found = Run(tmp_path).checkpoints
    assert [it.step for it in found] == [4, 8]
    assert all(it.time is not None for it in found)


@pytest.mark.parametrize("text", ["", "{", "[]", "\x00", "- a\n- b\n", "a: [\n"])
def test_files_that_hold_something_else_are_as_if_empty(
    tmp_path: Path, text: str
) -> None:
    for name in ("config.yaml", "run.json", "result.json", "environment.json"):
        (tmp_path / name).write_text(text)
    run = Run(tmp_path)
    assert (run.config, run.environment, run.result) == ({}, {}, {})


def test_another_folder_is_refused(tmp_path: Path) -> None:
    for path in (tmp_path, tmp_path / "nothing"):
        with pytest.raises(UsageError, match="is not a run folder"):
            Run(path)


def test_a_hundred_thousand_steps_are_read_in_a_second(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with path.open("w") as file:
        for first in range(0, 100_000, 10_000):
            file.write(
                "".join(
                    f'{{"event": "step", "epoch": 1, "step": {step}, "train_loss": '
                    f"{1 / (step + 1)}, "
                    '"lr": 0.0043478, "gradient_norm": 0.147194}\n'
                    for step in range(first, first + 10_000)
                )
            )
    metrics = Metrics(path)
    began = time.process_time()
    metrics.update()
    assert len(metrics.steps) == 100_000
    assert time.process_time() - began < 3  # 0.4 s
    began = time.process_time()
    metrics.update()
    assert time.process_time() - began < 0.1
