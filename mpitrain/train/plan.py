"""Stages, epochs, steps and learning rates of a training."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from mpitrain.config import WARMUP_EPOCHS, TrainConfig


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Epochs in which the same weights are trained."""

    # probe: only the head; finetune: all weights, after a probe; train: all.
    name: Literal["train", "probe", "finetune"]
    first_epoch: int  # from 1, over all stages
    num_epochs: int
    lr_factor: float = 1.0  # factor of the learning rate

    @property
    def epochs(self) -> range:
        """The numbers of the epochs."""
        return range(self.first_epoch, self.first_epoch + self.num_epochs)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Stages, epochs and steps. Equal on all ranks."""

    num_samples: int | None  # training samples; ``None`` for an iterable data set
    world_size: int
    config: TrainConfig

    @property
    def stages(self) -> tuple[Stage, ...]:
        """All stages in order; of a dry run, a part of the first one."""
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

    def stages_from(self, epoch: int) -> list[Stage]:
        """Return the stages from this epoch on; always at least the last one."""
        *before, last = self.stages
        return [stage for stage in before if stage.epochs[-1] >= epoch] + [last]

    @property
    def num_epochs(self) -> int:
        """Epochs of all stages."""
        return sum(stage.num_epochs for stage in self.stages)

    @property
    def steps_per_epoch(self) -> int | None:
        """Steps of an epoch, including the last, smaller one; ``None``: unknown."""
        if self.config.dry_run:
            return 1
        if self.num_samples is None:
            return None
        return -(-self.num_samples // self.config.global_batch_size)

    @property
    def total_steps(self) -> int | None:
        """Steps of all epochs; ``None``: unknown."""
        steps = self.steps_per_epoch
        return None if steps is None else steps * self.num_epochs

    def steps_of(self, stage: Stage) -> int | None:
        """Return the steps of a stage; ``None``: unknown."""
        steps = self.steps_per_epoch
        return None if steps is None else steps * stage.num_epochs

    def learning_rate(
        self, stage: Stage, epoch: int, step: int, peak: float | None = None
    ) -> float:
        """Return the learning rate of a step, which is counted from 0 in its epoch.

        Linear warm-up, then the schedule. With an unknown number of steps it changes
        from epoch to epoch only, but for `warmup_steps`, which end with the first.
        ``peak`` is that of a parameter group; ``None``: the configured one.

        >>> def rates(**settings):
        ...     config = TrainConfig(lr=1.0, epochs=3, global_batch_size=1, **settings)
        ...     plan = Plan(num_samples=2, world_size=1, config=config)
        ...     found = [plan.learning_rate(plan.stages[0], epoch, step)
        ...         for epoch in (1, 2, 3) for step in (0, 1)]
        ...     return [round(rate, 2) for rate in found]
        >>> rates()
        [0.33, 0.67, 1.0, 1.0, 0.75, 0.25]
        >>> rates(schedule="step", decay_epochs=1, warmup_epochs=0.5)
        [1.0, 1.0, 0.1, 0.1, 0.01, 0.01]
        >>> rates(schedule="constant", warmup_epochs=0)
        [1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
        >>> rates(schedule="linear", warmup_steps=1)
        [1.0, 1.0, 0.8, 0.6, 0.4, 0.2]
        """
        config, num_epochs = self.config, stage.num_epochs
        if peak is None:
            peak = config.peak_lr * stage.lr_factor
        steps_per_epoch = self.steps_per_epoch or 1
        first_steps = config.warmup_steps or 0
        is_first = self.steps_per_epoch is None and epoch == stage.first_epoch
        if is_first and step < first_steps:
            return peak * (step + 1) / first_steps
        step = min(step, steps_per_epoch - 1)
        step += (epoch - stage.first_epoch) * steps_per_epoch
        warmup_epochs = config.warmup_epochs
        if warmup_epochs is None:
            warmup_epochs = min(WARMUP_EPOCHS, num_epochs / 2)
        warmup_steps = round(steps_per_epoch * warmup_epochs)
        if config.warmup_steps is not None:
            warmup_steps = config.warmup_steps if self.steps_per_epoch else 0
        if step < warmup_steps:
            return peak * (step + 1) / warmup_steps
        if config.schedule == "constant":
            return peak
        if config.schedule == "step":
            decays = step // steps_per_epoch // config.decay_epochs
            return float(peak * config.decay_factor**decays)
        decay_steps = num_epochs * steps_per_epoch - warmup_steps
        done = (step - warmup_steps) / max(1, decay_steps)
        if config.schedule == "linear":
            return peak * (1.0 - done)
        return peak * 0.5 * (1.0 + math.cos(math.pi * done))
