"""The data of a training on this rank: samples, loaders, and the steps of an epoch."""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist

from mpitrain.config import TrainConfig
from mpitrain.data.custom import Samples, build_samples
from mpitrain.data.in_memory import InMemory
from mpitrain.data.loader import Batch, BatchLoader, RankStep
from mpitrain.data.randomness import random_state
from mpitrain.data.samples import digest
from mpitrain.data.sampling import EpochOrder, Sampling
from mpitrain.data.sharding import Indices, MicroBatchAssignment, RankShard, StreamPlace
from mpitrain.errors import UsageError
from mpitrain.mpi.collectives import all_or_none, world_comm
from mpitrain.mpi.shared_arrays import Communicator
from mpitrain.mpi.world import World
from mpitrain.tasks.task import Task
from mpitrain.train.metrics import TrainState
from mpitrain.train.strategy.base import Strategy

logger = logging.getLogger("mpitrain")

SAMPLER_EXPECTED = (
    "Expected a function of seed and epoch alone: draw from "
    "np.random.default_rng([seed, epoch]), or from torch, which is seeded"
)

ENDLESS_STEPS = 10_000  # of the first epoch of an iterable set, then a warning

GPU_MEMORY_FRACTION = 0.3  # of a GPU's free memory that a data set may take


class TrainData:
    """Data sets, their loaders, and what this rank could not read of them.

    Collective over the default group, and so are its methods unless they say otherwise.

    Attributes:
        min_rows: Rows of a batch in training; batch norm needs two.
        places_before: `places` of a checkpoint, for the rest of its epoch; from JSON.
        train_loader: Of the stage's training samples.
        val_sets: Validation samples by name; of a single set the name is empty.
        val_loaders: Of the stage's validation samples, likewise.
    """

    train_loader: BatchLoader
    val_loaders: dict[str, BatchLoader]

    def __init__(
        self,
        train_data: Any,
        val_data: Any,
        config: TrainConfig,
        world: World,
        ranks: Communicator,
        task: Task,
        sampling: Sampling,
        strategy: Strategy,
    ) -> None:
        self._config, self._world, self._ranks = config, world, ranks
        self._task, self._sampling, self._strategy = task, sampling, strategy
        self.min_rows, self.places_before = 1, dict[str, Any]()
        self.train = self._samples(train_data, "the training data")
        has_names = bool(val_data) if isinstance(val_data, Mapping) else False
        has_names = has_names and all(isinstance(name, str) for name in val_data)
        by_name = val_data if has_names else {"": val_data}
        self.val_sets = {
            name: self._samples(it, f"the validation data {name}".rstrip())
            for name, it in by_name.items()
            if val_data is not None
        }
        self.num_samples = {"train": self.train.num_samples} | {
            f"val {name}".rstrip(): it.num_samples for name, it in self.val_sets.items()
        }
        self.first_digests = {"train": self.train.first_digest} | {
            f"val {name}".rstrip(): it.first_digest
            for name, it in self.val_sets.items()
        }
        self._test_loaders: list[BatchLoader] = []
        self._transformed = set[bool]()  # in training, in an evaluation
        self.num_steps = self._num_steps()
        task.set_up(config, world, self.train, self.val)
        if task.prepends_partner and self.train.may_skip:
            raise UsageError(
                f"{type(task).__name__}.prepends_partner needs the samples of a step "
                "beforehand; found iterable data or --on-bad-sample skip"
            ).on_all_ranks()

    @property
    def val(self) -> Samples:
        """The first set of validation samples; without one those of training."""
        return next(iter(self.val_sets.values()), self.train)

    def loader(self, samples: Samples, *, is_training: bool = False) -> BatchLoader:
        """Return a loader of samples; local."""
        return BatchLoader(
            samples,
            self._world,
            functools.partial(self._transform, is_training=is_training),
            dtype=self._task.dtype,
            min_rows=self.min_rows if is_training else 1,
            # A batch within a larger tensor has another address on another number of
            # ranks, and small products of MKL round by it.
            joins_batches=not self._strategy.micro_batches_are_fixed,
        )

    def _transform(
        self, inputs: Any, indices: Indices, epoch: int, *, is_training: bool
    ) -> Any:
        """Call the task's; the first time see whether it draws random numbers."""
        transform = functools.partial(self._task.transform, is_training=is_training)
        # In the first batch alone: to copy the generators' states takes time.
        if is_training in self._transformed:
            return transform(inputs, indices, epoch)
        before = random_state(self._world.device)
        found = transform(inputs, indices, epoch)
        if random_state(self._world.device) != before:
            self._strategy.report_dependence(
                f"{type(self._task).__name__}.transform draws random numbers",
                "draw from np.random.default_rng([seed, epoch, index]) for each sample,"
                " or in the data set's __getitem__",
            )
        self._transformed.add(is_training)
        return found

    def set_stage(self, samples: tuple[Samples, Samples] | None) -> None:
        """Let a stage have these samples to train and to validate; local.

        ``None``: those of the data sets.
        """
        train = samples[0] if samples else self.train
        self.train_loader = self.loader(train, is_training=True)
        self.val_loaders = {
            name: self.loader(samples[1] if samples else it)
            for name, it in self.val_sets.items()
        }

    @contextlib.contextmanager
    def test_loader(
        self,
        data: Any,
        strategy: Strategy,
        what: str = "the test data",
        *,
        reads_whole: bool = False,
    ) -> Iterator[BatchLoader]:
        """Return a loader of another data set for an evaluation, in this context."""
        samples = self._samples(data, what, reads_whole=reads_whole)
        strategy.check_samples(samples)
        loader = self.loader(samples)
        self._test_loaders.append(loader)
        try:
            yield loader
        finally:
            self._test_loaders.remove(loader)
            samples.close()

    def steps(self, state: TrainState, strategy: Strategy) -> Iterator[RankStep]:
        """Yield this rank's part of the steps of the epoch that are not done yet."""
        samples, config = self.train_loader.samples, self._config
        order = batches = costs = None
        if samples.num_samples is not None:
            found = self._order(samples, state.epoch)
            if state.epoch_step and state.order_digest != found.digest:
                raise UsageError(
                    f"the checkpoint is within epoch {state.epoch}, which had another "
                    "order; expected the same sampler= or batch_sampler="
                ).on_all_ranks()
            state.order_digest = found.digest
            order, batches, costs = found.samples, found.batches, found.costs
        places = {int(key): StreamPlace(*it) for key, it in self.places_before.items()}
        self.places_before = {}
        is_done, max_steps = False, config.max_steps or sys.maxsize
        while not is_done and state.step < max_steps:
            assignment = strategy.assignment
            rank_shard = RankShard(
                rank=self._world.rank,
                world_size=self._world.world_size,
                global_batch_size=config.global_batch_size,
                micro_batch_size=strategy.micro_batch_size,
                assignment=assignment,
                order=order,
                batches=batches,
                costs=costs,
                first_step=state.epoch_step,
                max_steps=1 if config.dry_run else None,
                samples_read_per_shard=tuple(state.samples_per_shard),
                places=places if state.epoch_step else {},
                prepends_partner=self._task.prepends_partner,
            )
            self._rank_shard = rank_shard
            steps = self.train_loader.steps(rank_shard, state.epoch)
            # Closed here, not by the garbage collector: workers read ahead.
            with contextlib.closing(steps):
                for step in steps:
                    yield step
                    if state.step >= max_steps:
                        return
                    if order is None and step.number + 1 == ENDLESS_STEPS:
                        self._warn_if_endless(state.epoch)
                    # `rebalance` gave another, on all ranks: the rest is loaded anew.
                    if strategy.assignment is not assignment:
                        break
                else:
                    is_done = True

    def micro_batch(self, state: TrainState, step: int, number: int) -> Batch:
        """Read a fixed micro-batch of a step of the present epoch; local.

        In this process, also where workers read.
        """
        # A world of one rank has all micro-batches; with fixed ones they are the same.
        shard = replace(
            self._rank_shard,
            rank=0,
            world_size=1,
            assignment=MicroBatchAssignment(world_size=1),
            first_step=step,
            max_steps=step + 1,
        )
        ((_, all_rows),) = shard.steps()
        return self.train_loader.read(shard, all_rows[number], state.epoch)

    def _order(self, samples: Samples, epoch: int) -> EpochOrder:
        """Return the order of an epoch, which is compared if a sampler makes it."""
        sampling, seed = self._sampling, self._config.seed
        if not sampling:
            return EpochOrder(samples.order(seed, epoch))
        assert samples.num_samples is not None
        # The user's code may fail on one rank, and others would wait in check_equal.
        found = all_or_none(
            world_comm(),
            lambda: sampling.order(seed, epoch, len(samples)),
            f"call the {sampling.name}",
        )
        what = f"what the {sampling.name} returned for epoch {epoch}"
        self._ranks.check_equal(found.digest, what, SAMPLER_EXPECTED)
        # Costs cut a step into the ranks' shards: with unequal ones a sample would have
        # two ranks, or none. Not in the digest, which a resume compares.
        costs = found.costs
        of_costs = "none" if costs is None else digest(torch.from_numpy(costs))
        what = f"the digest of the costs of the {sampling.name}"
        self._ranks.check_equal(of_costs, what, "Expected the same on every rank")
        return found

    def _num_steps(self) -> int | None:
        """Return the steps of the first epoch, if a sampler makes them."""
        if not self._sampling:
            return None
        name = self._sampling.name
        if self.train.num_samples is None:
            raise UsageError(
                f"{name} does not go with an iterable data set, whose samples have no "
                "numbers; expected a data set with __len__ and __getitem__"
            ).on_all_ranks()
        # A resume calls it again for its epoch, and relies on the same answer.
        first, again = (self._order(self.train, 1) for _ in range(2))
        if first.digest != again.digest:
            raise UsageError(
                f"the {name} returned another order when it was called again for epoch "
                f"1. {SAMPLER_EXPECTED}"
            ).on_all_ranks()
        steps = first.batches or range(
            0, len(first.samples), self._config.global_batch_size
        )
        return len(steps)

    def _warn_if_endless(self, epoch: int) -> None:
        if epoch == 1 and self._config.max_steps is None and self._world.is_rank_zero:
            logger.warning(
                "epoch 1 has had %d steps; an iterable data set that never ends needs "
                "max_steps (--max-steps), and validate_every_steps to be validated",
                ENDLESS_STEPS,
            )

    def evaluation_shard(self, loader: BatchLoader, strategy: Strategy) -> RankShard:
        """Return which batches of an evaluation this rank takes; local.

        Batches do not depend on the number of ranks, which take them in turn. Each rank
        has as many: callbacks may call collectives after each.
        """
        num, world_size = loader.samples.num_samples, self._world.world_size
        size = strategy.evaluation_batch_size(num)
        return RankShard(
            rank=self._world.rank,
            world_size=world_size,
            global_batch_size=size * world_size,
            micro_batch_size=size,
            assignment=MicroBatchAssignment(world_size=world_size, is_interleaved=True),
            order=None if num is None else np.arange(num, dtype=np.int64),
        )

    def take_samples_per_shard(self) -> list[int]:
        """Return the samples of each shard of an iterable set read since the last."""
        loader = self.train_loader
        if not loader.num_shards:  # on all ranks or none: they have one data set
            return []
        mine = torch.zeros(loader.num_shards, dtype=torch.int64)
        for part, count in loader.samples_per_shard.items():
            mine[part] = count
        loader.samples_per_shard.clear()
        mine = mine.to(self._world.device)
        dist.all_reduce(mine)
        return mine.tolist()

    def places(self) -> dict[int, StreamPlace]:
        """Return the last place of all ranks in each shard of an iterable set."""
        if self.train_loader.samples.num_samples is not None:
            return {}
        found: dict[int, StreamPlace] = {}
        for of_rank in self._ranks.allgather(self.train_loader.places):
            for index, place in of_rank.items():
                # A stream without `shard` is read by all ranks: of the furthest.
                if index not in found or place.num_read > found[index].num_read:
                    found[index] = place
        return found

    def take_skipped(self) -> int:
        """Return the samples of all ranks not readable since the last call."""
        mine = 0
        validation = self.val_loaders.values()
        loaders = (self.train_loader, *validation, *self._test_loaders)
        for loader in loaders:
            for error in loader.skipped:
                logger.info("skipped: %s", error)  # in this rank's log
            mine += len(loader.skipped)
            loader.skipped.clear()
        # By what may be skipped, not by what was: all ranks reduce, or none.
        if not any(loader.samples.may_skip for loader in loaders):
            return 0
        count = torch.tensor(float(mine), device=self._world.device)
        dist.all_reduce(count)
        return int(count)

    def close(self) -> None:
        """End the worker processes; local."""
        for samples in (self.train, *self.val_sets.values()):
            samples.close()

    def _samples(self, data: Any, what: str, *, reads_whole: bool = False) -> Samples:
        config, device = self._config, self._world.device
        samples = build_samples(
            data,
            what,
            seed=config.seed,
            world=self._world,
            ranks=self._ranks,
            num_workers=config.num_workers or 0,
            skip=config.on_bad_sample == "skip",
            collate_fn=self._task.collate_fn,
            reads_whole=reads_whole,
        )
        if device == "cpu" or not isinstance(samples, InMemory):
            return samples
        free, _ = torch.get_device_module(device).mem_get_info(device)
        # Each rank that shares the GPU holds a copy.
        on_node = self._world.nodes[self._world.node_rank].gpus
        sharing = on_node.count(on_node[self._world.local_rank]) if on_node else 1
        fits = samples.num_bytes * sharing < GPU_MEMORY_FRACTION * free
        return samples.to(device) if fits else samples
