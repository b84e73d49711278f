"""Which samples belong to which step, rank and microstep. Pure functions.

The order of an epoch depends on the seed and the epoch alone. A step takes the next
`global_batch_size` samples of it, whatever the number of ranks; the last step takes
what is left. The ranks cut the step's samples into consecutive shards whose sizes
differ by at most one: no sample is padded, dropped or seen twice.
"""

from __future__ import annotations

from collections.abc import Iterator

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


def shard_of(samples: Indices, rank: int, world_size: int) -> Indices:
    """Return one rank's consecutive share; empty where ranks outnumber samples.

    >>> [shard_of(np.arange(7), rank, 3).tolist() for rank in range(3)]
    [[0, 1], [2, 3], [4, 5, 6]]
    """
    start = len(samples) * rank // world_size
    stop = len(samples) * (rank + 1) // world_size
    return samples[start:stop]


def largest_shard(num_samples: int, world_size: int) -> int:
    """Return the size of the largest share.

    >>> largest_shard(7, 3), largest_shard(1, 8)
    (3, 1)
    """
    return -(-num_samples // world_size)
