"""Contrastive learning: a loss over all samples of the global batch.

mpirun -np 4 --oversubscribe python examples/trainings/contrastive.py
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset

import mpitrain


class Views(Dataset[Tensor]):
    """Two noisy views of each sample, `(2, 16)`."""

    def __init__(self, num: int, seed: int) -> None:
        random = torch.Generator().manual_seed(seed)
        centers = torch.randn(4, 16, generator=torch.Generator().manual_seed(9))
        labels = torch.randint(4, (num,), generator=random)
        self.samples = centers[labels] + 0.3 * torch.randn(num, 16, generator=random)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> Tensor:
        return self.samples[index] + 0.3 * torch.randn(2, 16)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 8))

    def forward(self, views: Tensor) -> Tensor:
        return F.normalize(self.layers(views), dim=-1)


class Contrastive(mpitrain.Task):
    def loss(self, outputs: Tensor, targets: Any) -> Tensor:
        """Return the loss of each sample, `(N,)`: its second view among those of all.

        Args:
            outputs: Of the encoder, `(N, 2, width)`.
            targets: Not used.
        """
        del targets
        rows, mine = self.all_gather(outputs)
        logits = rows[mine, 0] @ rows[:, 1].T / 0.1
        places = torch.arange(len(rows), device=rows.device)[mine]
        return F.cross_entropy(logits, places, reduction="none")


DEFAULTS = mpitrain.TrainConfig(
    epochs=5, global_batch_size=32, optimizer="adam", lr=1e-2
)


def build(
    config: mpitrain.TrainConfig = DEFAULTS, world: mpitrain.World | None = None
) -> mpitrain.Trainer:
    torch.manual_seed(config.seed)
    return mpitrain.Trainer(
        Encoder(),
        Views(200, seed=1),
        Views(61, seed=2),
        config,
        world=world,
        task=Contrastive(),
    )


if __name__ == "__main__":
    build().fit()
