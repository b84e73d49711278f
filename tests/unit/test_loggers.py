"""Loggers write what they are told, and hold nobody up, whatever happens to them."""

from __future__ import annotations

import csv
import dataclasses
import logging
import math
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from mpitrain.cli import read_config
from mpitrain.config import LogConfig, TrainConfig
from mpitrain.errors import UsageError
from mpitrain.plugins import require
from mpitrain.record.loggers import RunInfo, callback, process
from mpitrain.record.loggers.builtin import CSVLogger
from mpitrain.record.loggers.callback import Loggers, make_processes
from mpitrain.tools.train.prepare import prepare
from mpitrain.train.metrics import EpochMetrics, StepMetrics, Throughput

sys.path.insert(0, str(Path(__file__).parents[1] / "jobs"))
import logger_files
from logger_files import Points, as_floats, from_csv, from_tensorboard


@pytest.fixture
def info(tmp_path: Path) -> Callable[..., RunInfo]:
    def make(step: int = 0, **more: Any) -> RunInfo:
        given = {
            "run_dir": tmp_path,
            "run_name": "mine",
            "run_id": "0123",
            "config": {"lr": 0.1, "log": ["csv"]},
            "rank": 0,
            "world_size": 2,
            "step": step,
        }
        return RunInfo(**{**given, **more})

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


class Opened(Loggers):
    """The callback without a trainer.

    Args:
        config: The flags.
        info: The run.
        show: Prints a line.
    """

    def __init__(self, config: Any, info: RunInfo, show: Any = str) -> None:
        others = {k: v for k, v in vars(config).items() if k != "log"}
        super().__init__(info.run_dir, config.log, run_id=info.run_id, **others)
        self._takes_images = info.rank == 0
        self._processes = make_processes(config, info, show)
        self.trainer = SimpleNamespace(state=SimpleNamespace(step=3))

    def start(self) -> None:
        for one in self._processes:
            one.start()

    def log_steps(self, steps: Any) -> None:
        self.on_metrics(self.trainer, steps)

    def finish(self, status: Any) -> None:
        self._finish(status)


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


def run_through(loggers: Opened, status: Any = "finished") -> None:
    """A training of three steps."""
    loggers.start()
    images = np.arange(2 * 8 * 8, dtype=np.uint8).reshape(2, 8, 8, 1)
    loggers._send("log_images", ("train/images", images, 0))
    loggers.log_steps([row(1), row(2), row(3)])
    loggers.on_throughput(loggers.trainer, PACE)
    loggers.on_epoch_end(loggers.trainer, EPOCH)
    evaluation = SimpleNamespace(values={"accuracy": 0.75})
    loggers.on_test_end(loggers.trainer, evaluation, 0)
    loggers.finish(status)


EXPECTED: Points = {
    "train/loss": [(1, 0.1), (2, 0.05), (3, 0.1 / 3)],
    "train/lr": [(1, 0.01), (2, 0.01), (3, 0.01)],
    "train/gradient_norm": [(1, 2.0), (2, 2.0), (3, 2.0)],
    "throughput/samples_per_second": [(3, 5.0)],
    "throughput/step_seconds": [(3, 2.0)],
    "throughput/data_seconds": [(3, 0.5)],
    "throughput/compute_seconds": [(3, 1.0)],
    "throughput/communication_seconds": [(3, 0.25)],
    "throughput/wait_seconds": [(3, 0.125)],
    "throughput/late_seconds": [(3, 0.0625)],
    "gpu/memory_bytes": [(3, 1 << 30)],
    "train/epoch": [(3, 1)],
    "train/epoch_loss": [(3, 0.7)],
    "train/epoch_seconds": [(3, 1.5)],
    "val/loss": [(3, 0.5)],
    "val/accuracy": [(3, 0.25)],
    "test/accuracy": [(3, 0.75)],
}


# --- each one, read back ------------------------------------------------------------


