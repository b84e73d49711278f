"""What a training measures: steps, throughput, epochs, phases. Imports no torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

PHASES = (
    "data",
    "forward",
    "backward",
    "communication",
    "update",
    "evaluation",
    "checkpoint",
    "other",
)
"""What a rank spends its time on. ``data``: waiting for samples. ``communication``:
waiting for the gradient all-reduce after backward, and broadcasting buffers.
``update``: gradient norm, clipping and the optimizer. ``checkpoint``: copying one.
``other``: metrics are synchronized and logged."""

NUM_PHASES = len(PHASES)

(
    DATA,
    FORWARD,
    BACKWARD,
    COMMUNICATION,
    UPDATE,
    EVALUATION,
    CHECKPOINT,
    OTHER,
) = range(NUM_PHASES)


class StepMetrics(NamedTuple):
    """The metrics of one step. Equal on all ranks."""

    epoch: int
    """Epoch of the step, from 1."""
    step: int
    """Number of the step, from 1, over all epochs."""
    loss: float
    """Mean loss per sample, before the update."""
    lr: float
    """Learning rate."""
    grad_norm: float
    """Norm of the gradient of the mean loss, before clipping."""


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """How fast some steps were, in wall time. Equal on all ranks."""

    epoch: int
    """Epoch of the last of the steps, from 1."""
    step: int
    """Number of the last of the steps, from 1, over all epochs."""
    num_steps: int
    num_samples: int
    """Samples in these steps, over all ranks."""
    seconds: float
    """Time of these steps on the rank that took longest for all of them."""
    data_seconds: float
    """Waiting for samples; mean over ranks."""
    compute_seconds: float
    """Forward and backward; mean over ranks."""
    communication_seconds: float
    """Gradient all-reduce after backward, measured on the rank that does not wait; with
    DDP and buffers also their broadcast."""
    wait_seconds: float
    """Waiting for the last rank; mean over ranks."""
    slowest_rank: int
    """The rank that was most often the last to finish its backward pass; -1 with one
    rank."""
    slowest_steps: int
    """Number of steps in which it was last."""
    late_seconds: float
    """Sum of its delays in these steps, relative to the median rank."""
    gpu_bytes: int | None = None
    """Peak GPU memory of a rank in bytes; ``None`` without GPUs."""

    @property
    def samples_per_second(self) -> float:
        """Samples per second, over all ranks."""
        return self.num_samples / self.seconds


@dataclass(frozen=True, kw_only=True)
class EpochMetrics:
    """The metrics of one epoch. Equal on all ranks, except for the seconds."""

    stage: str
    """``train``, ``probe`` or ``finetune``."""
    epoch: int
    """Number of the epoch, from 1, over all stages."""
    step: int
    """Steps done since the start of the training."""
    train_loss: float
    """Mean training loss per sample."""
    train_samples: int
    """Training samples, over all ranks."""
    values: Mapping[str, float]
    """Validation metrics, means per sample: ``loss``, and others such as ``accuracy``
    (0 to 1)."""
    val_samples: int
    """Validation samples, over all ranks."""
    skipped_samples: int
    """Samples that could not be read, over all ranks."""
    skipped_steps: int
    """Steps that were not applied since their gradient was not finite."""
    steps_seconds: float
    """Wall time of the steps on this rank."""
    epoch_seconds: float
    """Wall time of the epoch on this rank, validation included."""

    @property
    def samples_per_second(self) -> float:
        """Samples per second of the steps, over all ranks; nan without steps."""
        if not self.steps_seconds:
            return math.nan
        return self.train_samples / self.steps_seconds
