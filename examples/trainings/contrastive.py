"""Contrastive learning: a loss over all samples of the global batch.

mpirun -np 4 --oversubscribe python examples/trainings/contrastive.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import Dataset


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


def contrast(mine: Tensor, all_views: Tensor, places: Tensor) -> Tensor:
    """Return the loss of each sample, `(N,)`: its second view among those of all.

    Args:
        mine: `(N, 2, width)`.
        all_views: Of the whole batch, `(M, 2, width)`.
        places: Of the N samples among them, int64 `(N,)`.
    """
    logits = mine[:, 0] @ all_views[:, 1].T / 0.1
    return F.cross_entropy(logits, places, reduction="none")
