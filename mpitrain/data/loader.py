"""From a data set to this rank's batches of every step, on its device.

Where all samples are known, nothing is communicated: a `RankShard` says whose each is.
Of streams, and where samples may be skipped, ranks all-reduce the size of each step:

    read step n + 1 -> start the all-reduce of its size -> wait for that of step n
    -> yield step n, unless no rank has a sample of it -> read step n + 2 ...
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from mpitrain.data.custom import Samples
from mpitrain.data.in_memory import InMemory
from mpitrain.data.iterable import IterableStyle
from mpitrain.data.samples import LoadedBatch, to_device, to_dtype
from mpitrain.data.sharding import Indices, RankShard, StreamPlace, pad_rows
from mpitrain.mpi.world import World


@dataclass
class Batch:
    """The samples of one micro-batch, as the model gets them.

    There may be more rows than samples: a rank without samples in a step takes part
    with a row of weight zero, since collectives need every rank, most models need one
    row, and batch norm needs two.
    """

    inputs: Any
    """`(N or more, ...)`; with `Task.prepends_partner` one row more in front. Or what
    ``collate_fn`` returned, if that is no pair."""
    targets: Any  #: `(N or more, ...)`; likewise
    indices: Indices  #: numbers of the N samples, int64 `(N,)`
    num_rows: int  #: N, or more with padding; that many losses are expected
    epoch: int = 0  #: of the training, from 1; 0 in an evaluation
    step: int = 0  #: of the epoch, from 0

    def __len__(self) -> int:
        """Return the number of samples N."""
        return len(self.indices)


@dataclass
class RankStep:
    """This rank's part of a step."""

    number: int  # of the step in its epoch, from 0; those without samples are left out
    num_samples: int  # samples of the step, over all ranks
    num_micro_batches: int  # of this rank, which may differ with an assignment
    micro_batches: Iterable[Batch]  # iterate once, to the end, before the next step


Transform = Callable[[Any, Indices, int], Any]
"""Maps inputs of a batch on the device, its indices and the epoch to the model's."""


