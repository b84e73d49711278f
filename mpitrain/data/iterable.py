"""Iterable-style data sets: samples in sequence, of unknown number.

Every rank and worker reads the same stream and keeps its samples: sample n belongs to
the same step as in a set of known length, at any number of ranks. A stream with a
method `shard(num_shards, index)` is cut instead: each sample is read once, but belongs
to another step at another number of ranks.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

from torch.utils.data import IterableDataset, default_collate, get_worker_info

from mpitrain.data.map_style import PADDING, collate, raise_if_bad
from mpitrain.data.randomness import seeded
from mpitrain.data.samples import CollateFn, LoadedBatch
from mpitrain.data.sharding import Indices, RankShard
from mpitrain.data.workers import (
    StartMethod,
    build_loader,
    iterate_loader,
    worker_context,
)
from mpitrain.errors import DataError
from mpitrain.torch_compat import hide_worker_info


class IterableStyle:
    """An iterable-style data set.

    It may have `set_epoch(epoch)`, called before an epoch, and `shard(num_shards,
    index)`. `get_worker_info` returns ``None`` in both: the shards are of workers, too.
    """

    num_samples = None
    may_skip = True
    is_deterministic = False
    classes: tuple[str, ...] = ()  # names by label, if they are known

    def __init__(
        self,
        dataset: Any,
        *,
        seed: int,
        num_workers: int = 0,
        method: StartMethod = "fork",
        collate_fn: CollateFn = default_collate,
    ) -> None:
        self.dataset = dataset
        self._collate = functools.partial(collate, collate_fn)
        self._seed = seed
        self._num_workers = num_workers
        self._method = method
        self._first: tuple[int, Any] | None = None  # number and sample

    @property
    def has_shards(self) -> bool:
        """Whether ranks read shards of it, not the whole."""
        return hasattr(self.dataset, "shard")

    def num_shards(self, rank_shard: RankShard) -> int:
        """Return into how many shards an epoch is cut; 0: ranks read the whole.

        Sample number n belongs to shard n modulo that.
        """
        if not self.has_shards:
            return 0
        num_readers = rank_shard.stream_shard[0] * max(1, self._num_workers)
        return len(rank_shard.samples_read_per_shard) or num_readers

    def order(self, seed: int, epoch: int) -> Indices:
        """Refuse: only reading tells."""
        raise NotImplementedError

    def example(self, num_rows: int = 1) -> LoadedBatch:
        """Return the first sample; repeated, if ``num_rows`` are wanted."""
        if self._first is None:  # read once: in the middle of a training others wait
            self._first = self._read_first()
        return raise_if_bad(self._collate([self._first] * num_rows))

    def reread_example(self) -> LoadedBatch:
        """Read the same sample again; it differs if the stream is random."""
        return raise_if_bad(self._collate([self._read_first()]))

    def _read_first(self) -> tuple[int, Any]:
        with seeded(self._seed, 0, 0):
            for sample in self.dataset:
                return 0, sample
        raise DataError(f"the stream {type(self.dataset).__name__!r} has no samples")

    def batches(self, rank_shard: RankShard, epoch: int) -> Iterator[LoadedBatch]:
        """Read batches until the stream ends; then empty ones."""
        context = worker_context(self._method) if self._num_workers else None
        loader = build_loader(
            _WorkerBatches(self.dataset, rank_shard, epoch, self._seed, self._collate),
            batch_size=None,
            collate_fn=_identity,  # else arrays become tensors
            num_workers=self._num_workers,
            multiprocessing_context=context,
        )
        loaded = map(raise_if_bad, iterate_loader(loader))
        nothing = self._collate([])
        for indices in rank_shard:  # no worker makes the batches that are empty for us
            yield next(loaded, nothing) if len(indices) else nothing

    def close(self) -> None:
        """Do nothing: the workers end with their epoch."""


class _WorkerBatches(IterableDataset[LoadedBatch]):
    """The batches that one worker makes: every n-th of its rank's."""

    def __init__(
        self,
        dataset: Any,
        rank_shard: RankShard,
        epoch: int,
        seed: int,
        collate_samples: Callable[[list[tuple[int, Any]]], LoadedBatch],
    ) -> None:
        self.collate = collate_samples
        self.dataset = dataset
        self.rank_shard = rank_shard
        self.epoch = epoch
        self.seed = seed

    def __iter__(self) -> Iterator[LoadedBatch]:
        info = get_worker_info()
        worker, num_workers = (info.id, info.num_workers) if info else (0, 1)
        # A set that shards itself over workers, as torch's documentation shows, would
        # do so a second time, and samples be lost: get_worker_info returns None to it.
        hide_worker_info()
        has_shards = hasattr(self.dataset, "shard")
        _set_epoch(self.dataset, self.epoch)
        if has_shards:
            samples = self._from_shards(worker, num_workers)
        else:
            samples = self._samples(self.dataset, 1, 0)
        batches = (indices for indices in self.rank_shard if len(indices))
        for indices in itertools.islice(batches, worker, None, num_workers):
            start = 0 if has_shards else int(indices[0])
            # Samples before the start are another rank's.
            mine = (numbered for numbered in samples if numbered[0] >= start)
            batch = list(itertools.islice(mine, len(indices)))
            if not batch:
                return
            padding = [(PADDING, None)] * (self.rank_shard.min_rows - 1)
            yield self.collate([*batch, *padding])

    def _from_shards(self, worker: int, num_workers: int) -> Iterator[tuple[int, Any]]:
        num_ranks, rank = self.rank_shard.stream_shard
        num_readers = num_ranks * num_workers
        num_read = self.rank_shard.samples_read_per_shard or (0,) * num_readers
        # Workers deliver in turns. On resume with as many workers as before, the one
        # whose turn it was must come first.
        before = replace(
            self.rank_shard, first_step=0, max_steps=self.rank_shard.first_step
        )
        turn = sum(1 for indices in before if len(indices))
        reader = rank * num_workers + (worker + turn) % num_workers
        for index in range(reader, len(num_read), num_readers):
            dataset = self.dataset.shard(num_shards=len(num_read), index=index)
            _set_epoch(dataset, self.epoch)
            samples = self._samples(dataset, len(num_read), index)
            yield from itertools.islice(samples, num_read[index], None)

    def _samples(
        self, dataset: Any, num_shards: int, index: int
    ) -> Iterator[tuple[int, Any]]:
        """Number the samples of a shard; each draws from generators of its own seed."""
        with seeded(self.seed, self.epoch, -1):
            source = iter(dataset)
        for number in itertools.count(index, num_shards):
            with seeded(self.seed, self.epoch, number):
                try:
                    sample = next(source)
                except StopIteration:
                    return
            yield number, sample


def _identity(loaded: Any) -> Any:
    return loaded


def _set_epoch(dataset: Any, epoch: int) -> None:
    if hasattr(dataset, "set_epoch"):
        dataset.set_epoch(epoch)
