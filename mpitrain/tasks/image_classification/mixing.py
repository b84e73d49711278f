"""Mixup and CutMix, independent of the number of ranks.

The partner of a sample is the one before it in the order of the step, on whatever rank
that is, and all samples of a step are mixed alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from mpitrain.config import LearningConfig
from mpitrain.data.samples import kind_of
from mpitrain.errors import UsageError
from mpitrain.tasks.image_classification.transforms import NUM_DIMENSIONS


@dataclass(frozen=True, kw_only=True)
class Mix:
    """How the samples of one step are mixed."""

    weight: float  # of the sample and its label, 0 to 1; the partner has the rest
    # Rows and columns (from, to, from, to) pasted from the partner; ``None``: mixup.
    box: tuple[int, int, int, int] | None

    def apply(self, inputs: Tensor) -> Tensor:
        """Mix `(N + 1, C, H, W)`, each sample after its partner, to `(N, C, H, W)`."""
        partners, samples = inputs[:-1], inputs[1:]
        if self.box is None:
            return torch.lerp(partners, samples, self.weight)
        top, bottom, left, right = self.box
        mixed = samples.clone()
        mixed[..., top:bottom, left:right] = partners[..., top:bottom, left:right]
        return mixed


def draw_mix(config: LearningConfig, epoch: int, step: int, inputs: Any) -> Mix | None:
    """Draw the mix of a step, equal on all ranks; ``None`` if nothing is mixed."""
    if not is_mixing(config):
        return None
    is_image = isinstance(inputs, Tensor) and inputs.ndim == NUM_DIMENSIONS
    if not is_image or (config.mixup and not inputs.is_floating_point()):
        refuse_mixing(config, f"is for images of floats, found {kind_of(inputs)}")
    generator = np.random.Generator(np.random.PCG64([config.seed, epoch, step, 77]))
    both = config.mixup > 0 and config.cutmix > 0
    pastes = generator.random() < 0.5 if both else config.cutmix > 0
    alpha = config.cutmix if pastes else config.mixup
    weight = float(generator.beta(alpha, alpha))
    if not pastes:
        return Mix(weight=weight, box=None)
    height, width = inputs.shape[-2:]
    half = 0.5 * (1 - weight) ** 0.5
    row, column = generator.random(2)
    top, bottom = (int(np.clip((row + s * half) * height, 0, height)) for s in (-1, 1))
    left, right = (int(np.clip((column + s * half) * width, 0, width)) for s in (-1, 1))
    # Not the weight that was drawn: the border has cut off a part of the box.
    pasted = (bottom - top) * (right - left) / (height * width)
    return Mix(weight=1 - pasted, box=(top, bottom, left, right))


def is_mixing(config: LearningConfig) -> bool:
    """Return whether mixup or cutmix is on."""
    return config.mixup > 0 or config.cutmix > 0


def refuse_mixing(config: LearningConfig, why: str) -> None:
    """Raise a `UsageError` if mixup or cutmix is on."""
    if is_mixing(config):
        flag = "--mixup" if config.mixup else "--cutmix"
        raise UsageError(f"{flag} {why}")
