"""Loggers write what they are told, and hold nobody up, whatever happens to them."""

from __future__ import annotations

import csv
import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mpitrain.cli import read_config
from mpitrain.errors import UsageError
from mpitrain.record.config import LogConfig
from mpitrain.record.loggers import Logger, RunFacts, feeding
from mpitrain.record.loggers.choice import open_loggers, refuse_missing
from mpitrain.record.loggers.csv_file import CsvFile
from mpitrain.record.loggers.feeding import Fed
from mpitrain.record.loggers.telling import Loggers
from mpitrain.train.config import TrainConfig
from mpitrain.train.metrics import EpochMetrics, StepMetrics, Throughput

sys.path.insert(0, str(Path(__file__).parents[1] / "jobs"))
import logged


@pytest.fixture
def facts(tmp_path: Path) -> Callable[..., RunFacts]:
    def make(step: int = 0, **more: Any) -> RunFacts:
        given = {
            "run_dir": tmp_path,
            "run_name": "mine",
            "run_id": "0123",
            "config": {"lr": 0.1, "log": ["csv"]},
            "rank": 0,
            "world_size": 2,
            "step": step,
            "say": lambda line: None,
        }
        return RunFacts(**{**given, **more})

    return make


@pytest.fixture
def warnings_of() -> Iterator[list[str]]:
    """Our warnings, as they come."""
    heard: list[str] = []

    class Hearing(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.WARNING:
                heard.append(record.getMessage())

    handler = Hearing()
    logging.getLogger("mpitrain").addHandler(handler)
    yield heard
    logging.getLogger("mpitrain").removeHandler(handler)


def quiet(_: str) -> None:
    """Progress that nobody hears."""


def row(step: int) -> StepMetrics:
    return StepMetrics(epoch=1, step=step, loss=0.1 / step, lr=0.01, grad_norm=2.0)


EPOCH = EpochMetrics(
    stage="train",
    epoch=1,
    step=3,
    train_loss=0.7,
    train_samples=30,
    values={"loss": 0.5, "accuracy": 0.25},
    val_samples=10,
    skipped_samples=0,
    skipped_steps=0,
    steps_seconds=1.0,
    epoch_seconds=1.5,
)

PACE = Throughput(
    epoch=1,
    step=3,
    num_steps=2,
    num_samples=20,
    seconds=4.0,
    data_seconds=1.0,
    compute_seconds=2.0,
    communication_seconds=0.5,
    wait_seconds=0.25,
    slowest_rank=1,
    slowest_steps=2,
    late_seconds=0.125,
    gpu_bytes=1 << 30,
)


def run_through(loggers: Loggers, status: Any = "finished") -> None:
    """A training of three steps."""
    loggers.start()
    images = np.arange(2 * 8 * 8, dtype=np.uint8).reshape(2, 8, 8, 1)
    loggers.images("train/images", images)
    loggers.rows_done([row(1), row(2), row(3)])
    loggers.pace_done(PACE)
    loggers.epoch_done(EPOCH)
    loggers.test_done({"accuracy": 0.75})
    loggers.finish(status, quiet)


EXPECTED: logged.Points = {
    "train/loss": [(1, 0.1), (2, 0.05), (3, 0.1 / 3)],
    "train/lr": [(1, 0.01), (2, 0.01), (3, 0.01)],
    "train/gradient_norm": [(1, 2.0), (2, 2.0), (3, 2.0)],
    "pace/samples_per_second": [(3, 5.0)],
    "pace/step_seconds": [(3, 2.0)],
    "pace/data_seconds": [(3, 0.5)],
    "pace/compute_seconds": [(3, 1.0)],
    "pace/communication_seconds": [(3, 0.25)],
    "pace/wait_seconds": [(3, 0.125)],
    "pace/late_seconds": [(3, 0.0625)],
    "gpu/memory_bytes": [(3, 1 << 30)],
    "train/epoch": [(3, 1)],
    "train/epoch_loss": [(3, 0.7)],
    "train/epoch_seconds": [(3, 1.5)],
    "val/loss": [(3, 0.5)],
    "val/accuracy": [(3, 0.25)],
    "test/accuracy": [(3, 0.75)],
}


def as_floats(points: logged.Points) -> logged.Points:
    """In the precision of TensorBoard's files."""
    return {
        name: [(step, float(np.float32(value))) for step, value in of]
        for name, of in points.items()
    }


# --- each one, read back ------------------------------------------------------------


def test_a_csv_file_has_all_numbers_whole(facts: Any, tmp_path: Path) -> None:
    run_through(open_loggers(LogConfig(log=("csv",), log_every_steps=1), facts()))
    assert logged.from_csv(tmp_path) == EXPECTED


def test_tensorboards_own_reader_has_all(facts: Any, tmp_path: Path) -> None:
    config = LogConfig(log=("tensorboard",), log_every_steps=1)
    run_through(open_loggers(config, facts()))
    assert logged.from_tensorboard(tmp_path) == as_floats(EXPECTED)
    events = logged.accumulator(tmp_path)
    (image,) = events.Images("train/images")
    assert (image.step, image.width, image.height) == (0, 16, 8)
    text = events.Tensors("config/text_summary")[0].tensor_proto.string_val[0]
    assert b"lr: 0.1" in text


def test_wandbs_offline_file_has_all(
    facts: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setenv("WANDB_MODE", "offline")
    config = LogConfig(
        log=("wandb",), log_every_steps=1, wandb_project="p", wandb_tags=("a", "b")
    )
    run_through(open_loggers(config, facts(say=said.append)), "stopped")
    (file,) = logged.wandb_files(tmp_path)
    assert logged.from_wandb(file) == EXPECTED
    records = {it.WhichOneof("record_type"): it for it in logged.wandb_records(file)}
    run = records["run"].run
    assert (run.run_id, run.display_name, run.project) == ("0123", "mine", "p")
    assert list(run.tags) == ["a", "b"]
    assert '"lr"' not in run.run_id
    assert records["exit"].exit.exit_code == 75
    assert "preempting" in records
    (line,) = said
    assert line.startswith("wandb: offline, as WANDB_MODE says")
    assert f"`wandb sync {file.parent}`" in line
    assert len(list(file.parent.glob("files/media/images/train/*.png"))) == 2


def test_numbers_that_are_none_are_written(facts: Any, tmp_path: Path) -> None:
    config = LogConfig(log=("csv", "tensorboard"), log_every_steps=1)
    loggers = open_loggers(config, facts())
    loggers.start()
    bad = StepMetrics(epoch=1, step=1, loss=math.nan, lr=0.1, grad_norm=math.inf)
    loggers.rows_done([bad])
    loggers.finish("finished", quiet)
    for found in (logged.from_csv(tmp_path), logged.from_tensorboard(tmp_path)):
        assert math.isnan(found["train/loss"][0][1])
        assert found["train/gradient_norm"] == [(1, math.inf)]


@pytest.mark.parametrize("name", ["csv", "tensorboard"])
def test_steps_that_are_not_gone_on_from_are_forgotten(
    name: str, facts: Any, tmp_path: Path
) -> None:
    config = LogConfig(log=(name,), log_every_steps=1)
    for first, last in ((0, 7), (4, 9)):
        loggers = open_loggers(config, facts(step=first))
        loggers.start()
        loggers.rows_done([row(step) for step in range(first + 1, last + 1)])
        loggers.finish("stopped", quiet)
        time.sleep(1.1)  # the names of TensorBoard's files tell seconds
    read = logged.from_csv if name == "csv" else logged.from_tensorboard
    assert [step for step, _ in read(tmp_path)["train/loss"]] == list(range(1, 10))


def test_a_csv_file_that_was_cut_within_a_line_goes_on(
    facts: Any, tmp_path: Path
) -> None:
    (tmp_path / "metrics.csv").write_text("step,a,b\n1,0.5,\n2,0.25,7\n3,0.1")
    table = CsvFile(facts(step=2))
    table.scalars(2, {"b": 7.0})  # told again: an evaluation that was cut
    table.scalars(3, {"a": 0.2})
    table.scalars(3, {"c": 1.0})
    table.finish("finished", {})
    text = (tmp_path / "metrics.csv").read_text()
    assert text == "step,a,b,c\n1,0.5,,\n2,0.25,7,\n3,0.2,,\n3,,,1.0\n"
    with (tmp_path / "metrics.csv").open(newline="") as file:
        assert len(list(csv.reader(file))) == 5


# --- what may happen to them ----------------------------------------------------------


class Faulty(Logger):
    """Raises where it is told to."""

    def __init__(self, where: str = "") -> None:
        self.where = where
        self.calls: list[str] = []
        self.call("make")

    def call(self, name: str) -> None:
        self.calls.append(name)
        if name == self.where:
            raise ArithmeticError("this is the fault")

    def scalars(self, step: int, values: Any) -> None:
        self.call("scalars")

    def images(self, step: int, name: str, images: Any) -> None:
        self.call("images")

    def flush(self) -> None:
        self.call("flush")

    def finish(self, status: Any, summary: Any) -> None:
        self.call("finish")


@pytest.mark.parametrize("where", ["make", "scalars", "images", "flush", "finish"])
def test_a_logger_that_fails_is_warned_of_once_and_left_out(
    where: str, facts: Any, tmp_path: Path, warnings_of: list[str]
) -> None:
    good = Fed("csv", lambda: CsvFile(facts()))
    run_through(Loggers([Fed("faulty", lambda: Faulty(where)), good]))
    assert warnings_of == [
        "--log faulty failed, and is left out from here on: ArithmeticError: this is "
        "the fault. Training goes on"
    ]
    assert logged.from_csv(tmp_path) == EXPECTED


def test_a_logger_may_even_leave(warnings_of: list[str]) -> None:
    run_through(Loggers([Fed("leaver", lambda: sys.exit(3))]))
    assert len(warnings_of) == 1
    assert "SystemExit: 3" in warnings_of[0]


class Hanging(Logger):
    """Waits until it is let go."""

    def __init__(self, go: threading.Event) -> None:
        self.go = go
        self.num = 0

    def scalars(self, step: int, values: Any) -> None:
        self.go.wait()
        self.num += 1


def test_a_logger_that_hangs_holds_up_nobody_and_fills_no_memory(
    facts: Any, tmp_path: Path, warnings_of: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feeding, "MOST_WAITING", 100)
    monkeypatch.setattr(feeding, "FINISH_SECONDS", 1.5)
    go = threading.Event()
    hanging = Fed("hanging", lambda: Hanging(go))
    csv = Fed("csv", lambda: CsvFile(facts()))
    loggers = Loggers([hanging, csv])
    loggers.start()
    began = time.monotonic()
    for step in range(1, 1001):
        loggers.rows_done([row(step)])
        while step % 50 == 0 and csv._waiting and time.monotonic() - began < 10:
            time.sleep(0.01)  # the other one is to keep up
    assert len(hanging._waiting) <= 100
    told: list[str] = []
    loggers.finish("finished", told.append)
    assert time.monotonic() - began < 15
    go.set()
    assert len(logged.from_csv(tmp_path)["train/loss"]) == 1000
    assert told
    assert len(warnings_of) == 2, warnings_of
    assert "100 points wait for it, and it takes none" in warnings_of[0]
    assert "did not finish within 2 s, and is left behind; 1000 of" in warnings_of[1]


def test_a_logger_that_is_slow_gets_all_but_what_is_too_much(
    warnings_of: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(feeding, "MOST_WAITING", 10)
    go = threading.Event()
    made = Hanging(go)
    loggers = Loggers([Fed("slow", lambda: made)])
    loggers.start()
    for step in range(1, 26):
        loggers.rows_done([row(step)])
    go.set()
    loggers.finish("finished", quiet)
    assert 10 <= made.num <= 11
    missing = f"--log slow: {25 - made.num} points are missing, since it was too slow"
    assert warnings_of[1:] == [missing]


def test_what_is_told_is_on_the_disk_before_the_next_is(
    facts: Any, tmp_path: Path
) -> None:
    """A rank that is killed takes nothing with it."""
    config = LogConfig(log=("csv", "tensorboard"), log_every_steps=1)
    loggers = open_loggers(config, facts())
    loggers.start()
    loggers.rows_done([row(1), row(2)])
    end = time.monotonic() + 30
    while True:
        try:
            assert len(logged.from_csv(tmp_path)["train/loss"]) == 2
            assert len(logged.from_tensorboard(tmp_path)["train/loss"]) == 2
            break
        except (OSError, KeyError, AssertionError):
            assert time.monotonic() < end
            time.sleep(0.1)
    loggers.finish("finished", quiet)


# --- what is asked for ----------------------------------------------------------------


def test_steps_are_thinned_and_epochs_are_not(facts: Any, tmp_path: Path) -> None:
    loggers = open_loggers(LogConfig(log=("csv",), log_every_steps=4), facts())
    loggers.start()
    loggers.rows_done([row(step) for step in range(1, 4)])
    loggers.epoch_done(EPOCH)
    loggers.rows_done([row(step) for step in range(4, 10)])
    loggers.finish("finished", quiet)
    found = logged.from_csv(tmp_path)
    assert [step for step, _ in found["train/loss"]] == [4, 8]
    assert found["val/loss"] == [(3, 0.5)]


def test_other_ranks_have_wandb_alone_where_it_is_asked_for(facts: Any) -> None:
    log = ("csv", "tensorboard", "wandb")
    for all_ranks, names in ((False, []), (True, ["wandb"])):
        config = LogConfig(log=log, wandb_all_ranks=all_ranks)
        loggers = open_loggers(config, facts(rank=1))
        assert [one.name for one in loggers._loggers] == names
        assert bool(loggers) == bool(names)  # nobody hears: no rows are made
        assert not loggers.want_images
    assert open_loggers(config, facts()).want_images
    assert not open_loggers(LogConfig(log=("csv",)), facts()).want_images


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--log", "tensorbord"], "--log .tensorbord. is not known; expected csv"),
        (["--log", "csv", "csv"], "--log names 'csv' twice"),
        (["--log-every-steps", "0"], "--log-every-steps must be at least 1"),
        (["--wandb-all-ranks"], "--wandb-all-ranks needs --log wandb"),
    ],
)
def test_a_mistake_is_named_by_its_flag(flags: list[str], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        read_config(flags)


def test_a_library_that_is_missing_is_told_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    refuse_missing(LogConfig(log=("csv", "tensorboard", "wandb")))
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    refuse_missing(LogConfig(log=("csv",)))
    with pytest.raises(UsageError, match=r"pip install 'mpitrain\[wandb\]'"):
        refuse_missing(LogConfig(log=("wandb",)))


def test_a_folder_of_a_library_s_name_is_no_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wandb").mkdir()  # as W&B itself leaves one
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(UsageError, match=r"pip install 'mpitrain\[wandb\]'"):
        refuse_missing(LogConfig(log=("wandb",)))


def test_a_logger_of_ones_own_that_is_not_there_is_told_before_it_starts(
    facts: Any,
) -> None:
    with pytest.raises(UsageError, match=r"--log 'examples.own_logger:Nothing'"):
        open_loggers(LogConfig(log=("examples.own_logger:Nothing",)), facts())


@pytest.mark.parametrize("log", [(), ("csv",), ("csv", "wandb")])
def test_lists_are_read_back_from_the_file_of_a_run(
    log: tuple[str, ...], tmp_path: Path
) -> None:
    config = TrainConfig(log=log, wandb_tags=("a", "7"))
    file = tmp_path / "config.yaml"
    file.write_text(config.as_yaml("x"))
    assert read_config(["--config", str(file)]) == TrainConfig(
        name="x", log=log, wandb_tags=("a", "7")
    )
    flags = ["--config", str(file), "--log", "tensorboard"]
    assert read_config(flags).log == ("tensorboard",)


def test_flags_of_wandb_without_it_are_named() -> None:
    (found,) = TrainConfig(wandb_tags=("a",)).without_effect()
    assert found == "--wandb-tags: for --log wandb"
