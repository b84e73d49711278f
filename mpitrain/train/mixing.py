"""Mixup and CutMix: two samples of a step become one.

The partner of a sample is the one before it in the step's order, on whatever rank that
is; and all samples of a step are mixed alike. So both do not depend on the number of
ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from mpitrain.errors import UsageError
from mpitrain.train.config import LearningConfig


@dataclass(frozen=True, kw_only=True)
class Mix:
    """How the samples of one step are mixed."""

    share: float
    """What is left of a sample itself, 0 to 1; also of its label."""
    box: tuple[int, int, int, int] | None
    """Rows and columns (from, to, from, to) pasted from the partner; ``None`` where all
    pixels are averaged."""

    def apply(self, inputs: Tensor) -> Tensor:
        """Mix a batch.

        Args:
            inputs: `(N + 1, C, H, W)`: each sample comes after its partner.

        Returns:
            `(N, C, H, W)`.
        """
        partners, own = inputs[:-1], inputs[1:]
        if self.box is None:
            return torch.lerp(partners, own, self.share)
        top, bottom, left, right = self.box
        mixed = own.clone()
        mixed[..., top:bottom, left:right] = partners[..., top:bottom, left:right]
        return mixed


def drawn(config: LearningConfig, epoch: int, step: int, size: tuple[int, int]) -> Mix:
    """Draw how the samples of a step are mixed; equal on all ranks.

    Args:
        config: Has the seed, and `mixup` or `cutmix` or both.
        epoch: The epoch's number.
        step: The step's number in its epoch.
        size: Height and width of the images in pixels.
    """
    generator = np.random.Generator(np.random.PCG64([config.seed, epoch, step, 77]))
    both = config.mixup > 0 and config.cutmix > 0
    pastes = generator.random() < 0.5 if both else config.cutmix > 0
    alpha = config.cutmix if pastes else config.mixup
    share = float(generator.beta(alpha, alpha))
    if not pastes:
        return Mix(share=share, box=None)
    height, width = size
    half = 0.5 * (1 - share) ** 0.5
    row, column = generator.random(2)
    top, bottom = (int(np.clip((row + s * half) * height, 0, height)) for s in (-1, 1))
    left, right = (int(np.clip((column + s * half) * width, 0, width)) for s in (-1, 1))
    pasted = (bottom - top) * (right - left) / (height * width)
    return Mix(share=1 - pasted, box=(top, bottom, left, right))


def mixes(config: LearningConfig) -> bool:
    """Whether samples are mixed at all."""
    return config.mixup > 0 or config.cutmix > 0


def refuse_to_mix(config: LearningConfig, why: str) -> None:
    """Refuse to mix where partners cannot be had.

    Raises:
        UsageError: Mixing was asked for.
    """
    if mixes(config):
        flag = "--mixup" if config.mixup else "--cutmix"
        raise UsageError(f"{flag} {why}")
