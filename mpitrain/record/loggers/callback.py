"""The loggers of ``--log``, as a callback of the trainer."""

from __future__ import annotations

import logging
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from mpitrain.config import LOGGERS, LogConfig, TrainConfig
from mpitrain.console import say
from mpitrain.data.samples import kind_of
from mpitrain.errors import UsageError
from mpitrain.files import read_json
from mpitrain.launch.job import heartbeat
from mpitrain.plugins import load_reference
from mpitrain.record.loggers.base import FILE_LOGGERS, Images, RunInfo, Status
from mpitrain.record.loggers.process import LoggerProcess
from mpitrain.record.runs import RUN
from mpitrain.tasks.image_classification.transforms import NUM_DIMENSIONS, to_uint8
from mpitrain.train.callbacks import Callback
from mpitrain.train.metrics import EpochMetrics, StepMetrics, Throughput

if TYPE_CHECKING:
    from mpitrain.train.trainer import Trainer

logger = logging.getLogger("mpitrain")

# How long the end of a job waits for all loggers together. On busy cores MLflow takes
# 30 s to begin, and a short trial of a sweep has ended by then.
FINISH_SECONDS = 60.0
STOP_SECONDS = 30.0  # likewise at a stop, soon after which a scheduler kills
MAX_IMAGES = 16  # images that are logged of the first batch

CHANNELS = (1, 3)


class Loggers(Callback):
    """Sends the metrics to loggers, which cannot stop the training.

    Args:
        run_dir: The run folder. A `Recorder` or `Checkpointer` before it opens it.
        log: ``csv``, ``tensorboard``, ``wandb``, ``mlflow``, ``trackio``,
            ``openmetrics``, the name of a plug-in, or ``package.module:callable``.
        run_id: Unique id of the run; ``None``: that of the run folder.
        **settings: Other fields of a `LogConfig`, such as ``log_every_steps``.
    """

    def __init__(
        self,
        run_dir: str | Path,
        log: Sequence[str],
        *,
        run_id: str | None = None,
        **settings: Any,
    ) -> None:
        log = (log,) if isinstance(log, str) else tuple(log)
        self._config: LogConfig = TrainConfig(log=log, **settings)
        self._run_dir, self._run_id = Path(run_dir).absolute(), run_id
        self._processes: list[LoggerProcess] = []
        self._wants_images = self._takes_images = False

    def on_fit_start(self, trainer: Trainer) -> None:
        """Start the loggers."""
        world, name = trainer.engine.world, self._run_dir.name
        found = read_json(self._run_dir / RUN).get("id") or secrets.token_hex(8)
        info = RunInfo(
            run_dir=self._run_dir,
            run_name=name,
            run_id=self._run_id or found,
            config=trainer.config.as_plain(name),
            rank=world.rank,
            world_size=world.world_size,
            step=trainer.state.step,
        )
        show = say if world.is_rank_zero else logger.info
        self._processes = make_processes(self._config, info, show)
        has_image_loggers = not FILE_LOGGERS.issuperset(self._config.log)
        self._takes_images = world.is_rank_zero and has_image_loggers
        self._wants_images = self._takes_images
        for process in self._processes:
            process.start()

    def on_batch_start(self, trainer: Trainer, batch: Any) -> None:
        """Log images of the first batch that has any."""
        if not self._wants_images or not len(batch):
            return
        inputs = batch.inputs
        if (
            isinstance(inputs, Tensor)
            and inputs.ndim == NUM_DIMENSIONS
            and inputs.shape[1] in CHANNELS
        ):
            self._wants_images = False
            some = inputs[: min(len(batch), MAX_IMAGES)]
            images = to_uint8(some, getattr(trainer.task, "mean_std", None)).numpy()
            self._send("log_images", ("train/images", images, trainer.state.step))

    def on_images(self, trainer: Trainer, name: str, images: Any) -> None:
        """Log images of the user's, on rank zero."""
        found = images_of(images)
        if self._takes_images:
            self._send("log_images", (name, found, trainer.state.step))
        elif not self._processes and trainer.engine.world.is_rank_zero:
            logger.warning(
                "log_images(%r): not logged, since the loggers run from on_fit_start, "
                "or a callback before it, to on_fit_end",
                name,
            )

    def on_metrics(self, trainer: Trainer, steps: Sequence[StepMetrics]) -> None:
        """Log steps."""
        if not self._processes:
            return
        logged = []
        for _, step, loss, lr, norm, groups, others in steps:
            if step % self._config.log_every_steps == 0:
                values = {"loss": loss, **others, "lr": lr, "gradient_norm": norm}
                values |= {f"lr_group_{i}": it for i, it in enumerate(groups)}
                logged.append((_prefixed("train", values), step))
        self._send("log_metrics", *logged)

    def on_throughput(self, trainer: Trainer, throughput: Throughput) -> None:
        """Log the speed of steps; the seconds are those of one step."""
        metrics = {"throughput/samples_per_second": throughput.samples_per_second}
        seconds = {"step": throughput.seconds} | {
            name: getattr(throughput, f"{name}_seconds")
            for name in ("data", "compute", "communication", "wait", "late")
        }
        for name, value in seconds.items():
            metrics[f"throughput/{name}_seconds"] = value / throughput.num_steps
        if throughput.gpu_bytes is not None:
            metrics["gpu/memory_bytes"] = throughput.gpu_bytes
        self._send("log_metrics", (metrics, throughput.step))

    def on_validation_end(self, trainer: Trainer, epoch: EpochMetrics) -> None:
        """Log a validation within an epoch."""
        if not epoch.is_end:
            self._send("log_metrics", (_prefixed("val", epoch.values), epoch.step))

    def on_epoch_end(self, trainer: Trainer, epoch: EpochMetrics) -> None:
        """Log an epoch."""
        metrics = {
            "train/epoch": epoch.epoch,
            "train/epoch_loss": epoch.train_loss,
            "train/epoch_seconds": epoch.epoch_seconds,
            **_prefixed("val", epoch.values),
        }
        self._send("log_metrics", (metrics, epoch.step))

    def on_test_end(self, trainer: Trainer, evaluation: Any, skipped: int) -> None:
        """Log the test set's metrics."""
        metrics = _prefixed("test", evaluation.values)
        self._send("log_metrics", (metrics, trainer.state.step))

    def on_fit_end(self, trainer: Trainer) -> None:
        """Wait for the loggers, `FINISH_SECONDS` at most."""
        self._finish("finished")

    def on_stop(self, trainer: Trainer, reason: str) -> None:
        """Wait for the loggers, `STOP_SECONDS` at most."""
        self._finish("stopped")

    def on_exception(self, trainer: Trainer, error: BaseException) -> None:
        """Tell them; without waiting, for the job may be about to end."""
        self._send("finalize", ("failed",))

    def _finish(self, status: Status) -> None:
        is_stop = status == "stopped"
        deadline = time.monotonic() + (STOP_SECONDS if is_stop else FINISH_SECONDS)
        self._send("finalize", (status,))
        for process in self._processes:
            # By the second: the watchdog would take a long wait for a hang.
            while not process.join(min(1.0, deadline - time.monotonic())):
                heartbeat("finishing the loggers")
                if time.monotonic() >= deadline:
                    break
            process.close()
        self._processes, self._takes_images = [], False

    def _send(self, method: str, *calls: tuple[object, ...]) -> None:
        for process in self._processes:
            process.send(method, *calls)


