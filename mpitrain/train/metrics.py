"""What a training measures, and how far it has come. Imports no torch."""

from __future__ import annotations

import math
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

PHASES = (
    *("data", "forward", "backward", "communication", "update", "evaluation"),
    *("checkpoint", "other"),
)
"""What a rank spends its time on. ``data``: waiting for samples. ``communication``:
waiting for the gradient all-reduce after backward, and broadcasting buffers.
``update``: gradient norm, clipping and the optimizer. ``checkpoint``: copying one.
``other``: metrics are synchronized and logged."""

NUM_PHASES = len(PHASES)

DATA, FORWARD, BACKWARD, COMMUNICATION, UPDATE, EVALUATION, CHECKPOINT, OTHER = range(8)


# A tuple, no dataclass: of small models there are thousands a second.
class StepMetrics(NamedTuple):
    """The metrics of one step. Equal on all ranks."""

    epoch: int  # epoch of the step, from 1
    step: int  # number of the step, from 1, over all epochs
    loss: float  # mean loss per sample, or by weight, before the update
    lr: float  # learning rate of the optimizer's first parameter group
    grad_norm: float  # norm of the gradient of the mean loss, before clipping
    lr_groups: tuple[float, ...] = ()  # of each parameter group, where they differ
    losses: Mapping[str, float] = {}  # means of the other losses, by name


def mean(total: float, weight: float) -> float:
    """Return the mean; nan where nothing has a weight.

    >>> mean(3.0, 2.0), mean(0.0, 0.0)
    (1.5, nan)
    """
    return total / weight if weight else math.nan


KINDS = ("accuracy", "loss")
"""Metrics of which it is known which is better, also as the end of a name."""

LOWER_IS_BETTER = re.compile(
    "loss|error|(?<![a-z])"
    "(mae|mse|rmse|mape|nll|perplexity|wer|cer|ece|fid|distance)(?![a-z])"
)
"""What names of metrics contain of which the lowest is the best."""


def knows_best(names: Collection[str], best_by: str | None) -> bool:
    """Whether a metric is chosen by which an epoch can be the best.

    >>> knows_best(["miou"], None), knows_best(["a_loss"], None)
    (False, True)
    """
    return bool(best_by) or any(name.endswith(KINDS) for name in names)


def known_name(name: str, names: Collection[str]) -> str:
    """Return how a validation names a metric, ``val_loss`` being one's ``loss``.

    >>> known_name("val_loss", ["loss"]), known_name("val_loss", ["val_loss"])
    ('loss', 'val_loss')
    """
    without = name.removeprefix("val_")
    # A set named val, or a step that returns "val_loss", has the prefix by itself.
    return name if name in names and without not in names else without


def best_metric(names: Collection[str], best_by: str | None) -> tuple[str, bool]:
    """Return the metric by which the best epoch is chosen, and if lower is better.

    Of the validation's ``names`` accuracy, else loss, unless ``best_by`` names one; of
    several data sets that of the first. Else the first name, which is shown, but
    chooses no checkpoint, see `knows_best`.

    >>> best_metric(["loss", "miou"], "max:miou"), best_metric(["loss"], None)
    (('miou', False), ('loss', True))
    >>> best_metric(["a_loss", "b_loss"], None), best_metric(["mae"], "val_mae")
    (('a_loss', True), ('mae', True))
    >>> best_metric(["val_loss"], None), best_metric(["val_loss"], "val_loss")
    (('val_loss', True), ('val_loss', True))
    >>> best_metric(["east_MSE"], "east_MSE"), best_metric(["amse"], "amse")
    (('east_MSE', True), ('amse', False))
    """
    found = [kind for kind in KINDS if kind in names]
    found += [n for kind in KINDS for n in names if n.endswith(f"_{kind}")]
    default = next(iter([*found, *names]), "loss")
    # From the right: a name may have a colon, a mode has none.
    mode, _, name = (best_by or default).rpartition(":")
    name = known_name(name, names)
    is_lower = LOWER_IS_BETTER.search(name.lower()) is not None
    return name, mode == "min" or (not mode and is_lower)


def best_by_of(names: Collection[str], best_by: str | None) -> str | None:
    """Return the metric of `best_metric` with its direction, if it is a choice.

    >>> best_by_of(["loss", "f1"], "val_f1"), best_by_of(["loss"], None)
    ('max:f1', 'min:loss')
    >>> best_by_of(["miou"], None)
    """
    if not knows_best(names, best_by):
        return None
    name, is_lower_better = best_metric(names, best_by)
    return f"{'min' if is_lower_better else 'max'}:{name}"


