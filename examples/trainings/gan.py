"""A GAN: two optimizers, each with a backward pass of its own.

mpirun -np 4 --oversubscribe python examples/trainings/gan.py
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import mpitrain

NOISE = 8  # numbers that a point is generated of


class Ring(Dataset[dict[str, Tensor]]):
    """Eight clouds of points on a ring, each with the noise of its step."""

    def __init__(self, num: int, seed: int) -> None:
        random = torch.Generator().manual_seed(seed)
        angles = torch.randint(8, (num,), generator=random) * (torch.pi / 4)
        points = torch.stack([angles.cos(), angles.sin()], 1)
        self.points = points + 0.05 * torch.randn(num, 2, generator=random)

    def __len__(self) -> int:
        return len(self.points)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        # Drawn here, noise belongs to the sample: it is the same on any rank.
        return {"real": self.points[index], "noise": torch.randn(NOISE)}


def layers(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Linear(inputs, 32), nn.LeakyReLU(0.2)),
        *(nn.Linear(32, 32), nn.LeakyReLU(0.2)),
        nn.Linear(32, outputs),
    )


class Networks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator, self.discriminator = layers(NOISE, 2), layers(2, 1)

    def forward(self, noise: Tensor, real: Tensor | None = None) -> Any:
        """Return points, and the scores of these and of real ones."""
        points = self.generator(noise)
        scores = self.discriminator(points).squeeze(1)
        if real is None:
            return points, scores
        return points, scores, self.discriminator(real).squeeze(1)


def entropy(scores: Tensor, is_real: float) -> Tensor:
    targets = torch.full_like(scores, is_real)
    return F.binary_cross_entropy_with_logits(scores, targets, reduction="none")


class GAN(mpitrain.Task):
    def configure_optimizers(self, model: Any) -> dict[str, torch.optim.Optimizer]:
        options = {"betas": (0.5, 0.99)}
        return {
            "d": torch.optim.Adam(model.discriminator.parameters(), 4e-3, **options),
            "g": torch.optim.Adam(model.generator.parameters(), 2e-3, **options),
        }

    def training_step(self, model: Any, batch: mpitrain.Batch, name: str) -> Tensor:
        fields = batch.inputs
        if name == "g":
            _, fake = model(fields["noise"])
            return entropy(fake, 1.0)
        _, fake, real = model(fields["noise"], fields["real"])
        return entropy(fake, 0.0) + entropy(real, 1.0)

    def validation_step(self, model: Any, batch: mpitrain.Batch) -> dict[str, Tensor]:
        points, _ = model(batch.inputs["noise"])
        return {"distance": (points.norm(dim=1) - 1).abs()}


DEFAULTS = mpitrain.TrainConfig(epochs=10, global_batch_size=30, schedule="constant")


def build(
    config: mpitrain.TrainConfig = DEFAULTS, world: mpitrain.World | None = None
) -> mpitrain.Trainer:
    torch.manual_seed(config.seed)
    return mpitrain.Trainer(
        Networks(),
        Ring(600, seed=0),
        Ring(100, seed=1),
        config,
        world=world,
        task=GAN(),
    )


if __name__ == "__main__":
    build().fit()
