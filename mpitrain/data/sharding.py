"""Which samples belong to which step, rank and micro-batch. Pure functions.

The order of an epoch depends on the seed and the epoch alone. A step takes the next
`global_batch_size` samples, whatever the number of ranks; the last step takes what is
left. The ranks cut a step's samples into consecutive shards whose sizes differ by at
most one, or of about equal costs: no sample is padded, dropped or seen twice.
"""

from __future__ import annotations

import functools
import heapq
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]


def epoch_order(num_samples: int, seed: int, epoch: int) -> Indices:
    """Return the order in which an epoch sees the samples, equal on all machines."""
    # Another NumPy may permute otherwise (NEP 19), so a test holds the first numbers.
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


def cost_bounds(costs: npt.NDArray[np.float64], world_size: int) -> list[int]:
    """Return where the consecutive shards of all ranks begin, and the last one ends.

    Each has about as much of the costs, which are positive: a boundary is the one next
    to an equal part, so no shard exceeds the mean by more than the largest cost.

    >>> cost_bounds(np.array([6.0, 1.0, 1.0, 1.0, 3.0]), 3)
    [0, 1, 3, 5]
    """
    ends = np.concatenate([[0.0], np.cumsum(costs)])
    wanted = ends[-1] / world_size * np.arange(1, world_size)
    above = np.searchsorted(ends, wanted).clip(1, len(costs))
    is_below = wanted - ends[above - 1] < ends[above] - wanted
    # The shard of rank zero is never empty, as in `shard_bounds`.
    return [0, *(above - is_below).clip(1).tolist(), len(costs)]


