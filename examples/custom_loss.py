"""A regression: custom model, data, loss and metrics; runs in a notebook, too.

mpirun -np 4 --oversubscribe python examples/custom_loss.py
"""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import TensorDataset

import mpitrain

torch.manual_seed(1)  # every rank must have the same data
x = 6 * torch.rand(1000, 2) - 3
y = torch.sin(x[:, :1]) * torch.cos(x[:, 1:])
model = nn.Sequential(nn.Linear(2, 64), nn.Tanh(), nn.Linear(64, 1))

trainer = mpitrain.Trainer(
    model,
    TensorDataset(x[:800], y[:800]),
    TensorDataset(x[800:], y[800:]),
    mpitrain.TrainConfig(epochs=20, optimizer="adam", lr=0.03),
    loss=lambda outputs, y: F.mse_loss(outputs, y, reduction="none"),
    metrics=lambda outputs, y: {"mean_error": (outputs - y).abs()},
)
trainer.fit()
state = trainer.state_dict()
if trainer.world.is_rank_zero:
    torch.save(state, "custom_model.pt")
