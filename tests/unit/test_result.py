"""``result.json`` of a run that was stopped, or failed, counts until its end."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mpitrain.mpi.world import Node, World
from mpitrain.record.recorder import Recorder
from mpitrain.record.result import record_failure
from mpitrain.train.evaluate import Evaluation
from mpitrain.train.metrics import StepMetrics, Throughput, TrainState

WORLD = World(
    rank=0,
    world_size=1,
    local_rank=0,
    local_world_size=1,
    node_rank=0,
    nodes=(Node(hostname="a", ranks=(0,)),),
)


def trainer() -> Any:
    plan = SimpleNamespace(total_steps=30, num_epochs=3, steps_per_epoch=10)
    strategy = SimpleNamespace(micro_batch_counts=[])
    return SimpleNamespace(
        engine=SimpleNamespace(world=WORLD, plan=plan, strategy=strategy),
        task=SimpleNamespace(inputs={}),
        state=TrainState(),
        config=SimpleNamespace(global_batch_size=8),
        best_by=None,
        resumed_from="",
    )


def train(recorder: Recorder, trainer: Any, num_steps: int) -> None:
    """Do steps of a second each, of ten an epoch, of which every fifth is skipped."""
    state = trainer.state
    for step in range(state.step + 1, num_steps + 1):
        state.step, state.steps_seconds = step, state.steps_seconds + 1.0
        state.skipped_steps += step % 5 == 0
        rows = [StepMetrics(state.epoch, step, 1.0, 0.1, 1.0)]
        recorder.on_metrics(trainer, rows)
        recorder.on_throughput(trainer, throughput(state.epoch, step))
        if step % 10 == 0:
            state.metrics = {"loss": 1 / step}
            epoch = state.epoch_metrics("train", is_end=True)
            state.begin_next_epoch()
            recorder.on_epoch_end(trainer, epoch)


def throughput(epoch: int, step: int) -> Throughput:
    return Throughput(
        epoch=epoch,
        step=step,
        num_steps=1,
        num_samples=8,
        seconds=1.0,
        data_seconds=0.0,
        compute_seconds=1.0,
        communication_seconds=0.0,
        wait_seconds=0.0,
        slowest_rank=-1,
        slowest_steps=0,
        late_seconds=0.0,
    )


def counts(run_dir: Path) -> tuple[Any, ...]:
    result = json.loads((run_dir / "result.json").read_text())
    names = ("steps", "epochs", "train_seconds", "skipped_steps", "val_loss")
    return tuple(result.get(name) for name in names)


def test_a_stop_within_an_epoch_counts_its_steps_once(tmp_path: Path) -> None:
    of_trainer, recorder = trainer(), Recorder(tmp_path, is_open=True)
    recorder.on_fit_start(of_trainer)
    train(recorder, of_trainer, 15)
    before = recorder.state_dict()
    recorder.on_stop(of_trainer, "the time limit is near")
    assert counts(tmp_path) == (15, 1, 15.0, 3, 0.1)
    recorder.on_test_end(of_trainer, Evaluation(values={}, num_samples=8), 0)
    assert counts(tmp_path) == (15, 1, 15.0, 3, 0.1)
    # The epoch that a resumed job ends has its steps before the stop, too.
    recorder = Recorder(tmp_path, is_open=True)
    recorder.load_state_dict(before)
    recorder.on_fit_start(of_trainer)
    train(recorder, of_trainer, 20)
    recorder.on_stop(of_trainer, "once more")
    assert counts(tmp_path) == (20, 2, 20.0, 4, 0.05)


@pytest.mark.parametrize("is_rank_zero", [True, False])
def test_a_failure_counts_what_was_recorded(tmp_path: Path, is_rank_zero: bool) -> None:
    of_trainer, recorder = trainer(), Recorder(tmp_path, is_open=True)
    recorder.on_fit_start(of_trainer)
    train(recorder, of_trainer, 25)
    recorder.flush()
    if is_rank_zero:
        recorder.on_exception(of_trainer, RuntimeError("boom"))
    else:  # another rank writes it, and ends rank zero
        record_failure(tmp_path, "boom")
    # Of the epoch under way the seconds of its steps are known.
    assert counts(tmp_path) == (25, 2, 25.0, 4, 0.05)


def test_a_failure_keeps_the_seconds_of_a_custom_loop(tmp_path: Path) -> None:
    result = {"status": "running", "train_seconds": 60.0, "val_score": 1.0}
    (tmp_path / "result.json").write_text(json.dumps(result))
    rows = [
        {"event": "begin", "total_steps": None, "num_epochs": None},
        {"event": "epoch", "epoch": 1, "step": 3, "val_score": 2.0, "val_samples": 0},
    ]
    text = "".join(f"{json.dumps(row)}\n" for row in rows)
    (tmp_path / "metrics.jsonl").write_text(text)
    record_failure(tmp_path, "boom")
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["train_seconds"], result["val_score"]) == (60.0, 2.0)
    assert (result["steps"], result["epochs"]) == (3, 1)


def test_a_failure_is_recorded_before_its_counts_are_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """To read a long record takes longer than the end of a job waits for it."""
    of_trainer, recorder = trainer(), Recorder(tmp_path, is_open=True)
    recorder.on_fit_start(of_trainer)
    train(recorder, of_trainer, 25)
    recorder.flush()

    def abandoned(_: Path) -> None:
        raise TimeoutError

    monkeypatch.setattr("mpitrain.record.result._counts_of", abandoned)
    with pytest.raises(TimeoutError):
        record_failure(tmp_path, "boom")
    result = json.loads((tmp_path / "result.json").read_text())
    assert (result["status"], result["error"]) == ("failed", "boom")
    assert counts(tmp_path)[:2] == (25, 2)


@pytest.mark.parametrize("status", [75, 1])
def test_the_end_of_a_stopped_job_keeps_the_counts_of_the_stop(
    tmp_path: Path, status: int
) -> None:
    """Those of the epoch under way are in memory, not in the record."""
    of_trainer, recorder = trainer(), Recorder(tmp_path, is_open=True)
    recorder.on_fit_start(of_trainer)
    train(recorder, of_trainer, 15)
    recorder.on_stop(of_trainer, "the time limit is near")
    before = json.loads((tmp_path / "result.json").read_text())
    # The record of a disk that was full, say.
    (tmp_path / "metrics.jsonl").write_text(
        '{"event": "step", "epoch": 1, "step": 4}\n'
    )
    record_failure(tmp_path, "Stopped: the script's words", status)
    after = json.loads((tmp_path / "result.json").read_text())
    if status == 1:
        del before["stopped"]
        before |= {"status": "failed", "error": "Stopped: the script's words"}
    assert after == before
