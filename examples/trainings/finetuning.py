"""Fine-tuning by LoRA: Muon, a rate for each layer, OneCycleLR, averaged weights.

mpirun -np 4 --oversubscribe python examples/trainings/finetuning.py
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import TensorDataset

import mpitrain


def data(num: int, seed: int) -> TensorDataset:
    inputs = torch.randn(num, 8, generator=torch.Generator().manual_seed(seed))
    targets = (inputs[:, 0] * inputs[:, 1] > 0).long() + (inputs[:, 2] > 1).long()
    return TensorDataset(inputs, targets)


class LoRA(nn.Module):
    """A frozen layer, and an update of low rank."""

    def __init__(self, layer: nn.Linear, rank: int = 4) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        outputs, inputs = layer.weight.shape
        self.down = nn.Parameter(0.1 * torch.randn(rank, inputs))
        self.up = nn.Parameter(torch.zeros(outputs, rank))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs) + inputs @ self.down.T @ self.up.T


class Network(nn.Module):
    """Three layers of a pretrained network, and a new head."""

    def __init__(self) -> None:
        super().__init__()
        sizes = ((8, 32), (32, 32), (32, 32))
        self.layers = nn.ModuleList(LoRA(nn.Linear(i, o)) for i, o in sizes)
        self.head = nn.Linear(32, 3, bias=False)

    def forward(self, inputs: Tensor) -> Tensor:
        for layer in self.layers:
            inputs = layer(inputs).relu()
        return self.head(inputs)


def optimizer(model: Any) -> torch.optim.Optimizer:
    """Return Muon with half the rate for each layer further from the head."""
    parts = [*model.layers, model.head]
    groups = [
        {
            "params": [it for it in part.parameters() if it.requires_grad],
            "lr": 0.1 * 0.5 ** (len(parts) - 1 - depth),
        }
        for depth, part in enumerate(parts)
    ]
    return torch.optim.Muon(groups, weight_decay=0.01)


def scheduler(optimizer: torch.optim.Optimizer, total_steps: int) -> OneCycleLR:
    rates = [group["lr"] for group in optimizer.param_groups]
    return OneCycleLR(optimizer, rates, total_steps, cycle_momentum=False)


# Muon rounds to bfloat16: without `bitwise` the last bits of a gradient matter.
DEFAULTS = mpitrain.TrainConfig(
    epochs=10, global_batch_size=16, ema_decay=0.9, bitwise=True
)


def build(
    config: mpitrain.TrainConfig = DEFAULTS, world: mpitrain.World | None = None
) -> mpitrain.Trainer:
    torch.manual_seed(config.seed)
    return mpitrain.Trainer(
        Network(),
        data(200, seed=1),
        data(50, seed=2),
        config,
        world=world,
        optimizer=optimizer,
        scheduler=scheduler,
    )


if __name__ == "__main__":
    build().fit()
