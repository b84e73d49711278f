"""The loggers of ``--log``, as a callback of the trainer."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from mpitrain.config import LogConfig, TrainConfig
from mpitrain.data.transforms import NUM_DIMENSIONS, to_uint8
from mpitrain.launch.current import heartbeat
from mpitrain.plugins import is_reference, load_reference
from mpitrain.record.loggers.base import RunInfo, Status
from mpitrain.record.loggers.process import LoggerProcess
from mpitrain.train.callbacks import Callback
from mpitrain.train.metrics import EpochMetrics, StepMetrics, Throughput
from mpitrain.train.progress import say

logger = logging.getLogger("mpitrain")

FINISH_SECONDS = 15.0
"""How long the end of a job waits for all loggers together."""

MAX_IMAGES = 16
"""Images that are logged of the first batch."""

CHANNELS = (1, 3)


class Loggers(Callback):
    """Sends the metrics to the configured loggers, which cannot stop the training."""

    def __init__(self, config: TrainConfig, run_dir: Path, run_id: str) -> None:
        self._config, self._run_dir, self._run_id = config, run_dir, run_id
        self._processes: list[LoggerProcess] = []
        self._wants_images = False

    def on_fit_start(self, trainer: Any) -> None:
        """Start the loggers."""
        world, name = trainer.engine.world, self._run_dir.name
        info = RunInfo(
            run_dir=self._run_dir,
            run_name=name,
            run_id=self._run_id,
            config=self._config.as_plain(name),
            rank=world.rank,
            world_size=world.world_size,
            step=trainer.state.step,
        )
        show = say if world.is_rank_zero else logger.info
        self._processes = make_processes(self._config, info, show)
        names = {one.name for one in self._processes}
        self._wants_images = world.is_rank_zero and bool(names - {"csv"})
        for one in self._processes:
            one.start()

    def on_batch_start(self, trainer: Any, batch: Any) -> None:
        """Log images of the first batch that has any."""
        if not self._wants_images:
            return
        images = batch.inputs
        if not len(batch) or not isinstance(images, Tensor):
            return
        if images.ndim != NUM_DIMENSIONS or images.shape[1] not in CHANNELS:
            return
        self._wants_images = False
        some = images[: min(len(batch), MAX_IMAGES)]
        found = to_uint8(some, trainer.engine.mean_std).numpy()
        self._send("log_images", ("train/images", found, trainer.state.step))

    def on_metrics(self, trainer: Any, steps: Sequence[StepMetrics]) -> None:
        """Log steps."""
        if not self._processes:
            return
        every = self._config.log_every_steps
        logged = [(step_metrics(it), it.step) for it in steps if it.step % every == 0]
        if logged:
            self._send("log_metrics", *logged)

    def on_throughput(self, trainer: Any, throughput: Throughput) -> None:
        """Log the speed of steps."""
        metrics = throughput_metrics(throughput)
        self._send("log_metrics", (metrics, throughput.step))

    def on_epoch_end(self, trainer: Any, epoch: EpochMetrics) -> None:
        """Log an epoch."""
        self._send("log_metrics", (epoch_metrics(epoch), epoch.step))

    def on_test_end(self, trainer: Any, evaluation: Any, skipped: int) -> None:
        """Log the test set's metrics."""
        metrics = {f"test/{name}": value for name, value in evaluation.values.items()}
        self._send("log_metrics", (metrics, trainer.state.step))

    def on_fit_end(self, trainer: Any) -> None:
        """Wait for the loggers, `FINISH_SECONDS` at most."""
        self._finish("finished")

    def on_stop(self, trainer: Any, reason: str) -> None:
        """Likewise."""
        self._finish("stopped")

    def _finish(self, status: Status) -> None:
        deadline = time.monotonic() + FINISH_SECONDS
        for one in self._processes:
            one.finalize(status)
        for one in self._processes:
            while not one.join(min(1.0, deadline - time.monotonic())):
                heartbeat("finishing the loggers")
                if time.monotonic() >= deadline:
                    break
            one.close()

    def _send(self, method: str, *calls: tuple[object, ...]) -> None:
        for one in self._processes:
            one.send(method, *calls)


def make_processes(
    config: LogConfig, info: RunInfo, show: Callable[[str], object]
) -> list[LoggerProcess]:
    """Choose the loggers of a rank; ``show`` prints a line on the screen.

    Raises:
        UsageError: A user-defined logger does not exist.
    """
    names = config.log
    if info.rank:
        names = ("wandb",) if config.wandb_all_ranks else ()
    for name in filter(is_reference, names):
        load_reference(name, "--log")
    suffix = f"-rank-{info.rank}"
    group = info.run_name if config.wandb_all_ranks else None
    options = {
        "id": info.run_id + suffix * (info.rank > 0),
        "name": info.run_name + suffix * config.wandb_all_ranks,
        "group": config.wandb_group or group,
        "tags": list(config.wandb_tags),
        "project": config.wandb_project or os.environ.get("WANDB_PROJECT", "mpitrain"),
    }
    return [LoggerProcess(name, info, options, show) for name in names]


def step_metrics(row: StepMetrics) -> dict[str, float]:
    """Name the metrics of a step.

    >>> step_metrics(StepMetrics(epoch=1, step=3, loss=0.5, lr=0.1, grad_norm=2.0))
    {'train/loss': 0.5, 'train/lr': 0.1, 'train/gradient_norm': 2.0}
    """
    return {
        "train/loss": row.loss,
        "train/lr": row.lr,
        "train/gradient_norm": row.grad_norm,
    }


def throughput_metrics(throughput: Throughput) -> dict[str, float]:
    """Name the metrics of the throughput; seconds are those of one step."""
    seconds = {"step": throughput.seconds} | {
        name: getattr(throughput, f"{name}_seconds")
        for name in ("data", "compute", "communication", "wait", "late")
    }
    metrics = {
        f"throughput/{k}_seconds": v / throughput.num_steps for k, v in seconds.items()
    }
    if throughput.gpu_bytes is not None:
        metrics["gpu/memory_bytes"] = throughput.gpu_bytes
    return {"throughput/samples_per_second": throughput.samples_per_second, **metrics}


def epoch_metrics(epoch: EpochMetrics) -> dict[str, float]:
    """Name the metrics of an epoch."""
    return {
        "train/epoch": epoch.epoch,
        "train/epoch_loss": epoch.train_loss,
        "train/epoch_seconds": epoch.epoch_seconds,
        **{f"val/{name}": value for name, value in epoch.values.items()},
    }
