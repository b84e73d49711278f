"""Exact evaluation: every sample once, summed over all ranks, then divided."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from mpitrain.data.sharding import RankShard
from mpitrain.errors import DataError, UsageError
from mpitrain.launch.current import heartbeat
from mpitrain.mpi.shared_arrays import Communicator
from mpitrain.train.checks import WrongLabel, kind_of
from mpitrain.train.loader import BatchLoader
from mpitrain.train.step_metrics import sum_exactly, sum_over_ranks

BATCH_SIZE = 256  # samples per forward pass of a rank; does not change any result

LossFn = Callable[[Any, Any], Tensor]
"""Maps a model's outputs and targets to losses `(N,)`, or to their mean."""

MetricsFn = Callable[[Any, Any], Mapping[str, Tensor]]
"""Maps a model's outputs and targets to values by name, each `(N,)` or their mean."""


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """The metrics of a model on a data set. Equal on all ranks."""

    values: Mapping[str, float]
    """Mean per sample by name: ``loss``, and others such as ``accuracy``."""
    num_samples: int  # number of samples

    @property
    def loss(self) -> float:
        """Mean loss per sample."""
        return self.values["loss"]

    @property
    def accuracy(self) -> float:
        """Fraction of samples classified correctly, 0 to 1."""
        return self.values["accuracy"]


def score_of(values: Mapping[str, float], best_by: str | None = None) -> float | None:
    """Return the metric that the best checkpoint is chosen by; ``None``: not finite.

    Negated where lower is better. ``best_by`` is that of `CheckpointConfig`.
    """
    default = "accuracy" if "accuracy" in values else "loss"
    mode, _, name = (best_by or default).rpartition(":")
    name = name.removeprefix("val_")
    if name not in values:
        raise UsageError(
            f"--best-by {best_by}: found no such metric in the validation; "
            f"expected one of {', '.join(values)}"
        ).on_all_ranks()
    is_lower_better = mode == "min" or (
        not mode and any(word in name.lower() for word in ("loss", "error"))
    )
    found = -values[name] if is_lower_better else values[name]
    return found if math.isfinite(found) else None


@torch.no_grad()
def evaluate(
    forward: Callable[[Any], Any],
    loader: BatchLoader,
    rank_shard: RankShard,
    ranks: Communicator,
    metrics: MetricsFn,
    on_batch_end: Callable[[], object] = lambda: None,
    seed_batch: Callable[[int], object] = lambda _: None,
) -> Evaluation:
    """Compute the metrics over every sample once; collective, in evaluation mode.

    With --bitwise ``seed_batch`` seeds what a batch draws, by its number.
    """
    sums: dict[str, Tensor] = {}
    of_batches: list[Tensor] = []  # with --bitwise
    numbers = iter(_numbers(rank_shard))
    count = 0
    for step in loader.steps(rank_shard, epoch=0):
        for batch in step.micro_batches:
            heartbeat("evaluation")
            if (number := next(numbers, None)) is not None:
                seed_batch(number)
            outputs = forward(batch.inputs)
            num = len(batch)
            try:
                values = metrics(outputs, batch.targets)
            except WrongLabel as wrong:
                raise wrong.named(batch.indices) from None
            if sums and values.keys() != sums.keys():
                raise DataError(
                    f"metrics returned {', '.join(values)}, and {', '.join(sums)} for "
                    "an earlier batch; expected the same names for every batch"
                )
            of_batch = {}
            for name, value in values.items():
                value = torch.as_tensor(value, dtype=torch.float64)
                of_batch[name] = sum_over_samples(value, num, batch.num_rows, name)
            sums = {name: sums[name] + of_batch[name] for name in sums} or of_batch
            if rank_shard.numbering is not None:
                of_batches.append(torch.stack([of_batch[name] for name in sums]))
            count += num
            on_batch_end()
    ranks.check_equal(
        f"({', '.join(sums)})", "what metrics returned", "Expected the same names"
    )
    device = next((summed.device for summed in sums.values()), None)
    counted = torch.tensor(count, dtype=torch.float64, device=device)
    totals = torch.stack([*sums.values(), counted])
    if dist.get_world_size() > 1:
        dist.all_reduce(totals)
    *found, total = totals.tolist()
    if rank_shard.numbering is not None:
        found = _sums_in_order(of_batches, rank_shard)
    if not total:
        error = DataError("none of the samples to validate by could be read")
        raise error.on_all_ranks()
    return Evaluation(
        values={name: value / total for name, value in zip(sums, found, strict=True)},
        num_samples=int(total),
    )


def _num_batches(rank_shard: RankShard) -> int:
    assert rank_shard.order is not None
    return -(-len(rank_shard.order) // (rank_shard.micro_batch_size or 1))


def _numbers(rank_shard: RankShard) -> Sequence[int]:
    """Return the numbers of this rank's batches; with --bitwise."""
    if rank_shard.numbering is None:
        return ()
    return rank_shard.numbering.of_rank(rank_shard.rank, _num_batches(rank_shard))


def _sums_in_order(of_batches: list[Tensor], rank_shard: RankShard) -> list[float]:
    """Sum the metrics of batches, each `(num_metrics,)`, in the order of batches."""
    num = _num_batches(rank_shard)
    whole = of_batches[0].new_zeros((num, len(of_batches[0])))
    for number, of_batch in zip(_numbers(rank_shard), of_batches, strict=False):
        if number < num:
            whole[number] = of_batch
    whole = sum_over_ranks(whole)
    return [sum_exactly(column) for column in whole.T.tolist()]


def sum_over_samples(
    values: Tensor, num: int, num_rows: int, name: str = "loss"
) -> Tensor:
    """Sum values over the ``num`` samples of a batch, without its padding.

    There is one value per row, `(num_rows,)`, or several, `(num_rows, ...)`, which are
    averaged; or a scalar: the mean over the samples. Padding may be cut off.

    >>> sum_over_samples(torch.tensor([1.0, 2.0, 9.0]), 2, 3), sum_over_samples(
    ...     torch.tensor(3.0), 2, 3)
    (tensor(3.), tensor(6.))
    """
    if values.ndim == 0:
        return values * num if num else values.nan_to_num(0.0, 0.0, 0.0) * 0.0
    if values.shape[0] not in (num, num_rows):
        raise DataError(
            f"the {name} of a batch of {num_rows} rows is {kind_of(values)}; "
            f"expected one for each row, ({num_rows},), or their mean, ()"
        )
    if values.ndim > 1:
        values = values.flatten(1).mean(1)
    return (values if values.shape[0] == num else values[:num]).sum()
