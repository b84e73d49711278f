"""Stages, epochs, steps and learning rates of a training."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

from mpitrain.config import WARMUP_EPOCHS, TrainConfig
from mpitrain.errors import UsageError
from mpitrain.tasks.stages import Stage
from mpitrain.train.metrics import TrainState

WARMUP_SHARE = 0.1  # of `max_steps`, where the steps of an epoch are not known


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Stages, epochs and steps. Equal on all ranks."""

    num_samples: int | None  # training samples; ``None`` for an iterable data set
    config: TrainConfig
    stages: tuple[Stage, ...]  # in order; of a dry run, a part of the first one
    num_steps: int | None = None  # of the first epoch, if a sampler makes them

    def __post_init__(self) -> None:
        unknown = self.max_steps is not None and self.steps_per_epoch is None
        if unknown and self.config.warmup_epochs:
            raise UsageError(
                "--warmup-epochs and --max-steps with data of unknown length: an epoch "
                "has no number of steps; expected no warmup_epochs"
            ).on_all_ranks()

    @property
    def max_steps(self) -> int | None:
        """Steps of the training; ``None``: those of its epochs."""
        return None if self.config.dry_run else self.config.max_steps

    def stages_from(self, epoch: int) -> list[Stage]:
        """Return the stages from this epoch on; always at least the last one."""
        # The last one also where all epochs are done: a run that was stopped then ends.
        *before, last = self.stages
        return [stage for stage in before if stage.last_epoch >= epoch] + [last]

    def has_epoch(self, stage: Stage, state: TrainState, should_stop: bool) -> bool:
        """Whether to train in a stage, from this state on."""
        if state.epoch_step:
            return True  # the epoch has not ended
        return not (should_stop or self.is_done(state, stage))

    @property
    def length(self) -> str:
        """The number of steps or epochs, in words."""
        if self.max_steps is not None:
            return f"{self.max_steps} steps"
        return f"{self.num_epochs} epochs"

    def is_done(self, state: TrainState, stage: Stage | None = None) -> bool:
        """Whether all steps of a stage are done, or of the training."""
        last = (stage or self.stages[-1]).last_epoch
        return state.epoch > last or state.step >= (self.max_steps or sys.maxsize)

    def is_validation_due(self, state: TrainState) -> bool:
        """Whether to validate before the next step of the epoch."""
        every = self.config.validate_every_steps
        if every is None or not state.epoch_step or state.is_validated:
            return False
        return state.step % every == 0

    @property
    def num_epochs(self) -> int | None:
        """Epochs of all stages; ``None``: unknown."""
        if self.max_steps is None:
            return sum(stage.epochs for stage in self.stages)
        steps = self.steps_per_epoch
        return None if steps is None else -(-self.max_steps // steps)

    @property
    def steps_per_epoch(self) -> int | None:
        """Steps of an epoch, including the last, smaller one; ``None``: unknown."""
        if self.config.dry_run:
            return 1
        if self.num_samples is None or self.num_steps is not None:
            return self.num_steps
        return -(-self.num_samples // self.config.global_batch_size)

    @property
    def total_steps(self) -> int | None:
        """Steps of all epochs; ``None``: unknown."""
        steps, num_epochs = self.steps_per_epoch, self.num_epochs
        if self.max_steps is not None or steps is None or num_epochs is None:
            return self.max_steps
        return steps * num_epochs

    def steps_of(self, stage: Stage) -> int | None:
        """Return the steps of a stage; ``None``: unknown."""
        if self.max_steps is not None:
            return self.max_steps
        steps = self.steps_per_epoch
        return None if steps is None else steps * stage.epochs

    def steps_done(self, stage: Stage, state: TrainState) -> int | None:
        """Return how many steps of a stage are done; ``None``: unknown."""
        if self.max_steps is not None:
            return state.step
        steps, epochs_done = self.steps_per_epoch, state.epoch - stage.first_epoch
        return None if steps is None else epochs_done * steps + state.epoch_step

    def learning_rate(
        self, stage: Stage, state: TrainState, step: int, peak: float | None = None
    ) -> float:
        """Return the learning rate of a step, which is counted from 0 in its epoch.

        Linear warm-up, then the schedule. With an unknown number of steps it changes
        from epoch to epoch only, but for `warmup_steps`, which end with the first.

        ``state`` is that before the step, ``peak`` of a parameter group; ``None``: the
        configured one.

        >>> from mpitrain.tasks.stages import place_stages
        >>> def rates(**settings):
        ...     config = TrainConfig(lr=1.0, epochs=3, global_batch_size=1, **settings)
        ...     stages = place_stages(None, config)
        ...     plan = Plan(num_samples=2, config=config, stages=stages)
        ...     states = [TrainState(step=i, epoch=1 + i // 2) for i in range(6)]
        ...     found = [plan.learning_rate(plan.stages[0], it, it.step % 2)
        ...         for it in states[: plan.total_steps]]
        ...     return [round(rate, 2) for rate in found]
        >>> rates()
        [0.33, 0.67, 1.0, 1.0, 0.75, 0.25]
        >>> rates(schedule="step", decay_epochs=1, warmup_epochs=0.5)
        [1.0, 1.0, 0.1, 0.1, 0.01, 0.01]
        >>> rates(schedule="constant", warmup_epochs=0)
        [1.0, 1.0, 1.0, 1.0, 1.0, 1.0]
        >>> rates(max_steps=5)  # a warm-up of 2.5 steps
        [0.5, 1.0, 1.0, 0.75, 0.25]
        >>> rates(schedule="linear", warmup_steps=1)
        [1.0, 1.0, 0.8, 0.6, 0.4, 0.2]
        """
        config, num_epochs = self.config, float(stage.epochs)
        if peak is None:
            peak = stage.peak_lr(config)
        steps_per_epoch = self.steps_per_epoch or 1
        first_steps = config.warmup_steps or 0
        is_unknown = self.steps_per_epoch is None and self.max_steps is None
        if is_unknown and state.epoch == stage.first_epoch and step < first_steps:
            return peak * (step + 1) / first_steps
        epochs_done = state.epoch - stage.first_epoch
        # min: an epoch of a stream counts as one step, and one of a sampler may have
        # more steps than its first.
        step = min(step, steps_per_epoch - 1) + epochs_done * steps_per_epoch
        total_steps = stage.epochs * steps_per_epoch
        if self.max_steps is not None:
            step, total_steps = state.step, self.max_steps
            num_epochs = total_steps / steps_per_epoch
        warmup_epochs = config.warmup_epochs
        if warmup_epochs is None:
            warmup_epochs = min(WARMUP_EPOCHS, num_epochs / 2)
        warmup_steps = round(steps_per_epoch * warmup_epochs)
        if self.max_steps is not None and self.steps_per_epoch is None:
            warmup_steps = round(WARMUP_SHARE * total_steps)
        if config.warmup_steps is not None:
            warmup_steps = 0 if is_unknown else config.warmup_steps
        if step < warmup_steps:
            return peak * (step + 1) / warmup_steps
        if config.schedule == "constant":
            return peak
        if config.schedule == "step":
            decays = epochs_done // config.decay_epochs
            return float(peak * config.decay_factor**decays)
        decay_steps = total_steps - warmup_steps
        done = (step - warmup_steps) / max(1, decay_steps)
        if config.schedule == "linear":
            return peak * (1.0 - done)
        return peak * 0.5 * (1.0 + math.cos(math.pi * done))
