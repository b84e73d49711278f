"""Samplers: what a user's function or torch's sampler says is in an epoch's steps.

The order depends on the seed and the epoch alone, as that of a training without one:
so a resumed training, and one on other ranks, has the same steps.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.utils.data import DistributedSampler

from mpitrain.data.randomness import seeded
from mpitrain.data.samples import kind_of
from mpitrain.data.sharding import Indices
from mpitrain.errors import DataError, UsageError

Sampler = Callable[[int, int], Sequence[int]] | Iterable[int]
"""A function of seed and epoch that returns the numbers of samples in the order of an
epoch, `(N,)`: some may come twice or never. Or torch's, such as
`WeightedRandomSampler`, whose generators are seeded for each epoch."""

BatchSampler = Callable[[int, int], Sequence[Sequence[int]]] | Iterable[Sequence[int]]
"""Likewise the numbers of the samples of each step, over all ranks. With an attribute
``costs``, a positive number for each sample of the set, `(N,)`, such as its tokens,
each rank takes about as much of a step's costs."""

SEEDED_AS = -2  # in place of a sample's number: samplers draw other numbers


class EpochOrder(NamedTuple):
    """The samples of an epoch."""

    samples: Indices
    batches: Sequence[Indices] | None = None  # of each step; ``None``: as many in each
    digest: str = ""  # empty without a sampler
    costs: npt.NDArray[np.float64] | None = None  # of all samples of the set


class Sampling:
    """A `sampler` or a `batch_sampler`; true if there is one. All is local."""

    def __init__(self, sampler: Any = None, batch_sampler: Any = None) -> None:
        if sampler is not None and batch_sampler is not None:
            raise UsageError("found sampler= and batch_sampler=; expected one of them")
        if getattr(sampler, "costs", None) is not None:
            raise UsageError("found costs of a sampler=; expected a batch_sampler=")
        self.has_batches = batch_sampler is not None
        self.name = "batch_sampler" if self.has_batches else "sampler"
        self._source = batch_sampler if self.has_batches else sampler
        found = f"{self.name} is a {type(self._source).__name__}"
        if any(isinstance(part, DistributedSampler) for part in _parts(self._source)):
            raise UsageError(
                f"{found} that shards the data, as mpitrain does (DistributedSampler); "
                "expected none, or one of all samples"
            )
        if self and not (callable(self._source) or hasattr(self._source, "__iter__")):
            raise UsageError(
                f"{found}; expected a function of seed and epoch, or a sampler of "
                "torch.utils.data"
            )

    def __bool__(self) -> bool:
        """Whether there is one."""
        return self._source is not None

    def order(self, seed: int, epoch: int, num_samples: int) -> EpochOrder:
        """Return the samples of an epoch; what it draws from torch, too, is seeded.

        Raises:
            DataError: Something is no number of a sample.
        """
        what = f"the {self.name} for epoch {epoch}"
        with seeded(seed, epoch, SEEDED_AS):
            found = self._ask(seed, epoch)
            if self.has_batches:
                found = [*found]  # a generator may draw, too
        if not self.has_batches:
            batches = [_checked(found, num_samples, what)]
        else:
            named = ((f"batch {i} of {what}", batch) for i, batch in enumerate(found))
            batches = [_checked(batch, num_samples, name) for name, batch in named]
        if not batches:
            raise DataError(f"{what} is empty; expected a batch at least")
        digest = hashlib.sha256()
        for batch in batches:
            # With their lengths: other cuts of the same numbers are other steps.
            digest.update(len(batch).to_bytes(8, "little") + batch.tobytes())
        return EpochOrder(
            np.concatenate(batches),
            batches if self.has_batches else None,
            digest.hexdigest()[:16],
            self._costs(num_samples) if self.has_batches else None,
        )

    def _costs(self, num_samples: int) -> npt.NDArray[np.float64] | None:
        """Return the costs of the samples of the set, if the batch sampler has some."""
        parts = (getattr(part, "costs", None) for part in _parts(self._source))
        found = next((it for it in parts if it is not None), None)
        if found is None:
            return None
        costs = np.asarray(found.cpu() if isinstance(found, Tensor) else found)
        kind = f"{costs.dtype} {costs.shape}"
        if costs.shape == (num_samples,) and costs.dtype.kind in "fiu":
            costs = costs.astype(np.float64)
            wrong = np.flatnonzero(~((costs > 0) & np.isfinite(costs)))
            if not len(wrong):
                return costs
            kind = f"{costs[wrong[0]]:g} for sample {wrong[0]}"
        raise DataError(
            f"the costs of the batch_sampler are {kind}; expected a positive number "
            f"for each sample of the training data, ({num_samples},)"
        )

    def _ask(self, seed: int, epoch: int) -> Any:
        if not hasattr(self._source, "__iter__"):
            return self._source(seed, epoch)
        for part in _parts(self._source):
            # Its own generator has drawn before, in this job alone.
            if isinstance(getattr(part, "generator", None), torch.Generator):
                part.generator.manual_seed(torch.initial_seed())
            if hasattr(part, "set_epoch"):
                part.set_epoch(epoch)
        return list(self._source)


def _parts(source: Any) -> Iterator[Any]:
    """Yield a sampler, and those in it."""
    while source is not None:
        yield source
        source = getattr(source, "sampler", None)


def _checked(found: Any, num_samples: int, what: str) -> Indices:
    try:
        numbers = np.asarray(found.cpu() if isinstance(found, Tensor) else found)
    except (TypeError, ValueError):  # ragged, as batches are
        numbers = np.array(None)
    if numbers.ndim == 1 and not len(numbers):
        raise DataError(f"{what} is empty; expected the numbers of samples")
    if numbers.ndim != 1 or not np.issubdtype(numbers.dtype, np.integer):
        kind = f"{numbers.dtype} {numbers.shape}" if numbers.ndim else kind_of(found)
        raise DataError(
            f"{what} is {kind}; expected the numbers of samples, integers (N,); those "
            "of each step in a list are for a batch_sampler"
        )
    wrong = numbers[(numbers < 0) | (numbers >= num_samples)]
    if len(wrong):
        raise DataError(
            f"{what} has the number {wrong[0]}; expected 0 to {num_samples - 1}, those "
            "of the training data"
        )
    return numbers.astype(np.int64)
