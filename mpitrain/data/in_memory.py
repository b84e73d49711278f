"""Samples held whole in memory; a batch is one gather."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import Tensor

from mpitrain.data.samples import LoadedBatch
from mpitrain.data.sharding import Indices, RankShard, epoch_order, pad_rows

CACHE_BYTES = 1 << 20  # of samples as the model sees them, that are transformed at once


class InMemory:
    """Inputs and targets `(N, ...)`, in host memory or on the device."""

    is_in_memory = True
    may_skip = False
    is_deterministic = True
    classes: tuple[str, ...] = ()  # names by label, if they are known
    first_digest = ""  # of a custom set, see `Samples`

    def __init__(self, inputs: Tensor, targets: Tensor) -> None:
        self.inputs = inputs
        self.targets = targets
        self.num_samples: int = len(targets)

    def __len__(self) -> int:
        return self.num_samples

    @property
    def num_bytes(self) -> int:
        """Size in memory."""
        return sum(t.numel() * t.element_size() for t in (self.inputs, self.targets))

    def to(self, device: torch.device | str) -> InMemory:
        """Return the same set on another device."""
        moved = type(self)(self.inputs.to(device), self.targets.to(device))
        moved.classes, moved.first_digest = self.classes, self.first_digest
        return moved

    def order(self, seed: int, epoch: int) -> Indices:
        """Return the order of an epoch."""
        return epoch_order(self.num_samples, seed, epoch)

    def example(self, num_rows: int = 1) -> LoadedBatch:
        """Return the first sample, so many times."""
        return self.batch(np.zeros(num_rows, np.int64))

    def batch(self, indices: Indices) -> LoadedBatch:
        """Gather some samples."""
        # Memory that is not pinned is copied before the call returns: it may be reused.
        chosen = torch.from_numpy(indices).to(self.inputs.device, non_blocking=True)
        return LoadedBatch(
            self.inputs.index_select(0, chosen),
            self.targets.index_select(0, chosen),
            indices,
        )

    def read(self, indices: Indices, epoch: int, min_rows: int) -> LoadedBatch:
        """Gather some samples, and repeat the last where there are fewer."""
        del epoch
        return self.batch(pad_rows(indices, min_rows))._replace(indices=indices)

    def groups(
        self, batches: Iterable[Indices], sample_bytes: int
    ) -> Iterator[list[Indices]]:
        """Join small batches, as long as they fit into a processor's cache."""
        max_rows = max(1, CACHE_BYTES // max(sample_bytes, 1))
        group: list[Indices] = []
        num_rows = 0
        for indices in batches:
            if group and num_rows + len(indices) > max_rows:
                yield group
                group, num_rows = [], 0
            group.append(indices)
            num_rows += len(indices)
        if group:
            yield group

    def batches(self, rank_shard: RankShard, epoch: int) -> Iterator[LoadedBatch]:
        """Gather batches, each when it is wanted."""
        for indices in rank_shard:
            yield self.read(indices, epoch, rank_shard.min_rows)

    def close(self) -> None:
        """Do nothing: there are no workers."""
