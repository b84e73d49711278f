"""Samples that come one after another, how many is known at the end.

Every rank and every worker goes through the same stream, and keeps what falls to it:
the n-th sample belongs to the same step as in a set of known length, at any number of
ranks. A stream that can be cut, by a method `shard(num_shards, index)`, is read once
instead: each sample once, but in other steps at other numbers of ranks.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch.utils.data import IterableDataset, get_worker_info
from torch.utils.data._utils import worker as torch_worker

from mpitrain.data.loading import checked, collate
from mpitrain.data.nests import digest
from mpitrain.data.randomness import seeded
from mpitrain.data.samples import Loaded
from mpitrain.data.sharding import Indices, Share
from mpitrain.data.workers import Method, context_of, living, loader_of
from mpitrain.errors import DataError


class Stream:
    """An iterable data set.

    Args:
        dataset: Has ``__iter__``; may have `set_epoch(epoch)`, called before an epoch,
            and `shard(num_shards, index)`, which returns one part of it. To both,
            `get_worker_info` tells nothing: workers have been thought of.
        seed: The run's; of what its transforms draw.
        num_workers: Processes that read ahead; 0: this one reads.
        method: How they are started.
    """

    num_samples = None
    may_lack = True
    is_still = False

    def __init__(
        self,
        dataset: Any,
        *,
        seed: int,
        num_workers: int = 0,
        method: Method = "fork",
    ) -> None:
        self.dataset = dataset
        self._seed = seed
        self._num_workers = num_workers
        self._method = method

    @property
    def is_cut(self) -> bool:
        """Whether ranks read parts of it, not the whole."""
        return hasattr(self.dataset, "shard")

    def num_parts(self, share: Share) -> int:
        """Return into how many parts an epoch is cut; 0: ranks read the whole.

        Sample number n belongs to part n modulo that.
        """
        if not self.is_cut:
            return 0
        return len(share.taken) or share.part[0] * max(1, self._num_workers)

    def order(self, seed: int, epoch: int) -> Indices:
        """Refuse: only reading tells."""
        raise NotImplementedError

    def example(self) -> Loaded:
        """Return the first sample."""
        with seeded(self._seed, 0, 0):
            for sample in self.dataset:
                return checked(collate([(0, sample)]))
        raise DataError(
            f"the stream {type(self.dataset).__name__!r} has no samples; expected one "
            "at least"
        )

    def fingerprint(self) -> str:
        """Return a text that is equal on all ranks if the first sample is."""
        loaded = self.example()
        return digest((loaded.inputs, loaded.targets))

    def batches(self, share: Share, epoch: int) -> Iterator[Loaded]:
        """Read batches until the stream ends; then empty ones."""
        parts = _Parts(self.dataset, share, epoch, self._seed)
        context = context_of(self._method) if self._num_workers else None
        loader = loader_of(
            parts,
            batch_size=None,
            collate_fn=_as_it_is,  # else arrays become tensors
            num_workers=self._num_workers,
            multiprocessing_context=context,
        )
        loaded = map(checked, living(loader))
        nothing = collate([])
        for indices in share:  # where a step has none for us, no worker is asked
            yield next(loaded, nothing) if len(indices) else nothing

    def close(self) -> None:
        """Do nothing: the workers end with their epoch."""


class _Parts(IterableDataset[Loaded]):
    """The batches that one worker makes: every n-th of its rank's."""

    def __init__(
        self,
        dataset: Any,
        share: Share,
        epoch: int,
        seed: int,
    ) -> None:
        self.dataset = dataset
        self.share = share
        self.epoch = epoch
        self.seed = seed

    def __iter__(self) -> Iterator[Loaded]:
        info = get_worker_info()
        worker, num_workers = (info.id, info.num_workers) if info else (0, 1)
        # A set that shares itself out among workers, as torch's documentation shows,
        # would do so once more, and samples be lost: let it find none.
        torch_worker._worker_info = None  # noqa: SLF001
        assert get_worker_info() is None  # else torch keeps it elsewhere now
        is_cut = hasattr(self.dataset, "shard")
        _set_epoch(self.dataset, self.epoch)
        if is_cut:
            samples = self._cut(worker, num_workers)
        else:
            samples = self._samples(self.dataset, 1, 0)
        asked = (indices for indices in self.share if len(indices))
        for indices in itertools.islice(asked, worker, None, num_workers):
            start = 0 if is_cut else int(indices[0])
            batch = _take(samples, start, len(indices))
            if not batch:
                return
            yield collate(batch)

    def _cut(self, worker: int, num_workers: int) -> Iterator[tuple[int, Any]]:
        """Go through the parts that are this worker's to read, one after another."""
        share = self.share
        of_ranks, mine = share.part
        num_readers = of_ranks * num_workers
        taken = share.taken or (0,) * num_readers
        # Workers give in turns: where there are as many as before, the next one begins.
        before = replace(share, first_step=0, max_steps=share.first_step)
        turn = sum(1 for indices in before if len(indices))
        reader = mine * num_workers + (worker + turn) % num_workers
        for part in range(reader, len(taken), num_readers):
            dataset = self.dataset.shard(num_shards=len(taken), index=part)
            _set_epoch(dataset, self.epoch)
            samples = self._samples(dataset, len(taken), part)
            yield from itertools.islice(samples, taken[part], None)

    def _samples(
        self, dataset: Any, num_parts: int, part: int
    ) -> Iterator[tuple[int, Any]]:
        """Number the samples of a part; each draws from generators of its own seed."""
        with seeded(self.seed, self.epoch, -1):
            source = iter(dataset)
        for number in itertools.count(part, num_parts):
            with seeded(self.seed, self.epoch, number):
                try:
                    sample = next(source)
                except StopIteration:
                    return
            yield number, sample


def _as_it_is(loaded: Any) -> Any:
    return loaded


def _set_epoch(dataset: Any, epoch: int) -> None:
    """Tell a set its epoch, if it wants to know."""
    if hasattr(dataset, "set_epoch"):
        dataset.set_epoch(epoch)


def _take(
    samples: Iterator[tuple[int, Any]], start: int, num: int
) -> list[tuple[int, Any]]:
    """Take the next samples from a number on; what comes before is another rank's.

    >>> _take(iter(enumerate("abcdef")), 2, 3)
    [(2, 'c'), (3, 'd'), (4, 'e')]
    """
    taken: list[tuple[int, Any]] = []
    while len(taken) < num:
        found = next(samples, None)
        if found is None:
            break
        if found[0] >= start:
            taken.append(found)
    return taken
