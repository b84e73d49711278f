"""Exact evaluation: every sample once, sums over all ranks, then one division."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mpitrain.data.sharding import Share
from mpitrain.errors import DataError, UsageError, agreed
from mpitrain.record.events import Progress
from mpitrain.train.feed import Feed
from mpitrain.train.first_batch import WrongLabel

BATCH_SIZE = 256
"""Samples that one rank evaluates at once; does not change any result."""

Loss = Callable[[Any, Any], Tensor]
"""Maps a model's outputs and targets to losses `(N,)`, or to their mean."""

Values = Callable[[Any, Any], Mapping[str, Tensor]]
"""Maps a model's outputs and targets to values by name, each `(N,)` or their mean."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """How good a model is on a set of samples. Equal on all ranks."""

    values: Mapping[str, float]
    """Mean per sample of each value by name: ``loss``, and for classes ``accuracy``."""
    num_samples: int
    """How many samples that was."""

    @property
    def loss(self) -> float:
        """Mean loss per sample."""
        return self.values["loss"]

    def goodness(self, best_by: str | None = None) -> float | None:
        """Return how good the model is by one metric: more is better.

        Args:
            best_by: See `CheckpointConfig`.

        Returns:
            The metric, negated where less is better; ``None`` if it is not finite.

        Raises:
            UsageError: There is no such metric; on every rank.
        """
        default = "accuracy" if "accuracy" in self.values else "loss"
        mode, _, name = (best_by or default).rpartition(":")
        name = name.removeprefix("val_")
        if name not in self.values:
            raise agreed(
                UsageError(
                    f"--best-by {best_by}: found no such metric in the validation; "
                    f"expected one of {', '.join(self.values)}"
                )
            )
        is_lower_better = mode == "min" or (
            not mode and any(word in name.lower() for word in ("loss", "error"))
        )
        found = -self.values[name] if is_lower_better else self.values[name]
        return found if math.isfinite(found) else None

    @property
    def accuracy(self) -> float:
        """Share of the samples whose class was found, 0 to 1."""
        return self.values["accuracy"]


@torch.no_grad()
def evaluate(
    forward: Callable[[Any], Any],
    feed: Feed,
    share: Share,
    values: Values,
    progress: Progress,
) -> Evaluation:
    """Judge a model on every sample exactly once.

    Collective over the default group.

    Args:
        forward: Maps a batch's inputs to the model's outputs; the model is in the mode
            for evaluation.
        feed: What to judge it by.
        share: What this rank takes of it.
        values: What is summed up.
        progress: Told of every batch.

    Returns:
        Sums over all ranks, divided by the count over all ranks.
    """
    sums: dict[str, Tensor] = {}
    count = 0
    for step in feed.steps(share, epoch=0):
        for batch in step.microsteps:
            progress("evaluation")
            outputs = forward(batch.inputs)
            num = len(batch)
            try:
                by_name = values(outputs, batch.targets)
            except WrongLabel as wrong:
                raise wrong.named(batch.indices) from None
            for name, found in by_name.items():
                found = torch.as_tensor(found, dtype=torch.float64)
                summed = per_sample_sum(found, num)
                sums[name] = sums[name] + summed if name in sums else summed
            count += num
    names = list(sums)  # every rank has at least one batch, and so the same names
    device = sums[names[0]].device if names else torch.device("cpu")
    totals = torch.tensor([0.0] * len(names) + [count], dtype=torch.float64)
    totals = totals.to(device)
    for place, name in enumerate(names):
        totals[place] = sums[name]
    if dist.get_world_size() > 1:
        dist.all_reduce(totals)
    *found_sums, total = totals.tolist()
    if not total:
        raise agreed(DataError("none of the samples to validate by could be read"))
    return Evaluation(
        values={name: x / total for name, x in zip(names, found_sums, strict=True)},
        num_samples=int(total),
    )


def per_sample_sum(values: Tensor, num: int) -> Tensor:
    """Sum values up over the samples that count.

    Args:
        values: `(N or more, ...)`, one per sample or its pixels, which are averaged; or
            a scalar: the mean of all.
        num: How many samples count: N.

    >>> per_sample_sum(torch.tensor([1.0, 2.0, 9.0]), 2), per_sample_sum(
    ...     torch.tensor(3.0), 2)
    (tensor(3.), tensor(6.))
    """
    if values.ndim == 0:
        return values * num
    if values.ndim > 1:
        values = values.flatten(1).mean(1)
    return (values if values.shape[0] == num else values[:num]).sum()
