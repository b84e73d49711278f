"""How far a training has come: what a checkpoint holds beside tensors."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from mpitrain.train.metrics import EpochMetrics


@dataclass(kw_only=True)
class TrainState:
    """How far a training has come. Equal on all ranks, except for the seconds."""

    step: int = 0
    """Steps done, over all epochs."""
    epoch: int = 1
    """The current epoch, from 1; one more than the last when the training is done."""
    epoch_step: int = 0
    """Steps done of the current epoch."""
    loss_sum: float = 0.0
    """Sum of the losses of the epoch's samples, in the steps that were applied."""
    num_samples: int = 0
    """Number of these samples."""
    skipped_steps: int = 0
    """Steps of the epoch that were not applied."""
    skipped_samples: int = 0
    """Samples of the epoch that could not be read."""
    steps_seconds: float = 0.0
    """Wall time of the epoch's steps."""
    samples_per_shard: list[int] = field(default_factory=list)
    """Samples of the epoch that were taken from each shard of an iterable data set."""
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the last validation."""
    val_samples: int = 0
    """Samples of the last validation."""

    def end_epoch(self, stage: str, val_seconds: float) -> EpochMetrics:
        """Return the metrics of the epoch, and begin the next one."""
        num = self.num_samples
        found = EpochMetrics(
            stage=stage,
            epoch=self.epoch,
            step=self.step,
            train_loss=self.loss_sum / num if num else math.nan,
            train_samples=num,
            values=self.metrics,
            val_samples=self.val_samples,
            skipped_samples=self.skipped_samples,
            skipped_steps=self.skipped_steps,
            steps_seconds=self.steps_seconds,
            epoch_seconds=self.steps_seconds + val_seconds,
        )
        self.epoch += 1
        self.epoch_step = 0
        self.loss_sum, self.num_samples = 0.0, 0
        self.skipped_steps = self.skipped_samples = 0
        self.steps_seconds = 0.0
        self.samples_per_shard = []
        return found
