"""Iterable-style data sets: samples in sequence, of unknown number.

Every rank and worker reads the same stream and keeps its samples: sample n belongs to
the same step as in a set of known length, at any number of ranks. A stream with a
method `shard(num_shards, index)` is cut instead: each sample is read once, but belongs
to another step at another number of ranks.
"""

from __future__ import annotations

import copy
import itertools
import json
import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch.utils.data import IterableDataset, default_collate, get_worker_info

from mpitrain.data.map_style import PADDING, Collate, CollatedSamples, Key, raise_if_bad
from mpitrain.data.randomness import sample_seed, seed_all, seeded
from mpitrain.data.samples import (
    CollateFn,
    LoadedBatch,
    sample_digest,
    sets_with_epochs,
)
from mpitrain.data.sharding import Indices, RankShard, StreamPlace
from mpitrain.data.workers import (
    StartMethod,
    build_loader,
    iterate_loader,
    worker_context,
)
from mpitrain.errors import DataError
from mpitrain.torch_compat import hide_worker_info

logger = logging.getLogger("mpitrain")

STATE_METHODS = ("state_dict", "load_state_dict"), ("get_state", "set_state")
"""Of a stream that knows its place, or of its iterator: torchdata's and Grain's."""

_END = object()


class IterableStyle(CollatedSamples):
    """An iterable-style data set.

    `has_shards`: ranks read shards of it; with ``reads_whole`` never, so that samples
    have the numbers of its order.

    It may have `set_epoch(epoch)`, called before an epoch, and `shard(num_shards,
    index)`. `get_worker_info` returns ``None`` in both: the shards are of workers, too.
    """

    num_samples = None
    may_skip = True
    is_deterministic = False

    def __init__(
        self,
        dataset: Any,
        *,
        seed: int,
        num_workers: int = 0,
        method: StartMethod = "fork",
        collate_fn: CollateFn = default_collate,
        reads_whole: bool = False,
    ) -> None:
        super().__init__(Collate(collate_fn, seed))
        self.dataset = dataset
        self.has_shards = hasattr(dataset, "shard") and not reads_whole
        self.seed = seed
        self._num_workers = num_workers
        self._method = method

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

    def _read_first(self) -> tuple[Key, Any]:
        with seeded(self.seed, 0, 0):
            for sample in self.dataset:
                return (0, 0), sample
        raise DataError(f"the stream {type(self.dataset).__name__!r} has no samples")

    def batches(self, rank_shard: RankShard, epoch: int) -> Iterator[LoadedBatch]:
        """Read batches until the stream ends; then empty ones."""
        context = worker_context(self._method) if self._num_workers else None
        loader = build_loader(
            _WorkerBatches(self, rank_shard, epoch),
            batch_size=None,
            collate_fn=_identity,  # else arrays become tensors
            num_workers=self._num_workers,
            multiprocessing_context=context,
        )
        loaded = map(raise_if_bad, iterate_loader(loader))
        nothing = self.collate([])
        for indices in rank_shard:  # no worker makes the batches that are empty for us
            yield next(loaded, nothing) if len(indices) else nothing

    def close(self) -> None:
        """Do nothing: the workers end with their epoch."""


class _WorkerBatches(IterableDataset[LoadedBatch]):
    """The batches that one worker makes: every n-th of its rank's."""

    is_seeded = True  # as of `_SampleDataset`

    def __init__(
        self, samples: IterableStyle, rank_shard: RankShard, epoch: int
    ) -> None:
        self.dataset, self.has_shards = samples.dataset, samples.has_shards
        self.collate, self.seed = samples.collate, samples.seed
        self.rank_shard, self.epoch = rank_shard, epoch

    def __iter__(self) -> Iterator[LoadedBatch]:
        info = get_worker_info()
        worker, num_workers = (info.id, info.num_workers) if info else (0, 1)
        # A set that shards itself over workers, as torch's documentation shows, would
        # do so a second time, and samples be lost: get_worker_info returns None to it.
        hide_worker_info()
        _set_epoch(self.dataset, self.epoch)
        if self.has_shards:
            shards = self._shards(worker, num_workers)
        else:
            shards = iter([_Numbered(self.dataset, self)])
        shard = next(shards, None)
        batches = (indices for indices in self.rank_shard if len(indices))
        # DataLoader takes a batch of each worker in turn: so they come in order.
        for indices in itertools.islice(batches, worker, None, num_workers):
            if shard is not None and not self.has_shards:
                shard.skip(int(indices[0]))  # another rank's
            batch: list[tuple[int, Any]] = []
            place = None
            while shard is not None and len(batch) < len(indices):
                # Before the first sample: a resume may have to train on all of them,
                # and compares that one.
                before = None if batch else shard.state()
                more = list(itertools.islice(shard, len(indices) - len(batch)))
                if before is not None and more:
                    place = shard.index, StreamPlace(*before, sample_digest(more[0][1]))
                batch += more
                if len(batch) < len(indices):
                    shard = next(shards, None)
            if not batch:
                return
            batch += [(PADDING, None)] * (self.rank_shard.min_rows - 1)
            keyed = [((self.epoch, number), sample) for number, sample in batch]
            yield self.collate(keyed)._replace(place=place)

    def _shards(self, worker: int, num_workers: int) -> Iterator[_Numbered]:
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
            shard = _Numbered(dataset, self, len(num_read), index)
            shard.skip(num_read[index])
            yield shard