@dataclass(frozen=True, kw_only=True)
class Throughput:
    """How fast some steps were, in wall time. Equal on all ranks."""

    epoch: int  # epoch of the last of the steps, from 1
    step: int  # number of the last of the steps, from 1, over all epochs
    num_steps: int
    num_samples: int  # samples in these steps, over all ranks
    seconds: float  # time of these steps on the rank that took longest for all of them
    data_seconds: float  # waiting for samples; mean over ranks
    compute_seconds: float  # forward and backward; mean over ranks
    # Gradient all-reduce after backward, on the rank that does not wait; with DDP and
    # buffers also their broadcast.
    communication_seconds: float
    wait_seconds: float  # waiting for the last rank; mean over ranks
    slowest_rank: int  # most often the last to finish its backward pass; -1 with one
    slowest_steps: int  # number of steps in which it was last
    late_seconds: float  # sum of its delays in these steps, relative to the median rank
    gpu_bytes: int | None = None  # peak GPU memory of a rank; ``None`` without GPUs

    @property
    def samples_per_second(self) -> float:
        """Samples per second, over all ranks."""
        return self.num_samples / self.seconds


@dataclass(frozen=True, kw_only=True)
class EpochMetrics:
    """The metrics of one epoch. Equal on all ranks, except for the seconds."""

    stage: str  # name: ``train``, ``probe`` and ``finetune``, or that of a `Stage`
    epoch: int  # number of the epoch, from 1, over all stages
    step: int  # steps done since the start of the training
    train_loss: float  # mean training loss per sample, or by weight
    train_samples: int  # training samples, over all ranks
    values: Mapping[str, float]  # of the validation: means per sample, such as ``loss``
    val_samples: int  # validation samples, over all ranks
    skipped_samples: int  # samples that could not be read, over all ranks
    skipped_steps: int  # steps not applied: their gradient was not finite
    steps_seconds: float  # wall time of the steps on this rank
    epoch_seconds: float  # wall time of the epoch on this rank, validation included
    train_losses: Mapping[str, float] = field(default_factory=dict)
    """Means of the other training losses, by name."""
    is_end: bool = True  # whether all its steps are done; else they are those until now

    @property
    def samples_per_second(self) -> float:
        """Samples per second of the steps, over all ranks; nan without steps."""
        if not self.steps_seconds:
            return math.nan
        return self.train_samples / self.steps_seconds


@dataclass(kw_only=True)
class TrainState:
    """How far a training has come. Equal on all ranks, except for the seconds."""

    step: int = 0  #: steps done, over all epochs
    epoch: int = 1
    """The current epoch, from 1; one more than the last when the training is done."""
    epoch_step: int = 0  #: steps done of the current epoch
    loss_sum: float = 0.0
    """Sum of the losses of the epoch, in the steps that were applied."""
    loss_weight: float | None = None  #: sum of their weights; ``None``: samples
    other_losses: dict[str, list[float]] = field(default_factory=dict)
    """Likewise of the losses that are only recorded, by name: sum, and sum of weights
    or number of samples."""
    num_samples: int = 0  #: samples of these steps
    skipped_steps: int = 0  #: steps of the epoch that were not applied
    skipped_samples: int = 0  #: samples of the epoch that could not be read
    steps_seconds: float = 0.0  #: wall time of the epoch's steps
    samples_per_shard: list[int] = field(default_factory=list)
    """Samples of the epoch that were taken from each shard of an iterable data set."""
    order_digest: str = ""  #: of the epoch's order, if a sampler made it
    metrics: dict[str, float] = field(default_factory=dict)
    """Metrics of the last validation."""
    val_samples: int = 0  #: samples of the last validation
    validated_step: int = -1  #: `step` of the last validation
    val_seconds: float = 0.0  #: wall time of the epoch's validations
    verified_step: int = 0
    """The last step after which all ranks had the same numbers (``verify_every``)."""

    @property
    def is_validated(self) -> bool:
        """Whether `metrics` are those of the weights after the last step."""
        return self.validated_step == self.step

    def epoch_metrics(self, stage: str, *, is_end: bool) -> EpochMetrics:
        """Return the metrics of the epoch until now."""
        num = self.num_samples
        weight = num if self.loss_weight is None else self.loss_weight
        others = {name: mean(*sums) for name, sums in self.other_losses.items()}
        return EpochMetrics(
            stage=stage,
            epoch=self.epoch,
            step=self.step,
            train_loss=mean(self.loss_sum, weight),
            train_losses=others,
            train_samples=num,
            values=self.metrics,
            val_samples=self.val_samples,
            skipped_samples=self.skipped_samples,
            skipped_steps=self.skipped_steps,
            steps_seconds=self.steps_seconds,
            epoch_seconds=self.steps_seconds + self.val_seconds,
            is_end=is_end,
        )

    def begin_next_epoch(self) -> None:
        """Begin the next epoch."""
        self.epoch += 1
        self.epoch_step = 0
        self.loss_sum, self.loss_weight, self.num_samples = 0.0, None, 0
        self.other_losses = {}
        self.skipped_steps = self.skipped_samples = 0
        self.steps_seconds = self.val_seconds = 0.0
        self.samples_per_shard = []
