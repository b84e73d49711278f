"""Rare classes: class weights and focal loss; several labels: F1 of each.

mpirun -np 4 --oversubscribe python examples/trainings/imbalance.py
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassConfusionMatrix,
    MultilabelF1Score,
)

import mpitrain

SHARES = torch.tensor([0.6, 0.25, 0.1, 0.04, 0.01])  # of the classes
NUM_CLASSES, NUM_LABELS = len(SHARES), 6


def rare_classes(num: int, seed: int) -> TensorDataset:
    random = torch.Generator().manual_seed(seed)
    targets = torch.multinomial(SHARES, num, replacement=True, generator=random)
    centers = torch.randn(NUM_CLASSES, 8, generator=torch.Generator().manual_seed(5))
    noise = torch.randn(num, 8, generator=random)
    return TensorDataset(centers[targets] + 0.7 * noise, targets)


def several_labels(num: int, seed: int) -> TensorDataset:
    inputs = torch.randn(num, 8, generator=torch.Generator().manual_seed(seed))
    weights = torch.randn(8, NUM_LABELS, generator=torch.Generator().manual_seed(5))
    return TensorDataset(
        inputs, (inputs @ weights > torch.linspace(0, 4, NUM_LABELS)).float()
    )


def network(num_outputs: int, seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, num_outputs))


DEFAULTS = mpitrain.TrainConfig(
    epochs=3, global_batch_size=16, optimizer="adam", lr=1e-2
)


def build(
    config: mpitrain.TrainConfig = DEFAULTS, world: mpitrain.World | None = None
) -> mpitrain.Trainer:
    train = rare_classes(600, seed=1)
    counts = torch.bincount(train.tensors[1], minlength=NUM_CLASSES)
    class_weights = (counts.sum() / counts).sqrt()

    def focal_loss(logits: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        """Return losses and weights `(N,)`, as `nn.CrossEntropyLoss(weight=)` means."""
        losses = F.cross_entropy(logits, targets, reduction="none")
        weights = class_weights.to(logits)[targets]
        return (1 - (-losses).exp()) ** 2 * losses, weights

    return mpitrain.Trainer(
        network(NUM_CLASSES, config.seed),
        train,
        rare_classes(203, seed=2),
        config,
        world=world,
        loss=focal_loss,
        metrics={
            "balanced_accuracy": MulticlassAccuracy(NUM_CLASSES, average="macro"),
            "matrix": MulticlassConfusionMatrix(NUM_CLASSES),
        },
    )


def build_multilabel(
    config: mpitrain.TrainConfig = DEFAULTS, world: mpitrain.World | None = None
) -> mpitrain.Trainer:
    return mpitrain.Trainer(
        network(NUM_LABELS, config.seed),
        several_labels(600, seed=1),
        several_labels(203, seed=2),
        config,
        world=world,
        loss=lambda logits, targets: F.binary_cross_entropy_with_logits(
            logits, targets, reduction="none"
        ),
        metrics={"f1": MultilabelF1Score(NUM_LABELS)},
    )


if __name__ == "__main__":
    with mpitrain.init() as world:
        build(world=world).fit()
        build_multilabel(world=world).fit()
