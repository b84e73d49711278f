"""Which samples belong to which step, rank and microstep. Pure functions.

The order of an epoch depends on the seed and the epoch alone. A step takes the next
`global_batch_size` samples of it, whatever the number of ranks; the last step takes
what is left. The ranks cut the step's samples into consecutive shards whose sizes
differ by at most one: no sample is padded, dropped or seen twice.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Indices = npt.NDArray[np.int64]


def epoch_order(num_samples: int, seed: int, epoch: int) -> Indices:
    """Return the order in which an epoch sees the samples.

    Args:
        num_samples: Size of the data set.
        seed: The run's seed.
        epoch: The epoch's number.

    Returns:
        A permutation of ``0 ... num_samples - 1``, int64 `(num_samples,)`; equal on all
        ranks and machines.
    """
    generator = np.random.Generator(np.random.PCG64([seed, epoch]))
    return generator.permutation(num_samples).astype(np.int64)


def num_steps(num_samples: int, global_batch_size: int) -> int:
    """Return the number of steps of an epoch, the short last one included.

    >>> num_steps(1437, 64), num_steps(128, 64)
    (23, 2)
    """
    return -(-num_samples // global_batch_size)


def steps_of(order: Indices, global_batch_size: int) -> Iterator[Indices]:
    """Cut an epoch's order into steps.

    >>> [len(step) for step in steps_of(np.arange(10), 4)]
    [4, 4, 2]
    """
    for start in range(0, len(order), global_batch_size):
        yield order[start : start + global_batch_size]


def bounds_of(num_samples: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return where one rank's consecutive share of some samples begins and ends.

    It is empty where ranks outnumber samples, but never rank zero's: the statistics of
    its batch norm are the ones that are kept.

    >>> [bounds_of(7, rank, 3) for rank in range(3)]
    [(0, 3), (3, 5), (5, 7)]
    """
    start, stop = (-(-num_samples * at // world_size) for at in (rank, rank + 1))
    return start, stop


def largest_shard(num_samples: int, world_size: int) -> int:
    """Return the size of the largest share.

    >>> largest_shard(7, 3), largest_shard(1, 8)
    (3, 1)
    """
    return -(-num_samples // world_size)


@dataclass(frozen=True, kw_only=True)
class Share:
    """What one rank takes of an epoch, step by step and microstep by microstep.

    Iterating over it gives all microsteps of all steps, one after another; twice the
    same, in any process.
    """

    rank: int
    """Whose share."""
    world_size: int
    """Ranks that share every step."""
    global_batch_size: int
    """Samples per step, over all ranks."""
    micro_batch_size: int | None = None
    """Most samples of a microstep; ``None`` for all of the share."""
    order: Indices | None = None
    """The epoch's samples; ``None``: 0, 1, 2 ... without end."""
    first_step: int = 0
    """Where it begins: so many steps of the epoch are done."""
    max_steps: int | None = None
    """Steps after which it ends, counted from the epoch's first, though samples are
    left."""
    taken: tuple[int, ...] = ()
    """Of a set that ranks read in parts, in an epoch that is gone on with: how many
    samples were taken of each part. There are as many parts as before, whoever reads
    them now."""
    with_partner: bool = False
    """Whether each microstep begins with one sample more: the one that stands before in
    the step, on whatever rank; before the first stands the last."""

    @property
    def part(self) -> tuple[int, int]:
        """Into how many parts a set is cut that ranks read apart, and which is ours.

        Where a step has fewer samples than there are ranks, some take none, ever: what
        was theirs to read would be lost. They are told another's part.

        >>> [
        ...     Share(rank=rank, world_size=3, global_batch_size=2).part
        ...     for rank in range(3)
        ... ]
        [(2, 0), (2, 1), (2, 1)]
        """
        num_parts = min(self.world_size, self.global_batch_size)
        start, _ = bounds_of(num_parts, self.rank, self.world_size)
        return num_parts, min(start, num_parts - 1)

    def steps(self) -> Iterator[tuple[int, list[Indices]]]:
        """Yield each step: how many samples it has on all ranks, and our microsteps.

        As many microsteps on every rank; some may be empty.

        >>> order = np.array([7, 3, 9, 1, 4])
        >>> share = Share(rank=1, world_size=2, global_batch_size=3, order=order)
        >>> [(num, [rows.tolist() for rows in mine]) for num, mine in share.steps()]
        [(3, [[9]]), (2, [[4]])]
        """
        for samples in itertools.islice(self._steps(), self.first_step, self.max_steps):
            num = len(samples)
            largest = largest_shard(num, self.world_size)
            size = min(self.micro_batch_size or largest, largest)
            start, stop = bounds_of(num, self.rank, self.world_size)
            cuts = [
                (at, min(at + size, stop)) for at in range(start, start + largest, size)
            ]
            yield num, [self._rows(samples, *cut) for cut in cuts]

    def __iter__(self) -> Iterator[Indices]:
        for _, microsteps in self.steps():
            yield from microsteps

    def _steps(self) -> Iterator[Indices]:
        if self.order is not None:
            yield from steps_of(self.order, self.global_batch_size)
            return
        for start in itertools.count(0, self.global_batch_size):
            yield np.arange(start, start + self.global_batch_size, dtype=np.int64)

    def _rows(self, samples: Indices, start: int, stop: int) -> Indices:
        if start >= stop:
            return samples[:0]
        if not self.with_partner:
            return samples[start:stop]
        return np.concatenate([samples[[start - 1]], samples[start:stop]])