def max_shard_size(num_samples: int, world_size: int) -> int:
    """Return the size of the largest shard."""
    return -(-num_samples // world_size)


def evaluation_batch_size(num_samples: int, global_batch_size: int, most: int) -> int:
    """Return the size of an evaluation's batches, on any number of ranks.

    A 64th of the set, so that many ranks are busy; at least half a step's, or 32.

    >>> [evaluation_batch_size(num, 64, 256) for num in (512, 10_000, 50_000)]
    [32, 157, 256]
    """
    least = min(32, max_shard_size(global_batch_size, 2))
    return min(most, max(least, max_shard_size(num_samples, 64)))


def pad_rows(indices: Indices, min_rows: int) -> Indices:
    """Repeat the last of some numbers, if there are any, up to a number of rows.

    >>> pad_rows(np.array([4]), 2), len(pad_rows(np.array([], np.int64), 2))
    (array([4, 4]), 0)
    """
    missing = min_rows - len(indices)
    if missing <= 0 or not len(indices):
        return indices
    return np.concatenate([indices, np.repeat(indices[-1:], missing)])


@dataclass(frozen=True, kw_only=True)
class MicroBatchAssignment:
    """Which rank takes which micro-batches of a step, where these are fixed.

    They are cut from the step alone, and numbered from 0.

    >>> [list(MicroBatchAssignment(world_size=2).of_rank(rank, 3)) for rank in (0, 1)]
    [[0, 1], [2]]
    >>> MicroBatchAssignment(world_size=2, is_interleaved=True).of_rank(1, 4)
    range(1, 4, 2)
    >>> fast_first = MicroBatchAssignment(world_size=3, speeds=(2.0, 1.0, 1.0))
    >>> [len(fast_first.of_rank(rank, 8)) for rank in range(3)]
    [4, 2, 2]
    """

    world_size: int
    is_interleaved: bool = False
    """Whether each rank takes as many, one in turn; there may be numbers too large."""
    speeds: tuple[float, ...] = ()
    """Speeds of the ranks, in any unit; empty: as if equal."""

    def of_rank(self, rank: int, num: int) -> range:
        """Return the numbers of one rank, out of ``num``."""
        if self.is_interleaved:
            end = max_shard_size(num, self.world_size) * self.world_size
            return range(rank, end, self.world_size)
        bounds = _bounds(self, num)
        return range(bounds[rank], bounds[rank + 1])

    def all_ranks(self, num: int) -> list[range]:
        """Return the numbers of each rank."""
        return [self.of_rank(rank, num) for rank in range(self.world_size)]


# Cached, since each step asks for each rank's numbers, and steps have few sizes.
@functools.lru_cache(maxsize=64)
def _bounds(assignment: MicroBatchAssignment, num: int) -> tuple[int, ...]:
    size, speeds = assignment.world_size, assignment.speeds
    if not speeds or num < size:
        return tuple(-(-num * rank // size) for rank in range(size + 1))
    counts = [1] * size  # a rank without any would never be measured again
    # The next one is for the rank that would be done with it first; of equal ones for
    # the first, so that all ranks find the same.
    ends = [(2 / speed, rank) for rank, speed in enumerate(speeds)]
    heapq.heapify(ends)
    for _ in range(num - size):
        _, rank = ends[0]
        counts[rank] += 1
        heapq.heapreplace(ends, ((counts[rank] + 1) / speeds[rank], rank))
    return (0, *itertools.accumulate(counts))


class StreamPlace(NamedTuple):
    """Where a stream is that knows it."""

    num_read: int  # samples before
    state: Any  # of the stream, as plain values
    digest: str  # of the next sample


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
    batches: Sequence[Indices] | None = None
    """Those of each step, if steps are not of `global_batch_size` samples."""
    costs: npt.NDArray[np.float64] | None = None
    """Of each sample of the set, `(N,)`: shards are cut by them, not by numbers."""
    first_step: int = 0  # steps of the epoch that are done already (resume)
    max_steps: int | None = None
    """Last step plus one, counted from the epoch's first step; ``None``: all."""
    samples_read_per_shard: tuple[int, ...] = ()
    """On resume of a stream with a `shard` method: samples already read of each of its
    shards. The number of its shards stays as it was, whatever the number of ranks."""
    places: Mapping[int, StreamPlace] = field(default_factory=dict)
    """On resume of a stream that knows its place: one in each shard, no later one."""
    assignment: MicroBatchAssignment | None = None
    """Takes micro-batches of `micro_batch_size` whose cuts do not depend on ranks."""
    prepends_partner: bool = False
    """Whether each micro-batch begins with one sample more: the one before it in the
    step, on whatever rank, as mixup wants; before the first one comes the last."""

    min_rows: int = 1
    """Rows of a batch with samples: where these are fewer, the last is repeated."""

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

        Without an `assignment` all ranks have the same number of micro-batches; some
        may be empty. With one they have what it says, or an empty one.

        >>> order = np.array([7, 3, 9, 1, 4])
        >>> shard = RankShard(rank=1, world_size=2, global_batch_size=3, order=order)
        >>> [(num, [rows.tolist() for rows in mine]) for num, mine in shard.steps()]
        [(3, [[9]]), (2, [[4]])]
        """
        for samples in itertools.islice(self._steps(), self.first_step, self.max_steps):
            stop = num = len(samples)
            if self.assignment is not None:
                size = self.micro_batch_size or num
                numbers = self.assignment.of_rank(self.rank, -(-num // size))
                starts: Iterable[int] = [at * size for at in numbers] or [num]
            else:
                start, stop = shard_bounds(num, self.rank, self.world_size)
                largest = max_shard_size(num, self.world_size)
                if self.costs is not None:
                    bounds = cost_bounds(self.costs[samples], self.world_size)
                    start, stop = bounds[self.rank : self.rank + 2]
                    largest = int(np.diff(bounds).max())
                size = min(self.micro_batch_size or largest, largest)
                # Up to the end of the largest shard, not of this one: each micro-batch
                # has collectives, of the model or of DDP, which need every rank.
                starts = range(start, start + largest, size)
            yield num, [self._rows(samples, at, min(at + size, stop)) for at in starts]

    def __iter__(self) -> Iterator[Indices]:
        for _, micro_batches in self.steps():
            yield from micro_batches

    def _steps(self) -> Iterator[Indices]:
        size, order = self.global_batch_size, self.order
        if self.batches is not None:
            return iter(self.batches)
        if order is not None:
            return (order[at : at + size] for at in range(0, len(order), size))
        starts = itertools.count(0, size)
        return (np.arange(at, at + size, dtype=np.int64) for at in starts)

    def _rows(self, samples: Indices, start: int, stop: int) -> Indices:
        rows = samples[start : max(start, stop)]
        if not (self.prepends_partner and len(rows)):
            return rows
        # -1 before the first sample: its partner is the last one of the step.
        return np.concatenate([samples[[start - 1]], rows])
