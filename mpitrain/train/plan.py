"""The sums that follow from a configuration, a data set and a number of ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from mpitrain.data import sharding
from mpitrain.data.sharding import Indices, Share
from mpitrain.train.config import TrainConfig
from mpitrain.train.optim import learning_rate


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Epochs in which the same weights learn."""

    name: Literal["train", "probe", "finetune"]
    """probe: the head alone; finetune: all, after that; train: all, from the start."""
    first_epoch: int
    """From 1, counted over all stages."""
    num_epochs: int
    """How many."""
    lr_factor: float = 1.0
    """What the learning rate is multiplied by."""

    @property
    def epochs(self) -> range:
        """The numbers of its epochs."""
        return range(self.first_epoch, self.first_epoch + self.num_epochs)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """How a training is cut into stages, epochs, steps and microsteps.

    Equal on all ranks.
    """

    num_samples: int | None
    """Samples of the training set; ``None`` where its end alone tells."""
    world_size: int
    """Ranks that share every step."""
    config: TrainConfig
    """What was asked."""
    micro_batch_size: int | None = None
    """Most samples that a rank takes at once; ``None``: all of its share."""

    @property
    def stages(self) -> tuple[Stage, ...]:
        """The stages, in their order; a dry run begins the first of them."""
        config = self.config
        epochs, probing = config.epochs, config.probe_epochs
        if config.dry_run:
            name: Literal["probe", "train"] = "probe" if probing else "train"
            return (Stage(name=name, first_epoch=1, num_epochs=1),)
        if not probing:
            return (Stage(name="train", first_epoch=1, num_epochs=epochs),)
        probe = Stage(name="probe", first_epoch=1, num_epochs=probing)
        finetune = Stage(
            name="finetune",
            first_epoch=probing + 1,
            num_epochs=epochs,
            lr_factor=config.finetune_lr_factor,
        )
        return (probe, finetune) if epochs else (probe,)

    def stages_left(self, epoch: int) -> list[Stage]:
        """Return the stages that have epochs from this one on, and the last stage.

        Though all of it be done: its model wants judging.
        """
        *before, last = self.stages
        return [stage for stage in before if stage.epochs[-1] >= epoch] + [last]

    @property
    def num_epochs(self) -> int:
        """Passes over the training set, of all stages."""
        return sum(stage.num_epochs for stage in self.stages)

    @property
    def steps_per_epoch(self) -> int | None:
        """Steps of an epoch, the short last one included; ``None``: not known."""
        if self.config.dry_run:
            return 1
        if self.num_samples is None:
            return None
        return sharding.num_steps(self.num_samples, self.config.global_batch_size)

    @property
    def total_steps(self) -> int | None:
        """Steps of the whole training; ``None``: not known."""
        steps = self.steps_per_epoch
        return None if steps is None else steps * self.num_epochs

    def share_of(
        self, rank: int, order: Indices | None, *, with_partner: bool = False
    ) -> Share:
        """Return what a rank takes of an epoch in this order."""
        return Share(
            rank=rank,
            world_size=self.world_size,
            global_batch_size=self.config.global_batch_size,
            micro_batch_size=self.micro_batch_size,
            order=order,
            max_steps=1 if self.config.dry_run else None,
            with_partner=with_partner,
        )

    def learning_rate(self, stage: Stage, epoch: int, step: int) -> float:
        """Return the learning rate of a step.

        Where the number of steps is not known, it changes from epoch to epoch alone.

        Args:
            stage: Whose schedule.
            epoch: One of its epochs.
            step: Of that epoch, from 0.
        """
        steps = self.steps_per_epoch or 1
        done = (epoch - stage.first_epoch) * steps + min(step, steps - 1)
        return learning_rate(
            done,
            config=self.config,
            peak=self.config.peak_lr * stage.lr_factor,
            num_epochs=stage.num_epochs,
            steps_per_epoch=steps,
        )

    def batch_line(self) -> str:
        """Show the sum that makes a full step, with its factors."""
        size = self.config.global_batch_size
        largest = sharding.largest_shard(size, self.world_size)
        smallest = size // self.world_size
        micro = min(self.micro_batch_size or largest, largest)
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
