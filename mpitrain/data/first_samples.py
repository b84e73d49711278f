"""Whether the first sample of a data set is the same on all ranks, and in all jobs."""

from __future__ import annotations

import logging
from typing import Any

from mpitrain.data.in_memory import InMemory
from mpitrain.data.iterable import IterableStyle
from mpitrain.data.map_style import MapStyle
from mpitrain.data.samples import (
    LoadedBatch,
    digest,
    plain_leaves,
    values_digest,
    without_folders,
)
from mpitrain.mpi.shared_arrays import Communicator
from mpitrain.mpi.world import World

logger = logging.getLogger("mpitrain")

MAX_CHARS = 200  # of a text in a message


def check_first_samples(
    samples: InMemory | MapStyle | IterableStyle,
    what: str,
    world: World,
    ranks: Communicator,
    expected: str,
) -> str:
    """Refuse other tensors or arrays on another rank, and warn of other texts.

    Collective. Return the digest of rank zero's first sample; empty if it is another
    one when it is read again.
    """
    first = samples.example()
    again = first if isinstance(samples, InMemory) else samples.reread_example()
    draws = digest(again[:2]) != digest(first[:2])
    varies = values_digest(again[:2]) != values_digest(first[:2])
    found = ranks.allgather((draws, varies))
    draws, varies = (any(of_ranks) for of_ranks in zip(*found, strict=True))
    if draws and world.is_rank_zero:
        logger.warning(
            "the first sample of %s differs when it is read again, so results depend "
            "on the number of ranks; draw from torch.rand, numpy.random or random, "
            "which are seeded for each sample, or seed a generator by epoch and index",
            what,
        )
    if draws and isinstance(samples, MapStyle):
        return ""  # it may differ between ranks
    ranks.check_equal(
        (digest if varies else values_digest)(first[:2]),
        f"the first sample of {what}",
        expected,
    )
    plain, later = _plain_of(first), _plain_of(again)
    # Without what no two reads have in common, such as a time.
    plain = {name: it for name, it in plain.items() if later.get(name) == it}
    _warn_of_other_texts(plain, what, world, ranks)
    # Numbers beside the tensors may be of the job, such as that of a process.
    texts = [without_folders(it) for it in plain.values() if isinstance(it, str)]
    mine = "" if varies else values_digest(first[:2], texts)
    return ranks.allgather(mine)[0]


def warn_of_other_order(what: str, before: str) -> None:
    """Warn that a resumed data set begins with another sample than before; local."""
    # No error: decoders of another machine may round otherwise.
    logger.warning(
        "%s is not that of %s: the data set has another order, or other samples or "
        "transforms. The rest of an epoch may then have samples twice, and others "
        "never; expected the same order in each job, such as that of sorted(names)",
        *(what, before),
    )


def _plain_of(loaded: LoadedBatch) -> dict[str, Any]:
    if loaded.targets is None:
        return dict(plain_leaves(loaded.inputs))
    return dict(plain_leaves({"inputs": loaded.inputs, "targets": loaded.targets}))


def _warn_of_other_texts(
    plain: dict[str, Any], what: str, world: World, ranks: Communicator
) -> None:
    """Name a text, or another plain value, that is another one on another rank."""
    # No error: the files may be elsewhere on each node, and a name tells less than
    # tensors. What is no tensor reaches no collective.
    texts = {name: repr(without_folders(it)) for name, it in plain.items()}
    mine = {
        name: (values_digest([], [it]), it[:MAX_CHARS]) for name, it in texts.items()
    }
    summary = values_digest([], sorted(map(str, mine.items())))
    if len(set(ranks.allgather(summary))) == 1:
        return
    first, *rest = ranks.allgather(mine)
    for rank, other in enumerate(rest, 1):
        differing = (
            name for name in first if other.get(name, first[name]) != first[name]
        )
        if (name := next(differing, None)) is not None:
            if world.is_rank_zero:
                logger.warning(
                    "the first sample of %s has the same tensors on all ranks, but %s "
                    "is %s on rank 0 and %s on rank %d; expected the same data in the "
                    "same order on every rank",
                    *(what, name or "its value", first[name][1], other[name][1], rank),
                )
            return
