"""The outputs of a model for each sample of a data set, once and in its order."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from mpitrain.data.loader import Batch, BatchLoader
from mpitrain.data.samples import kind_of, map_tensors
from mpitrain.data.sharding import Indices, RankShard
from mpitrain.errors import DataError
from mpitrain.launch.job import heartbeat
from mpitrain.mpi.shared_arrays import Communicator
from mpitrain.train.evaluate import steps_of_evaluation

logger = logging.getLogger("mpitrain")

Writer = Callable[[Indices, list[Any]], object]
"""Takes numbers of samples, int64 `(N,)`, and their outputs, on the CPU."""


@torch.no_grad()
def predict(
    step_fn: Callable[[Batch], Any],
    loader: BatchLoader,
    rank_shard: RankShard,
    ranks: Communicator,
    write: Writer | None,
    seed_batch: Callable[[int], object],
) -> tuple[list[Any] | None, int]:
    """Return each sample's outputs on rank zero, or write them; and their number.

    Collective. As in `evaluate`, a rank without samples has a batch for the model's
    collectives. A sample that is skipped has the outputs ``None``, and is not written.
    """
    found: dict[int, Any] = {}
    num_samples = 0  # of this rank
    for step in steps_of_evaluation(loader, rank_shard):
        number = step.number * rank_shard.world_size + rank_shard.rank
        for batch in step.micro_batches:
            heartbeat("prediction")
            seed_batch(number)
            outputs = map_tensors(lambda x: x.cpu(), step_fn(batch))
            num = len(batch)
            mine = _samples_of(outputs, batch.num_rows)[:num] if num else []
            num_samples += num
            if write is not None:
                if num:
                    write(batch.indices, mine)
                continue
            # Step by step, so that no message is large. A clone: to pickle a view is to
            # send all of the batch.
            mine = [map_tensors(torch.clone, it) for it in mine]
            for indices, of_rank in ranks.gather((batch.indices, mine)):
                found.update(zip(indices.tolist(), of_rank, strict=True))
    of_ranks = ranks.allgather((num_samples, loader.skipped))
    num_samples = sum(num for num, _ in of_ranks)
    if rank_shard.rank == 0:
        _warn_of_skipped([error for _, skipped in of_ranks for error in skipped])
    if write is not None or rank_shard.rank:
        return None, num_samples
    # Of a stream all that came; of a set with a length also what was skipped, as None.
    total = loader.samples.num_samples
    numbers = sorted(found) if total is None else range(total)
    return [found.get(number) for number in numbers], num_samples


def _warn_of_skipped(skipped: list[str]) -> None:
    for error in skipped:
        logger.info("skipped: %s", error)
    if skipped:
        logger.warning(
            "%d samples cannot be read: predict has None in place of their outputs, or "
            "does not write them; the first is %s",
            len(skipped),
            skipped[0],
        )


def _samples_of(outputs: Any, num_rows: int) -> list[Any]:
    """Split a batch's outputs into those of its samples.

    A tensor has a row for each sample, a list an element; tuples and dicts have parts.

    >>> _samples_of({"scores": torch.tensor([1, 2]), "names": ["a", "b"]}, 2)
    [{'scores': tensor(1), 'names': 'a'}, {'scores': tensor(2), 'names': 'b'}]
    """
    if isinstance(outputs, dict):
        parts = [_samples_of(part, num_rows) for part in outputs.values()]
        rows = zip(*parts, strict=True)
        return [dict(zip(outputs, row, strict=True)) for row in rows]
    if isinstance(outputs, tuple):
        return list(zip(*(_samples_of(it, num_rows) for it in outputs), strict=True))
    if outputs is None:
        return [None] * num_rows
    is_scalar = isinstance(outputs, Tensor) and not outputs.ndim
    is_split = isinstance(outputs, Tensor | list) and not is_scalar
    if not is_split or len(outputs) != num_rows:
        raise DataError(
            f"the outputs of a batch of {num_rows} rows are {kind_of(outputs)}; "
            "expected a tensor of as many rows, a list of as many elements, or tuples "
            "and dicts of them"
        )
    return list(outputs)