def test_a_csv_file_has_all_numbers_whole(info: Any, tmp_path: Path) -> None:
    run_through(Opened(LogConfig(log=("csv",), log_every_steps=1), info()))
    assert from_csv(tmp_path) == EXPECTED


def test_tensorboards_own_reader_has_all(info: Any, tmp_path: Path) -> None:
    config = LogConfig(log=("tensorboard",), log_every_steps=1)
    run_through(Opened(config, info()))
    assert from_tensorboard(tmp_path) == as_floats(EXPECTED)
    events = logger_files.accumulator(tmp_path)
    for tag in ("train/images/0", "train/images/1"):
        (image,) = events.Images(tag)
        assert (image.step, image.width, image.height) == (0, 8, 8)
    text = events.Tensors("config/text_summary")[0].tensor_proto.string_val[0]
    assert b"lr: 0.1" in text


def test_wandbs_offline_file_has_all(
    info: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    monkeypatch.setenv("WANDB_MODE", "offline")
    config = LogConfig(
        log=("wandb",), log_every_steps=1, wandb_project="p", wandb_tags=("a", "b")
    )
    run_through(Opened(config, info(), said.append), "stopped")
    (file,) = logger_files.wandb_files(tmp_path)
    assert logger_files.from_wandb(file) == EXPECTED
    listed = logger_files.wandb_records(file)
    records = {it.WhichOneof("record_type"): it for it in listed}
    run = records["run"].run
    assert (run.run_id, run.display_name, run.project) == ("0123", "mine", "p")
    assert list(run.tags) == ["a", "b"]
    assert '"lr"' not in run.run_id
    assert records["exit"].exit.exit_code == 75
    assert "preempting" in records
    (line,) = said
    assert line.startswith("wandb: offline, as WANDB_MODE says")
    assert f"`wandb sync {file.parent.parent}/offline-run-*`" in line
    assert len(list(file.parent.glob("files/media/images/train/*.png"))) == 2


@pytest.fixture
def trackers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A place for their data, and time for imports beside other tests."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    for name in ("FINISH_SECONDS", "STOP_SECONDS"):
        monkeypatch.setattr(callback, name, 200)
    return tmp_path


def test_mlflows_own_client_has_all_of_both_jobs(info: Any, trackers: Path) -> None:
    config = LogConfig(log=("mlflow",), log_every_steps=1)
    run_through(Opened(config, info(config={"lr": 0.1, "epochs": 2})), "stopped")
    (run,) = logger_files.from_mlflow(trackers)
    assert (run["name"], run["status"]) == ("mine", "KILLED")
    assert run["params"] == {"lr": "0.1", "epochs": "2"}
    assert run["points"] == EXPECTED
    assert len([it for it in run["images"] if it.endswith(".png")]) == 2
    loggers = Opened(config, info(config={"lr": 0.1, "epochs": 3, "new": None}, step=3))
    loggers.start()
    loggers.log_steps([row(4)])
    epoch = dataclasses.replace(EPOCH, step=4, values={"iou@0.5, %": 1.0})
    loggers.on_epoch_end(loggers.trainer, epoch)
    loggers.finish("finished")
    (run,) = logger_files.from_mlflow(trackers)
    assert run["status"] == "FINISHED"
    assert run["params"] == {"lr": "0.1", "epochs": "2", "new": "None"}
    assert run["points"]["train/loss"] == [*EXPECTED["train/loss"], (4, 0.025)]
    assert run["points"]["val/iou_0.5_ _"] == [(4, 1.0)]


@pytest.mark.slow
def test_trials_at_once_share_mlflows_database(info: Any, trackers: Path) -> None:
    config = LogConfig(log=("mlflow",), log_every_steps=1)
    names = [f"trial-{number}" for number in range(4)]
    trials = []
    for name in names:
        (trackers / name).mkdir()
        of = info(run_dir=trackers / name, run_name=name, run_id=name)
        trials.append(Opened(config, of))
        trials[-1].start()
    for trial in trials:
        trial.log_steps([row(1)])
    for trial in trials:
        trial.finish("finished")
    found = logger_files.from_mlflow(trackers)
    assert sorted(it["name"] for it in found) == names
    assert all(it["points"]["train/loss"] == [(1, 0.1)] for it in found)


def test_trackios_own_storage_has_all_of_both_jobs(info: Any, trackers: Path) -> None:
    config = LogConfig(log=("trackio",), log_every_steps=1)
    run_through(Opened(config, info()), "stopped")
    ((name, points),) = logger_files.from_trackio(trackers).items()
    images = {
        it: points.pop(it) for it in list(points) if it.startswith("train/images")
    }
    assert name == "mine-0123"
    assert points == EXPECTED
    assert sorted(images) == ["train/images/0", "train/images/1"]
    assert len(list((trackers / "trackio").rglob("*.png"))) == 2
    loggers = Opened(config, info(step=3))
    loggers.start()
    loggers.log_steps([row(4)])
    loggers.finish("finished")
    ((name, points),) = logger_files.from_trackio(trackers).items()
    assert points["train/loss"] == [*EXPECTED["train/loss"], (4, 0.025)]


def figure() -> Any:
    from matplotlib.figure import Figure

    found = Figure(figsize=(2, 1), dpi=50)
    found.add_subplot().plot([1, 2])
    return found


@pytest.mark.parametrize(
    ("images", "shape"),
    [
        (torch.zeros(2, 3, 4, 5), (2, 4, 5, 3)),
        (torch.zeros(2, 1, 4, 5, dtype=torch.uint8), (2, 4, 5, 1)),
        (
            torch.zeros(2, 1, 4, 5, dtype=torch.bfloat16, requires_grad=True),
            (2, 4, 5, 1),
        ),
        (np.zeros((2, 4, 5, 3), np.uint8), (2, 4, 5, 3)),
        (figure(), (1, 50, 100, 3)),
    ],
    ids=["floats", "bytes", "bfloat16", "array", "figure"],
)
def test_images_of_the_user_are_logged(
    images: Any, shape: tuple[int, ...], info: Any, tmp_path: Path
) -> None:
    loggers = Opened(LogConfig(log=("tensorboard",)), info())
    loggers.start()
    loggers.on_images(loggers.trainer, "val/mine", images)
    loggers.finish("finished")
    (first, *_) = logger_files.accumulator(tmp_path).Images("val/mine/0")
    assert (first.step, first.height, first.width) == (3, *shape[1:3])
    assert callback.images_of(images).shape == shape


@pytest.mark.parametrize(
    "images",
    [
        torch.zeros(3, 4, 5),
        torch.zeros(2, 7, 4, 5),
        torch.zeros(2, 3, 4, 5, dtype=torch.int64),
        np.zeros((2, 4, 5, 3)),
        "a",
        None,
    ],
    ids=["3-D", "7 channels", "int64", "float array", "str", "None"],
)
def test_what_is_no_image_is_named(images: Any) -> None:
    with pytest.raises(UsageError, match=r"log_images: found .*; expected a tensor"):
        callback.images_of(images)


def test_numbers_that_are_none_are_written(info: Any, tmp_path: Path) -> None:
    config = LogConfig(log=("csv", "tensorboard"), log_every_steps=1)
    loggers = Opened(config, info())
    loggers.start()
    bad = StepMetrics(epoch=1, step=1, loss=math.nan, lr=0.1, grad_norm=math.inf)
    loggers.log_steps([bad])
    loggers.finish("finished")
    for found in (from_csv(tmp_path), from_tensorboard(tmp_path)):
        assert math.isnan(found["train/loss"][0][1])
        assert found["train/gradient_norm"] == [(1, math.inf)]


@pytest.mark.parametrize("name", ["csv", "tensorboard"])
def test_steps_that_are_not_gone_on_from_are_forgotten(
    name: str, info: Any, tmp_path: Path
) -> None:
    config = LogConfig(log=(name,), log_every_steps=1)
    for first, last in ((0, 7), (4, 9)):
        loggers = Opened(config, info(step=first))
        loggers.start()
        loggers.log_steps([row(step) for step in range(first + 1, last + 1)])
        loggers.finish("stopped")
        time.sleep(1.1)  # the names of TensorBoard's files have seconds
    read = from_csv if name == "csv" else from_tensorboard
    assert [step for step, _ in read(tmp_path)["train/loss"]] == list(range(1, 10))


def test_a_csv_file_that_was_cut_within_a_line_goes_on(tmp_path: Path) -> None:
    (tmp_path / "metrics.csv").write_text("step,a,b\n1,0.5,\n2,0.25,7\n3,0.1")
    table = CSVLogger(tmp_path, step=2)
    table.log_metrics({"b": 7.0}, 2)  # a repeated validation
    table.log_metrics({"a": 0.2}, 3)
    table.log_metrics({"c": 1.0}, 3)
    table.save()
    text = (tmp_path / "metrics.csv").read_text()
    assert text == "step,a,b,c\n1,0.5,,\n2,0.25,7,\n3,0.2,,\n3,,,1.0\n"
    with (tmp_path / "metrics.csv").open(newline="") as file:
        assert len(list(csv.reader(file))) == 5


# --- what may happen to them ----------------------------------------------------------


@pytest.mark.parametrize(
    ("where", "reason"),
    [
        *(
            (where, "ArithmeticError: this is the fault")
            for where in ("make", "log_metrics", "log_images", "save", "finalize")
        ),
        ("exit in save", "SystemExit: 3"),
        ("die in save", "its process ended with status -9"),
    ],
)
def test_a_logger_that_fails_is_warned_of_once_and_disabled(
    where: str, reason: str, info: Any, tmp_path: Path, warnings_of: list[str]
) -> None:
    (tmp_path / "where").write_text(where)
    log = ("faulty_loggers:Faulty", "csv")
    run_through(Opened(LogConfig(log=log, log_every_steps=1), info()))
    assert warnings_of == [
        f"--log faulty_loggers:Faulty failed and is disabled: {reason} "
        f"({tmp_path}/logs/loggers-0.log). Training continues"
    ]
    assert from_csv(tmp_path) == EXPECTED


def test_a_logger_that_hangs_delays_nobody_and_fills_no_memory(
    info: Any, tmp_path: Path, warnings_of: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "MAX_WAITING", 100)
    monkeypatch.setattr(callback, "FINISH_SECONDS", 3)
    told: list[str] = []
    monkeypatch.setattr(callback, "heartbeat", told.append)
    log = ("faulty_loggers:Hanging", "csv")
    loggers = Opened(LogConfig(log=log, log_every_steps=1), info())
    loggers.start()
    hanging, csv = loggers._processes
    began = time.monotonic()
    for step in range(1, 1001):
        # The pipe holds some; the queue not more than it may.
        loggers.log_steps([StepMetrics(1, step, 0.1 / step, 0.01, 2.0)] * 10)
        while csv._writer.num_waiting > 50 and time.monotonic() - began < 20:
            time.sleep(0.01)
    assert hanging._writer.num_waiting <= 100
    loggers.finish("finished")
    assert time.monotonic() - began < 25
    assert len(from_csv(tmp_path)["train/loss"]) == 10_000
    assert told
    assert len(warnings_of) == 2, warnings_of
    assert "entries wait for it: more are dropped" in warnings_of[0]
    assert "Hanging did not finish in time and was killed" in warnings_of[1]
    assert hanging.join(10)
    assert hanging._process.wait(10) == -signal.SIGKILL


def test_a_logger_that_is_slow_gets_all_but_what_is_too_much(
    info: Any, tmp_path: Path, warnings_of: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "MAX_WAITING", 10)
    loggers = Opened(
        LogConfig(log=("faulty_loggers:Hanging",), log_every_steps=1), info()
    )
    for step in range(1, 26):
        loggers.log_steps([row(step)])
    (tmp_path / "go").touch()
    loggers.start()
    loggers.finish("finished")
    assert (tmp_path / "num").read_text() == "10"
    missing = "--log faulty_loggers:Hanging was too slow: 15 points are missing"
    assert warnings_of[1:] == [missing]


@pytest.mark.parametrize("status", ["finished", "stopped", "failed"])
def test_loggers_of_other_libraries_work_by_the_names_of_their_methods(
    status: str, info: Any, tmp_path: Path, warnings_of: list[str]
) -> None:
    loggers = Opened(
        LogConfig(log=("faulty_loggers:Plain",), log_every_steps=1), info()
    )
    loggers.start()
    images = np.zeros((1, 8, 8, 1), np.uint8)
    loggers._send("log_images", ("train/images", images, 0))  # it takes none
    loggers.log_steps([row(1), row(2)])
    if status == "failed":  # without a word, as where the rank is killed
        (one,) = loggers._processes
        while one._writer.num_waiting:
            time.sleep(0.01)
        one._process.stdin.close()
        assert one._process.wait(10) == 0
    else:
        loggers.finish(status)
    assert (tmp_path / "plain").read_text() == f"1\n2\n{status}\n"
    assert not warnings_of


def test_what_is_told_is_on_the_disk_before_the_next_is(
    info: Any, tmp_path: Path
) -> None:
    """A rank that is killed takes nothing with it."""
    config = LogConfig(log=("csv", "tensorboard"), log_every_steps=1)
    loggers = Opened(config, info())
    loggers.start()
    loggers.log_steps([row(1), row(2)])
    end = time.monotonic() + 30
    while True:
        try:
            assert len(from_csv(tmp_path)["train/loss"]) == 2
            assert list(tmp_path.glob("tensorboard/*"))
            assert len(from_tensorboard(tmp_path)["train/loss"]) == 2
            break
        except (OSError, KeyError, AssertionError):
            assert time.monotonic() < end
            time.sleep(0.1)
    loggers.finish("finished")


# --- what is asked for ----------------------------------------------------------------


def test_steps_are_thinned_and_epochs_are_not(info: Any, tmp_path: Path) -> None:
    loggers = Opened(LogConfig(log=("csv",), log_every_steps=4), info())
    loggers.start()
    loggers.log_steps([row(step) for step in range(1, 4)])
    loggers.on_epoch_end(loggers.trainer, EPOCH)
    loggers.log_steps([row(step) for step in range(4, 10)])
    loggers.finish("finished")
    found = from_csv(tmp_path)
    assert [step for step, _ in found["train/loss"]] == [4, 8]
    assert found["val/loss"] == [(3, 0.5)]


def test_other_ranks_have_wandb_alone_where_it_is_asked_for(info: Any) -> None:
    log = ("csv", "tensorboard", "wandb")
    for all_ranks, names in ((False, []), (True, ["wandb"])):
        config = LogConfig(log=log, wandb_all_ranks=all_ranks)
        found = make_processes(config, info(rank=1), str)
        assert [one.name for one in found] == names


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
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    require("tensorboard", "--log tensorboard")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    config = TrainConfig(log=("csv", "wandb"), runs_dir=tmp_path / "runs")
    with pytest.raises(UsageError, match=r"--log wandb needs .* -m pip install wandb"):
        prepare(config)
    assert not config.runs_dir.exists()


def test_a_folder_of_a_library_s_name_is_no_library(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wandb").mkdir()  # as W&B itself leaves one
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    monkeypatch.delitem(sys.modules, "wandb", raising=False)
    with pytest.raises(UsageError, match=r"-m pip install wandb"):
        require("wandb", "--log wandb")


def test_a_logger_of_ones_own_that_is_not_there_is_told_before_it_starts(
    info: Any,
) -> None:
    with pytest.raises(UsageError, match=r"--log 'examples.custom_logger:Nothing'"):
        Opened(LogConfig(log=("examples.custom_logger:Nothing",)), info())


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
    assert found == "--wandb-tags (for --log wandb)"
