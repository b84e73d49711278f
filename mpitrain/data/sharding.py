"""Which samples belong to which step, rank and micro-batch. Pure functions.

The order of an epoch depends on the seed and the epoch alone. A step takes the next
`global_batch_size` samples, whatever the number of ranks; the last step takes what is
left. The ranks cut a step's samples into consecutive shards whose sizes differ by at
most one: no sample is padded, dropped or seen twice.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]


def epoch_order(num_samples: int, seed: int, epoch: int) -> Indices:
    """Return the order in which an epoch sees the samples, equal on all machines."""
    generator = np.random.Generator(np.random.PCG64([seed, epoch]))
    return generator.permutation(num_samples).astype(np.int64)


def shard_bounds(num_samples: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return where one rank's consecutive shard of some samples begins and ends.

    A shard is empty if ranks outnumber samples, but never rank zero's: its batch norm
    statistics are the ones that are kept.

    >>> [shard_bounds(7, rank, 3) for rank in range(3)]
    [(0, 3), (3, 5), (5, 7)]
    """
    start, stop = (-(-num_samples * at // world_size) for at in (rank, rank + 1))
    return start, stop


def max_shard_size(num_samples: int, world_size: int) -> int:
    """Return the size of the largest shard."""
    return -(-num_samples // world_size)


@dataclass(frozen=True, kw_only=True)
class RankShard:
    """What one rank takes of an epoch, by step and micro-batch.

    Iterating yields all micro-batches of all steps; twice the same, in any process.
    """

    rank: int  # whose shard
    world_size: int  # ranks that share every step
    global_batch_size: int  # samples per step, over all ranks
    micro_batch_size: int | None = None
    """Maximum samples of a micro-batch; ``None``: the whole shard of a step."""
    order: Indices | None = None
    """The epoch's samples; ``None``: 0, 1, 2 ... without end."""
    first_step: int = 0  # steps of the epoch that are done already (resume)
    max_steps: int | None = None
    """Last step plus one, counted from the epoch's first step; ``None``: all."""
    taken: tuple[int, ...] = ()
    """On resume of a stream with a `shard` method: samples already read of each of its
    shards. The number of its shards stays as it was, whatever the number of ranks."""
    with_partner: bool = False
    """Whether each micro-batch begins with one sample more: the one before it in the
    step, on whatever rank (mixup); before the first one comes the last."""

    @property
    def stream_shard(self) -> tuple[int, int]:
        """Into how many shards a stream is cut, and which one is this rank's.

        If a step has fewer samples than ranks, some ranks never take any, so they must
        not read a shard of their own: it would be lost.

        >>> [
        ...     RankShard(rank=rank, world_size=3, global_batch_size=2).stream_shard
        ...     for rank in range(3)
        ... ]
        [(2, 0), (2, 1), (2, 1)]
        """
        num_shards = min(self.world_size, self.global_batch_size)
        start, _ = shard_bounds(num_shards, self.rank, self.world_size)
        return num_shards, min(start, num_shards - 1)

    def steps(self) -> Iterator[tuple[int, list[Indices]]]:
        """Yield each step: its samples over all ranks, and this rank's micro-batches.

        All ranks have the same number of micro-batches; some may be empty.

        >>> order = np.array([7, 3, 9, 1, 4])
        >>> shard = RankShard(rank=1, world_size=2, global_batch_size=3, order=order)
        >>> [(num, [rows.tolist() for rows in mine]) for num, mine in shard.steps()]
        [(3, [[9]]), (2, [[4]])]
        """
        for samples in itertools.islice(self._steps(), self.first_step, self.max_steps):
            num = len(samples)
            largest = max_shard_size(num, self.world_size)
            size = min(self.micro_batch_size or largest, largest)
            start, stop = shard_bounds(num, self.rank, self.world_size)
            cuts = [
                (at, min(at + size, stop)) for at in range(start, start + largest, size)
            ]
            yield num, [self._rows(samples, *cut) for cut in cuts]

    def __iter__(self) -> Iterator[Indices]:
        for _, micro_batches in self.steps():
            yield from micro_batches

    def _steps(self) -> Iterator[Indices]:
        size, order = self.global_batch_size, self.order
        if order is not None:
            yield from (order[at : at + size] for at in range(0, len(order), size))
            return
        for start in itertools.count(0, size):
            yield np.arange(start, start + size, dtype=np.int64)

    def _rows(self, samples: Indices, start: int, stop: int) -> Indices:
        if start >= stop:
            return samples[:0]
        if not self.with_partner:
            return samples[start:stop]
        return np.concatenate([samples[[start - 1]], samples[start:stop]])