def images_of(images: Any) -> Images:
    """Return images, or a figure of matplotlib, as uint8 `(N, H, W, C)`.

    >>> images_of(torch.tensor([0.0, 0.5, 2.0]).view(1, 1, 1, 3)).ravel()
    array([  0, 128, 255], dtype=uint8)
    """
    if hasattr(images, "canvas"):
        from matplotlib.backends.backend_agg import FigureCanvasAgg

        canvas: Any = FigureCanvasAgg(images)
        canvas.draw()
        return np.asarray(canvas.buffer_rgba())[None, ..., :3]
    is_tensor = isinstance(images, Tensor)
    found: Any = images.detach().cpu() if is_tensor else images
    if is_tensor and found.ndim == NUM_DIMENSIONS:
        found = found.movedim(1, -1).contiguous()
        if found.dtype == torch.bool or found.is_floating_point():
            found = found.float().clamp(0, 1).mul(255).round().byte()
        found = found.numpy()
    kind = str(getattr(found, "dtype", "")), *getattr(found, "shape", ())
    if (
        len(kind) != 1 + NUM_DIMENSIONS
        or kind[0] != "uint8"
        or kind[-1] not in CHANNELS
    ):
        raise UsageError(
            f"log_images: found {kind_of(images)}, shape {kind[1:]}; expected a tensor "
            "(N, C, H, W), of bytes or from 0 to 1, an array uint8 (N, H, W, C), each "
            "with 1 or 3 channels, or a figure of matplotlib"
        )
    return found  # type: ignore[no-any-return]


def make_processes(
    config: LogConfig, info: RunInfo, show: Callable[[str], object]
) -> list[LoggerProcess]:
    """Choose the loggers of a rank; ``show`` prints a line on the screen."""
    names = config.log
    if info.rank:
        names = ("wandb",) if config.wandb_all_ranks else ()
    for name in names:
        if name not in LOGGERS:
            load_reference(name, "--log", "loggers")
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


def _prefixed(prefix: str, values: Mapping[str, float]) -> dict[str, float]:
    return {f"{prefix}/{name}": value for name, value in values.items()}
