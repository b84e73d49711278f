"""A stage of a training: epochs in which the same weights are trained."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from mpitrain.config import TrainConfig
from mpitrain.errors import UsageError

MAX_NAMED = 20  # modules that an error lists

PROBE = "probe"
"""The name of a stage in which `ImageClassification` trains the head alone."""


@dataclass(frozen=True, kw_only=True)
class Stage:
    """Epochs in which the same weights are trained, by an optimizer of their own.

    Learning rate schedule, optimizer state and EMA begin anew with each stage.

    Attributes:
        epochs: How many.
        trainable: Which weights are trained: a regular expression that matches whole
            parts of a name. ``"layers.2|head"`` is ``encoder.layers.2.0.weight`` and
            ``head.bias``, not ``layers.20.weight``. The others do not require
            gradients, and a module of which all weights are frozen is in evaluation
            mode: no dropout, and batch norm keeps its statistics. ``None``: what
            required gradients before `fit`, in training mode.
        lr: Peak learning rate of the configured optimizer; ``None``: the configured.
        lr_factor: The learning rate of each parameter group is multiplied by it.
        name: In lines and records; empty: ``stage-1``, and so on. In a stage
            ``"probe"`` without `trainable`, `ImageClassification` trains the head
            alone, on features that are computed once where they do not change.
        first_epoch: Its number, from 1 over all stages; `place_stages` sets it.
    """

    epochs: int
    trainable: str | None = None
    lr: float | None = None
    lr_factor: float = 1.0
    name: str = ""
    first_epoch: int = 1

    def __post_init__(self) -> None:
        try:
            self._pattern()
        except re.error as error:
            raise UsageError(
                f"Stage(trainable={self.trainable!r}) is no regular expression: {error}"
            ) from None
        if self.epochs < 1:
            raise UsageError(f"a Stage has {self.epochs} epochs; expected at least 1")

    def as_plain(self) -> dict[str, Any]:
        """Return the fields that are not as by default."""
        fields = vars(self).items()
        return {name: it for name, it in fields if it != getattr(Stage, name, None)}

    @property
    def last_epoch(self) -> int:
        """Its number."""
        return self.first_epoch + self.epochs - 1

    def peak_lr(self, config: TrainConfig) -> float:
        """Return the peak learning rate of the configured optimizer."""
        if self.lr is not None:
            config = replace(config, lr=self.lr)
        return config.peak_lr * self.lr_factor

    def weights(self, model: nn.Module) -> list[nn.Parameter]:
        """Return the weights of a model that `trainable` matches.

        Raises:
            UsageError: There is none; on all ranks, of which each has this model.
        """
        pattern = self._pattern()
        named = [*model.named_parameters(remove_duplicate=False)]  # tied ones have two
        found = [weight for name, weight in named if pattern.search(name)]
        if not found:
            owners = [*dict.fromkeys(name.rpartition(".")[0] for name, _ in named)]
            more = f" and {len(owners) - MAX_NAMED} more" * (len(owners) > MAX_NAMED)
            raise UsageError(
                f"Stage(trainable={self.trainable!r}) matches no weight; expected "
                "whole parts of their names, such as modules, found "
                f"{', '.join(owners[:MAX_NAMED])}{more}"
            ).on_all_ranks()
        return found

    def freeze(self, model: nn.Module) -> list[nn.Module]:
        """Let the weights require gradients that are trained, and the others not.

        Returns the modules that are then in evaluation mode. Local.
        """
        if self.trainable is None:
            return []
        trained = {id(weight) for weight in self.weights(model)}
        for weight in model.parameters():
            is_number = weight.is_floating_point() or weight.is_complex()
            weight.requires_grad_(is_number and id(weight) in trained)
        modes = {
            module: [weight.requires_grad for weight in module.parameters()]
            for module in model.modules()
        }
        return [module for module, its in modes.items() if its and not any(its)]

    def _pattern(self) -> re.Pattern[str]:
        return re.compile(rf"(^|\.)({self.trainable})(\.|$)")


def configured_stages(config: TrainConfig) -> list[Stage]:
    """Return the stages of a configuration: of all weights, perhaps after a probe."""
    if not config.probe_epochs:
        # Of `max_steps` epochs there are no more: one has a step at least.
        return [Stage(name="train", epochs=config.max_steps or config.epochs)]
    stages = [Stage(name=PROBE, epochs=config.probe_epochs)]
    if config.epochs:
        factor = config.finetune_lr_factor
        stages.append(Stage(name="finetune", epochs=config.epochs, lr_factor=factor))
    return stages


def place_stages(
    stages: Sequence[Stage] | None, config: TrainConfig
) -> tuple[Stage, ...]:
    """Return stages with names and numbers of epochs; ``None``: as configured.

    Raises:
        UsageError: They do not go together, or with the configuration.
    """
    if stages is None:
        stages = configured_stages(config)
    elif not (isinstance(stages, list | tuple) and stages) or not all(
        isinstance(stage, Stage) for stage in stages
    ):
        raise UsageError(
            f"found stages={stages!r}; expected a list of mpitrain.Stage"
        ).on_all_ranks()
    elif names := {"epochs", "max_steps", "probe_epochs"} & config.changed.keys():
        raise UsageError(
            f"stages= and {', '.join(sorted(names))} of the TrainConfig; expected the "
            "epochs of each Stage alone"
        ).on_all_ranks()
    if config.dry_run:
        stages = [replace(stages[0], epochs=1)]
    placed: list[Stage] = []
    for number, stage in enumerate(stages, 1):
        name = stage.name or f"stage-{number}"
        first = placed[-1].last_epoch + 1 if placed else 1
        placed.append(replace(stage, name=name, first_epoch=first))
    if len({stage.name for stage in placed}) < len(placed):
        raise UsageError(
            f"stages= has the names {[stage.name for stage in placed]}; expected "
            "another name for each"
        ).on_all_ranks()
    return tuple(placed)
