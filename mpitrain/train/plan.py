"""The sums that follow from a configuration, a data set and a number of ranks."""

from __future__ import annotations

from dataclasses import dataclass

from mpitrain.data import sharding
from mpitrain.data.sharding import Indices
from mpitrain.train.config import TrainConfig
from mpitrain.train.optim import learning_rate


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a training is cut into epochs, steps and microsteps. Equal on all ranks."""

    num_samples: int
    """Samples of the training set."""
    world_size: int
    """Ranks that share every step."""
    config: TrainConfig
    """What was asked."""

    @property
    def num_epochs(self) -> int:
        """Passes over the training set; a dry run begins one."""
        return 1 if self.config.dry_run else self.config.epochs

    @property
    def steps_per_epoch(self) -> int:
        """Steps of an epoch, the short last one included."""
        if self.config.dry_run:
            return 1
        return sharding.num_steps(self.num_samples, self.config.global_batch_size)

    @property
    def total_steps(self) -> int:
        """Steps of the whole training."""
        return self.steps_per_epoch * self.num_epochs

    def steps_of(self, epoch: int) -> list[Indices]:
        """Return the samples of each step of an epoch, int64 `(B,)` each."""
        order = sharding.epoch_order(self.num_samples, self.config.seed, epoch)
        steps = sharding.steps_of(order, self.config.global_batch_size)
        return list(steps)[: self.steps_per_epoch]

    def learning_rate(self, step: int) -> float:
        """Return the learning rate of a step, counted from 0."""
        return learning_rate(
            step,
            peak=self.config.peak_lr,
            warmup_steps=round(self.steps_per_epoch * self.config.warmup_epochs),
            total_steps=self.total_steps,
        )

    def microsteps_of(self, samples: Indices, rank: int) -> list[Indices]:
        """Cut one rank's share of a step into microsteps.

        Args:
            samples: The step's samples on all ranks, int64 `(B,)`.
            rank: Whose share.

        Returns:
            As many parts on every rank; some may be empty.
        """
        mine = sharding.shard_of(samples, rank, self.world_size)
        largest = sharding.largest_shard(len(samples), self.world_size)
        size = min(self.config.micro_batch_size or largest, largest)
        return [mine[start : start + size] for start in range(0, largest, size)]

    def batch_line(self) -> str:
        """Show the sum that makes a full step, with its factors."""
        size = self.config.global_batch_size
        largest = sharding.largest_shard(size, self.world_size)
        smallest = size // self.world_size
        micro = min(self.config.micro_batch_size or largest, largest)
        microsteps = -(-largest // micro)
        ranks = f"{self.world_size} rank{'s' * (self.world_size != 1)}"
        shares = str(largest) if smallest == largest else f"{smallest} or {largest}"
        if microsteps == 1:
            product = f"{ranks} x {shares} x 1"
        elif smallest == largest == micro * microsteps:
            product = f"{ranks} x {micro} x {microsteps}"
        else:
            return (
                f"{size} per step = {ranks} x {shares}, in {microsteps} microsteps of "
                f"at most {micro}"
            )
        return f"{size} per step = {product} (ranks x samples x microsteps)"
