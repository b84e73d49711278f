"""A training of your own, whose steps are methods of a Task. Replace what is in it.

mpirun -np 4 --oversubscribe python -m mpitrain --task train:build --name first
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import mpitrain

DEFAULTS = mpitrain.TrainConfig(
    epochs=10, global_batch_size=32, optimizer="adam", lr=1e-2, best_by="min:mae"
)


def load_data(num: int, seed: int) -> TensorDataset:
    """Return synthetic samples; any map-style or iterable data set will do."""
    inputs = torch.randn(num, 8, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(inputs, inputs.square().sum(1, keepdim=True))


class Regression(mpitrain.Task):
    """What a step computes."""

    def training_step(self, model: Any, batch: mpitrain.Batch) -> Tensor:
        """Return the loss of each sample, `(N,)`.

        Draw nothing at random here: ranks have different parts of a batch. In the data
        set torch, numpy and random are seeded for each sample.
        """
        return (model(batch.inputs) - batch.targets).square().mean(1)

    def validation_step(
        self, model: Any, batch: mpitrain.Batch
    ) -> Mapping[str, Tensor]:
        """Return metrics of each sample, `(N,)`, by name."""
        errors = model(batch.inputs) - batch.targets
        return {"loss": errors.square().mean(1), "mae": errors.abs().mean(1)}


def build(config: mpitrain.TrainConfig = DEFAULTS, width: int = 32) -> mpitrain.Trainer:
    """Build the training.

    Args:
        config: Has the flags of the command line.
        width: Of the hidden layer.
    """
    model = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 1))
    data = load_data(500, seed=1), load_data(100, seed=2)
    return mpitrain.Trainer(model, *data, config, task=Regression())


if __name__ == "__main__":  # as a script: mpirun -np 4 --oversubscribe python train.py
    torch.manual_seed(DEFAULTS.seed)  # of the weights; the command does so, too
    trainer = build()
    trainer.callbacks = mpitrain.default_callbacks("runs/script", DEFAULTS)
    trainer.fit()
