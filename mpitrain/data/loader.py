"""From a data set to this rank's batches of every step, on its device."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from mpitrain.data.custom import Samples
from mpitrain.data.in_memory import InMemory
from mpitrain.data.iterable import IterableStyle
from mpitrain.data.samples import LoadedBatch, select_rows, to_device, to_dtype
from mpitrain.data.sharding import Indices, RankShard
from mpitrain.mpi.world import World


@dataclass
class Batch:
    """The samples of one micro-batch, as the model gets them.

    There may be more rows than samples: a rank without samples in a step takes part
    with a row of weight zero, since collectives need every rank, most models need one
    row, and batch norm needs two.
    """

    # `(N or more, ...)`; with `Task.prepends_partner` one row more in front.
    inputs: Any
    targets: Any  # `(N or more, ...)`; likewise
    indices: Indices  # numbers of the N samples, int64 `(N,)`
    num_rows: int  # N, or more with padding; that many losses are expected
    epoch: int = 0  # of the training, from 1; 0 in an evaluation
    step: int = 0  # of the epoch, from 0

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

    Floating-point targets are converted to ``dtype``, inputs are transformed.
    `skipped` has a text for each sample that this rank could not read, and of an
    iterable data set `samples_per_shard` the number that it read; the caller clears
    them.
    """

    def __init__(
        self,
        samples: Samples,
        world: World,
        transform: Transform,
        *,
        dtype: torch.dtype,
        min_rows: int = 1,
    ) -> None:
        self.samples = samples
        self.skipped: list[str] = []
        self.num_shards = 0
        self.samples_per_shard: Counter[int] = Counter()
        self._world = world
        self._transform, self._dtype = transform, dtype
        self._min_rows = min_rows
        self._example: LoadedBatch | None = None
        # Counts travel through host memory; where NCCL alone carries, through the GPU.
        in_host_memory = world.device == "cpu" or "cpu:" in world.backend
        self._count_device = "cpu" if in_host_memory else world.device

    def example(self) -> Batch:
        """Return a batch of one row that counts as no sample; local."""
        nothing = LoadedBatch(None, None, np.zeros(0, np.int64))
        return self._load(nothing, prepends_partner=False, epoch=0)

    def steps(
        self, rank_shard: RankShard, epoch: int
    ) -> Generator[RankStep, None, None]:
        """Yield this rank's part of every step; collective if some may be missing."""
        if self.samples.may_skip:
            yield from self._of_unknown_size(rank_shard, epoch)
            return
        prepends_partner = rank_shard.prepends_partner
        steps = rank_shard.steps()
        if isinstance(self.samples, InMemory):
            steps, ahead = itertools.tee(steps)
            batches = self._prepare_many(self.samples, ahead, prepends_partner, epoch)
        else:
            batches = (
                self._load(loaded, prepends_partner, epoch)
                for loaded in self.samples.batches(rank_shard, epoch)
            )
        for number, (num_samples, rows) in enumerate(steps, rank_shard.first_step):
            micro_batches = itertools.islice(batches, len(rows))
            yield RankStep(number, num_samples, len(rows), micro_batches)

    def _prepare_many(
        self,
        samples: InMemory,
        steps: Iterable[tuple[int, list[Indices]]],
        prepends_partner: bool,
        epoch: int,
    ) -> Iterator[Batch]:
        """Prepare many small batches at once: each preparation costs some kernels."""
        asked = (rows for _, micro_batches in steps for rows in micro_batches)
        first = self._first().inputs[0]
        for group in samples.groups(asked, first.numel() * first.element_size()):
            whole = self._prepare(samples.batch(np.concatenate(group)), epoch)
            start = 0
            for rows in group:
                stop = start + len(rows)
                part = LoadedBatch(
                    whole.inputs[start:stop], whole.targets[start:stop], rows
                )
                yield self._pad(part, prepends_partner)
                start = stop

    def _of_unknown_size(self, rank_shard: RankShard, epoch: int) -> Iterator[RankStep]:
        """Yield steps whose size is known after reading; the next is read ahead."""
        self.num_shards = 0
        self.samples_per_shard.clear()
        if isinstance(self.samples, IterableStyle):
            self.num_shards = self.samples.num_shards(rank_shard)
        ahead = self._read(rank_shard, epoch)
        now = next(ahead, None)
        for number in itertools.count(rank_shard.first_step):
            if now is None:
                return
            batches, count, work = now
            following = next(ahead, None)
            work.wait()
            num_samples = int(count)
            for batch in batches:
                self.skipped += batch.skipped
                if self.num_shards:
                    self.samples_per_shard.update(
                        (batch.indices % self.num_shards).tolist()
                    )
            if num_samples:
                ready = (
                    self._load(batch, rank_shard.prepends_partner, epoch)
                    for batch in batches
                )
                yield RankStep(number, num_samples, len(batches), ready)
            elif rank_shard.order is None:  # all ranks are dry
                if following is not None:
                    following[2].wait()
                return
            now = following

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

    def _load(self, loaded: LoadedBatch, prepends_partner: bool, epoch: int) -> Batch:
        if len(loaded.indices):
            loaded = self._prepare(loaded, epoch)
        return self._pad(loaded, prepends_partner)

    def _prepare(self, loaded: LoadedBatch, epoch: int) -> LoadedBatch:
        inputs, targets = (to_device(part, self._world.device) for part in loaded[:2])
        inputs = self._transform(inputs, loaded.indices, epoch)
        return LoadedBatch(inputs, to_dtype(targets, self._dtype), loaded.indices)

    def _first(self) -> LoadedBatch:
        if self._example is None:
            self._example = self._prepare(self.samples.example(), epoch=0)
        return self._example

    def _pad(self, loaded: LoadedBatch, prepends_partner: bool) -> Batch:
        indices = loaded.indices[1:] if prepends_partner else loaded.indices
        num, min_rows = len(loaded.indices), self._min_rows + prepends_partner
        if num >= min_rows:
            return Batch(loaded.inputs, loaded.targets, indices, len(indices))
        if not num:
            loaded = self._first()
        chosen = torch.arange(min_rows).clamp_(max=len(loaded.indices) - 1)
        inputs, targets = (select_rows(part, chosen) for part in loaded[:2])
        return Batch(inputs, targets, indices, self._min_rows)
