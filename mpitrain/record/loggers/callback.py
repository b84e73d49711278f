"""The loggers of ``--log``, as a callback of the trainer."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from mpitrain.data.pixels import NUM_DIMENSIONS, as_bytes
from mpitrain.launch.current import heartbeat
from mpitrain.record.loggers.choice import open_loggers
from mpitrain.record.loggers.protocol import RunFacts
from mpitrain.train.callbacks import Callback
from mpitrain.train.config import TrainConfig
from mpitrain.train.metrics import EpochMetrics, StepMetrics, Throughput
from mpitrain.train.progress import say

logger = logging.getLogger("mpitrain")

MAX_IMAGES = 16
"""Images that are logged of the first batch."""

CHANNELS = (1, 3)


class Loggers(Callback):
    """Sends the metrics to the configured loggers, which cannot stop the training.

    Args:
        config: Names and settings of the loggers.
        run_dir: The run folder.
        run_id: The id of the run, in all of its jobs.
    """

    def __init__(self, config: TrainConfig, run_dir: Path, run_id: str) -> None:
        self._config, self._run_dir, self._run_id = config, run_dir, run_id
        self._wants_images = False

    def on_fit_start(self, trainer: Any) -> None:
        """Start the loggers."""
        world, name = trainer.engine.world, self._run_dir.name
        facts = RunFacts(
            run_dir=self._run_dir,
            run_name=name,
            run_id=self._run_id,
            config=self._config.as_plain(name),
            rank=world.rank,
            world_size=world.world_size,
            step=trainer.state.step,
            say=say if world.is_rank_zero else logger.info,
        )
        self._loggers = open_loggers(self._config, facts)
        self._wants_images = self._loggers.want_images
        self._loggers.start()

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
        found = as_bytes(some, trainer.engine.mean_std).numpy()
        self._loggers.images("train/images", found)

    def on_metrics(self, trainer: Any, steps: Sequence[StepMetrics]) -> None:
        """Log steps."""
        if steps:
            self._loggers.rows_done(steps)

    def on_throughput(self, trainer: Any, throughput: Throughput) -> None:
        """Log the speed of steps."""
        self._loggers.pace_done(throughput)

    def on_epoch_end(self, trainer: Any, epoch: EpochMetrics) -> None:
        """Log an epoch."""
        self._loggers.epoch_done(epoch)

    def on_test_end(self, trainer: Any, evaluation: Any, skipped: int) -> None:
        """Log the test set's metrics."""
        self._loggers.test_done(evaluation.values)

    def on_fit_end(self, trainer: Any) -> None:
        """Wait for the loggers, not for long."""
        self._loggers.finish("finished", heartbeat)

    def on_stop(self, trainer: Any, reason: str) -> None:
        """Likewise."""
        self._loggers.finish("stopped", heartbeat)