class _Numbered:
    """The samples of a stream, or of a shard of it, with their numbers.

    Each draws from generators of its own seed. A stream that knows its place begins
    where the checkpoint says; the first sample there is compared. If it is another
    one, the stream is read again from its first sample.
    """

    def __init__(
        self, dataset: Any, worker: _WorkerBatches, num_shards: int = 1, index: int = 0
    ) -> None:
        self.index, self._num_shards, self._worker = index, num_shards, worker
        self._num_read, self._expected, self._dataset = 0, "", dataset
        place = worker.rank_shard.places.get(index)
        # iter() may shuffle: all that read this stream, or shard, have to agree.
        seed_all(sample_seed(worker.seed, worker.epoch, -1))
        source = iter(dataset)
        self._owner, self._get, load = _state_methods(source, dataset)
        if place is not None and self._owner is not None:
            if self._owner is dataset:  # it may be read from the start again
                self._owner = copy.copy(dataset)
            getattr(self._owner, load)(place.state)
            self._num_read, self._expected = place.num_read, place.digest
            source = source if self._owner is source else iter(self._owner)
        self._source = source

    def __iter__(self) -> _Numbered:
        return self

    def __next__(self) -> tuple[int, Any]:
        number = self.index + self._num_read * self._num_shards
        seed_all(sample_seed(self._worker.seed, self._worker.epoch, number))
        sample = next(self._source, _END)
        expected, self._expected = self._expected, ""
        if expected and (sample is _END or not _has_digest(sample, expected)):
            if self._owner is None:
                raise DataError(
                    f"{type(self._dataset).__name__} has other samples than before, "
                    f"from number {number} on; expected the same in each job"
                )
            self._read_again(number)
            self._expected = expected
            return next(self)
        if sample is _END:
            raise StopIteration
        self._num_read += 1
        return number, sample

    def _read_again(self, number: int) -> None:
        """Begin with the first sample again, and drop those that were trained."""
        logger.warning(
            "%s.%s() does not lead to the sample that followed, number %d: a shuffle "
            "buffer may be missing in it. The data set is read again up to there",
            type(self._owner).__name__,
            self._get,
            number,
        )
        seed_all(sample_seed(self._worker.seed, self._worker.epoch, -1))
        self._source = iter(self._dataset)
        # Without an owner: what is wrong once more is an error, and no place is saved.
        self._owner, num_read, self._num_read = None, self._num_read, 0
        self.skip(num_read)

    def skip(self, num_read: int) -> None:
        """Read on until so many samples are read."""
        for _ in itertools.islice(self, max(0, num_read - self._num_read)):
            pass

    def state(self) -> tuple[int, Any] | None:
        """Return the number of samples read, and the state; ``None``: unknown."""
        if self._owner is None or not self._num_read or not self._worker.epoch:
            return None  # in an evaluation, too
        state = getattr(self._owner, self._get)()
        try:  # a checkpoint has bytes and JSON alone: docs/decisions/0009
            copied = json.loads(json.dumps(state))
        except (TypeError, ValueError):
            return None
        return (self._num_read, copied) if copied == state else None


def _state_methods(*streams: Any) -> tuple[Any, str, str]:
    """Return the first that knows its place, and its methods; ``None`` without one."""
    for stream, (get, load) in itertools.product(streams, STATE_METHODS):
        if callable(getattr(stream, get, None)) and hasattr(stream, load):
            return stream, get, load
    return None, "", ""


def _has_digest(sample: Any, expected: str) -> bool:
    # Older checkpoints have that of whole paths.
    return expected in (
        sample_digest(sample),
        sample_digest(sample, is_path_whole=True),
    )


def _identity(loaded: Any) -> Any:
    return loaded


def _set_epoch(dataset: Any, epoch: int) -> None:
    for it in sets_with_epochs(dataset):
        it.set_epoch(epoch)
