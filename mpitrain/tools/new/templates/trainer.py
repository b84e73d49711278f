"""A training of your own. Replace the data, the model, the loss and the metrics.

mpirun -np 4 --oversubscribe python -m mpitrain --task train:build --name first
"""

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


def squared_errors(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return the loss of each sample, `(N,)`."""
    return (outputs - targets).square().mean(1)


def absolute_errors(outputs: Tensor, targets: Tensor) -> Tensor:
    """Return a metric of each sample, `(N,)`."""
    return (outputs - targets).abs().mean(1)


def build(config: mpitrain.TrainConfig = DEFAULTS, width: int = 32) -> mpitrain.Trainer:
    """Build the training.

    Args:
        config: Has the flags of the command line.
        width: Of the hidden layer.
    """
    model = nn.Sequential(nn.Linear(8, width), nn.ReLU(), nn.Linear(width, 1))
    return mpitrain.Trainer(
        model,
        load_data(500, seed=1),
        load_data(100, seed=2),
        config,
        loss=squared_errors,
        metrics={"mae": absolute_errors},
    )


if __name__ == "__main__":  # as a script: mpirun -np 4 --oversubscribe python train.py
    torch.manual_seed(DEFAULTS.seed)  # of the weights; the command does so, too
    trainer = build()
    trainer.callbacks = mpitrain.default_callbacks("runs/script", DEFAULTS)
    trainer.fit()