class BatchLoader:
    """Loads this rank's batches of a data set; each has at least ``min_rows`` rows.

    Floating-point targets are converted to ``dtype``, if there is one; inputs are
    transformed. With ``joins_batches`` several of a set in memory are prepared at once.
    `skipped` has a text for each sample that this rank could not read, and of an
    iterable data set `samples_per_shard` the number that it read; the caller clears
    them. `places` are the last ones in each shard of a stream that knows its place.
    """

    def __init__(
        self,
        samples: Samples,
        world: World,
        transform: Transform,
        *,
        dtype: torch.dtype | None,
        min_rows: int = 1,
        joins_batches: bool = True,
    ) -> None:
        self.samples = samples
        self.skipped: list[str] = []
        self.has_warned = False  # of an evaluation that may have no end
        self.num_shards = 0
        self.samples_per_shard: Counter[int] = Counter()
        self.places: dict[int, StreamPlace] = {}
        self._world = world
        self._transform, self._dtype = transform, dtype
        self._min_rows, self._joins_batches = min_rows, joins_batches
        self._examples: dict[int, LoadedBatch] = {}  # by number of rows
        # Counts travel through host memory; where NCCL alone carries, through the GPU.
        in_host_memory = world.device == "cpu" or "cpu:" in world.backend
        self._count_device = "cpu" if in_host_memory else world.device

    def example(self) -> Batch:
        """Return a batch of one row that counts as no sample; local."""
        found = self._example(self._min_rows)
        nothing = np.zeros(0, np.int64)
        return Batch(found.inputs, found.targets, nothing, self._min_rows)

    def steps(
        self, rank_shard: RankShard, epoch: int
    ) -> Generator[RankStep, None, None]:
        """Yield this rank's part of every step; collective if some may be missing."""
        rank_shard = self._with_rows(rank_shard)
        if self.samples.may_skip:
            yield from self._of_unknown_size(rank_shard, epoch)
            return
        steps = rank_shard.steps()
        # What a task's transform made of tensors, such as a dict, is not cut by rows.
        if (
            isinstance(self.samples, InMemory)
            and self._joins_batches
            and isinstance(self._example(1).inputs, Tensor)
        ):
            # A group may span steps: it is asked for before its first step is yielded.
            steps, ahead = itertools.tee(steps)
            asked = (rows for _, micro_batches in ahead for rows in micro_batches)
            batches = self._prepare_many(self.samples, asked, rank_shard, epoch)
        else:
            batches = (
                self._batch(loaded, rank_shard, epoch)
                for loaded in self.samples.batches(rank_shard, epoch)
            )
        for number, (num_samples, rows) in enumerate(steps, rank_shard.first_step):
            micro_batches = itertools.islice(batches, len(rows))
            yield RankStep(number, num_samples, len(rows), micro_batches)

    def read(self, rank_shard: RankShard, indices: Indices, epoch: int) -> Batch:
        """Read a batch in this process, of samples with known numbers; local."""
        assert not isinstance(self.samples, IterableStyle)
        rank_shard = self._with_rows(rank_shard)
        loaded = self.samples.read(indices, epoch, rank_shard.min_rows)
        return self._batch(loaded, rank_shard, epoch)

    def _with_rows(self, rank_shard: RankShard) -> RankShard:
        """Let each batch of a shard have the rows that it needs at least."""
        min_rows = self._min_rows + rank_shard.prepends_partner
        return replace(rank_shard, min_rows=min_rows)

    def _prepare_many(
        self,
        samples: InMemory,
        asked: Iterable[Indices],
        rank_shard: RankShard,
        epoch: int,
    ) -> Iterator[Batch]:
        """Prepare many small batches at once: each preparation costs some kernels."""
        first = self._example(1).inputs[0]
        for group in samples.groups(asked, first.numel() * first.element_size()):
            padded = [pad_rows(indices, rank_shard.min_rows) for indices in group]
            rows = np.concatenate(padded)
            whole = self._prepare(samples.batch(rows), rows, epoch)
            start = 0
            for indices, of_part in zip(group, padded, strict=True):
                stop = start + len(of_part)
                part = LoadedBatch(
                    whole.inputs[start:stop], whole.targets[start:stop], indices
                )
                yield self._finish(part, rank_shard)
                start = stop

    def _of_unknown_size(self, rank_shard: RankShard, epoch: int) -> Iterator[RankStep]:
        """Yield steps whose size is known after reading; the next is read ahead."""
        self.num_shards = 0
        self.samples_per_shard.clear()
        self.places = dict(rank_shard.places)
        if isinstance(self.samples, IterableStyle):
            self.num_shards = self.samples.num_shards(rank_shard)
        ahead = itertools.chain(self._read(rank_shard, epoch), [None])
        pairs = itertools.pairwise(ahead)
        for number, (now, following) in enumerate(pairs, rank_shard.first_step):
            assert now is not None
            batches, count, work = now
            work.wait()
            if num_samples := int(count):
                ready = (self._taken(batch, rank_shard, epoch) for batch in batches)
                yield RankStep(number, num_samples, len(batches), ready)
                continue
            for batch in batches:
                self.skipped += batch.skipped
            if rank_shard.order is None:  # no rank has read a sample: the stream ends
                if following is not None:  # every rank has started it
                    following[2].wait()
                return

    def _read(
        self, rank_shard: RankShard, epoch: int
    ) -> Iterator[tuple[list[LoadedBatch], Tensor, Any]]:
        """Yield each step's batches, and its size, which is being all-reduced."""
        loaded = self.samples.batches(rank_shard, epoch)
        for _, micro_batches in rank_shard.steps():
            batches = [next(loaded) for _ in micro_batches]
            count = torch.tensor(
                sum(len(batch.indices) for batch in batches), device=self._count_device
            )
            yield batches, count, dist.all_reduce(count, async_op=True)

    def _taken(self, loaded: LoadedBatch, rank_shard: RankShard, epoch: int) -> Batch:
        """Count a batch as read; return it."""
        # When its step takes it, not when it is read: a validation, and a checkpoint,
        # may come between.
        self.skipped += loaded.skipped
        if loaded.place is not None:
            self.places.update([loaded.place])
        if self.num_shards:
            self.samples_per_shard.update((loaded.indices % self.num_shards).tolist())
        return self._batch(loaded, rank_shard, epoch)

    def _batch(self, loaded: LoadedBatch, rank_shard: RankShard, epoch: int) -> Batch:
        if len(loaded.indices):
            rows = pad_rows(loaded.indices, rank_shard.min_rows)
            loaded = self._prepare(loaded, rows, epoch)
        return self._finish(loaded, rank_shard)

    def _prepare(self, loaded: LoadedBatch, rows: Indices, epoch: int) -> LoadedBatch:
        """Move a batch to the device and transform it; ``rows`` are its samples."""
        device = self._world.device
        inputs = self._transform(to_device(loaded.inputs, device), rows, epoch)
        if loaded.targets is None:
            # The same object: by that `DataLoader` knows a batch that is no pair.
            return LoadedBatch(inputs, inputs, loaded.indices)
        targets = to_device(loaded.targets, device)
        targets = to_dtype(targets, self._dtype) if self._dtype else targets
        return LoadedBatch(inputs, targets, loaded.indices)

    def _example(self, num_rows: int) -> LoadedBatch:
        """Return rows of the first sample, which stand where a rank has none."""
        if num_rows not in self._examples:
            loaded = self.samples.example(num_rows)
            rows = pad_rows(loaded.indices, num_rows)
            self._examples[num_rows] = self._prepare(loaded, rows, epoch=0)
        return self._examples[num_rows]

    def _finish(self, loaded: LoadedBatch, rank_shard: RankShard) -> Batch:
        indices = loaded.indices
        if not len(indices):
            loaded = self._example(rank_shard.min_rows)
        indices = indices[1:] if rank_shard.prepends_partner else indices
        num_rows = max(len(indices), self._min_rows)
        return Batch(loaded.inputs, loaded.targets, indices, num_rows)
