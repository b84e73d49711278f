"""The trainer's sharding of a data set, for a custom loop."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mpitrain.config import NumWorkers
from mpitrain.data.custom import build_samples, warn_if_collate_draws
from mpitrain.data.first_samples import warn_of_other_order
from mpitrain.data.loader import Batch, BatchLoader
from mpitrain.data.samples import CollateFn
from mpitrain.data.sharding import RankShard, max_shard_size
from mpitrain.errors import UsageError
from mpitrain.launch.job import require_world
from mpitrain.mpi.shared_arrays import communicator


class DataLoader:
    """Yields this rank's batches of every global batch, each sample once.

        loader = mpitrain.DataLoader(data, global_batch_size=64)
        for (inputs, targets), weights in loader:
            losses = F.cross_entropy(ddp_model(inputs), targets, reduction="none")
            (losses * weights).sum().backward()
            optimizer.step()
            optimizer.zero_grad()

    The sum of losses times weights is this rank's part of the mean over the global
    batch: its mean over the ranks, which DDP and FSDP take of gradients, is that mean.
    So the step is the same on any number of ranks. A rank without samples gets a row of
    padding, whose weight is zero, since collectives need every rank.

    Made, and iterated over, within `mpitrain.init`; both are collective over all ranks.
    `Checkpointer.save(step, loader=loader)` after a step resumes behind it, also within
    an epoch and on another number of ranks.

    Args:
        data: A map-style or iterable data set, or a tensor; the same on all ranks. What
            samples draw from torch, NumPy and random is seeded by ``seed``, the epoch
            and the sample.
        global_batch_size: Samples of a step, over all ranks; the last step of an epoch
            takes what is left.
        micro_batch_size: Maximum samples of a batch on a rank; then a step may have
            several, and ends where `sync_gradients` is true. ``None``: one.
        shuffle: Whether each epoch has an order of its own.
        seed: Of the orders.
        collate_fn: As of torch's `DataLoader`; ``None``: torch's.
        num_workers: Processes that read ahead on each rank; ``"auto"``: the number
            is found while it is read (not of an iterable data set, which has none).
        min_rows: Rows of a batch; batch norm needs 2 in training.

    Attributes:
        epoch: Of the next or present batches, from 1. It increases when one is read to
            its end. After a ``break`` the next loop begins the next epoch, or without
            ``shuffle`` the same one anew.
        step: Global batches of the epoch that were yielded to their end.
        sync_gradients: Whether the last batch that was yielded ends its global batch.
        num_samples: Samples of its global batch, over all ranks.
        indices: Numbers of the batch's samples in the data set, int64 `(N,)`.
    """

    def __init__(
        self,
        data: Any,
        global_batch_size: int,
        *,
        micro_batch_size: int | None = None,
        shuffle: bool = True,
        seed: int = 1,
        collate_fn: CollateFn | None = None,
        num_workers: NumWorkers = 0,
        min_rows: int = 1,
    ) -> None:
        world = require_world("mpitrain.DataLoader")
        sizes = {"global_batch_size": global_batch_size, "min_rows": min_rows}
        sizes["micro_batch_size"] = 1 if micro_batch_size is None else micro_batch_size
        for name, value in sizes.items():
            if value < 1:
                raise UsageError(
                    f"{name} is {value}; expected 1 or more"
                ).on_all_ranks()
        self._world = world
        self._samples = build_samples(
            data,
            "the data",
            seed=seed,
            world=world,
            ranks=communicator(world),
            num_workers=num_workers,
            collate_fn=collate_fn and functools.partial(_collate_whole, collate_fn),
        )
        warn_if_collate_draws(self._samples, world)
        self._has_collate_fn = collate_fn is not None
        self._loader = BatchLoader(
            self._samples, world, _unchanged, dtype=None, min_rows=min_rows
        )
        self._sizes = global_batch_size, micro_batch_size
        self._shuffle, self._seed = shuffle, seed
        self._order = [seed, shuffle, global_batch_size, self._samples.num_samples]
        self.epoch, self.step = 1, 0
        self._first_step: int | None = 0  # of the next iteration; ``None``: was left
        self.sync_gradients, self.num_samples = False, 0
        self.indices = np.zeros(0, np.int64)

    def __len__(self) -> int:
        """Return the global batches of an epoch; not of an iterable data set."""
        if self._samples.num_samples is None:
            raise TypeError("an iterable data set has no length")
        return max_shard_size(self._samples.num_samples, self._sizes[0])

    def set_epoch(self, epoch: int) -> None:
        """Begin an epoch, from 1; local.

        In the present one its step stays; after a ``break`` it begins anew.
        """
        if epoch != self.epoch:
            self.epoch, self.step, self._first_step = epoch, 0, 0
        elif self._first_step is None:
            self._first_step = 0

    def __iter__(self) -> Iterator[tuple[Any, Tensor]]:
        """Yield the batches of the epoch, and the weights of their rows.

        After a ``break`` those of the next epoch, or all of the same one without
        ``shuffle``; after `load_state_dict` those that are left. Weights are float64
        `(rows,)`, on this rank's device as the batches: ranks / samples of the global
        batch; 0: padding.
        """
        # As torch's: with ``shuffle`` each loop has another order.
        self.epoch += self._first_step is None and self._shuffle
        samples, world, epoch = self._samples, self._world, self.epoch
        self.step, self._first_step = self._first_step or 0, None
        order = None
        if samples.num_samples is not None and self._shuffle:
            order = samples.order(self._seed, epoch)
        elif samples.num_samples is not None:
            order = np.arange(samples.num_samples, dtype=np.int64)
        rank_shard = RankShard(
            rank=world.rank,
            world_size=world.world_size,
            global_batch_size=self._sizes[0],
            micro_batch_size=self._sizes[1],
            order=order,
            first_step=self.step,
        )
        with contextlib.closing(self._loader.steps(rank_shard, epoch)) as steps:
            for step in steps:
                for number, batch in enumerate(step.micro_batches, 1):
                    self.num_samples, self.indices = step.num_samples, batch.indices
                    self.sync_gradients = number == step.num_micro_batches
                    # Not after the yield: a loop saves before it asks for more.
                    if self.sync_gradients:
                        self.step = step.number + 1
                    yield self._content(batch), self._weights(batch)
        self.epoch, self.step, self._first_step = epoch + 1, 0, 0

    def state_dict(self) -> dict[str, Any]:
        """Return epoch and step."""
        if self.step and getattr(self._samples, "has_shards", False):
            raise UsageError(
                "a DataLoader cannot resume within an epoch of a data set with "
                "shard(); expected to save it after an epoch"
            ).on_all_ranks()
        place = {"epoch": self.epoch, "step": self.step}
        first = self._samples.first_digest
        return {**place, "order": self._order, "first_sample": first}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue behind a step.

        Raises:
            UsageError: Within an epoch, whose other samples would be others here.
        """
        if state["step"] and state["order"] != self._order:
            raise UsageError(
                "the checkpoint is within an epoch of other batches: seed, shuffle, "
                f"global_batch_size and number of samples were {state['order']}, now "
                f"{self._order}; expected the same"
            ).on_all_ranks()
        before = state.get("first_sample")  # not in older checkpoints
        now = self._samples.first_digest
        # With another seed random transforms make another one of it.
        is_other = before and now and before != now and state["order"][0] == self._seed
        if is_other and self._world.is_rank_zero:
            warn_of_other_order("the first sample of a DataLoader", "the checkpoint")
        self.epoch, self.step = state["epoch"], state["step"]
        self._first_step = self.step

    def _content(self, batch: Batch) -> Any:
        if self._has_collate_fn:
            return batch.inputs[0]
        is_pair = batch.targets is not batch.inputs
        return (batch.inputs, batch.targets) if is_pair else batch.inputs

    def _weights(self, batch: Batch) -> Tensor:
        weights = torch.zeros(batch.num_rows, dtype=torch.float64)
        # Times the ranks, by whose number DDP and FSDP divide.
        weights[: len(batch)] = self._world.world_size / self.num_samples
        return weights.to(self._world.device)


def _collate_whole(collate_fn: CollateFn, samples: list[Any]) -> Any:
    """Make a batch that is no pair: pairs are told apart, and cut, otherwise."""
    return [collate_fn(samples)]


def _unchanged(inputs: Any, *_: Any) -> Any:
    return inputs
