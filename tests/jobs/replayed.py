"""A script that trains with a batch norm, dropout, and what the environment asks for.

NAN_AT: the sample that has a NaN. CHANGED_FROM: the step from which a layer computes
otherwise. SECOND: it trains with two optimizers.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from torch import Tensor, nn

import mpitrain

NAN_AT = int(os.environ.get("NAN_AT", "-1"))
CHANGED_FROM = int(os.environ.get("CHANGED_FROM", "1000"))


class Data(torch.utils.data.Dataset[tuple[Tensor, Tensor]]):
    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(1)
        self.inputs = torch.randn(320, 10, generator=generator)
        self.labels = torch.randint(3, (320,), generator=generator)

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        inputs = self.inputs[index].clone()
        if index == NAN_AT:
            inputs[3] = float("nan")
        return inputs, self.labels[index]


class Scale(nn.Module):
    """Multiplies by a factor, from a step on by another one."""

    def __init__(self) -> None:
        super().__init__()
        self.factor = 1.0

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs * self.factor


class Change(mpitrain.Callback):
    def on_batch_start(self, trainer: mpitrain.Trainer, batch: Any) -> None:
        scale: Any = trainer.model[3]  # type: ignore[index]
        is_changed = trainer.state.step + 1 >= CHANGED_FROM
        scale.factor = 1.0001 if is_changed else 1.0


def main(run_dir: str, *flags: str) -> None:
    """Train for 20 steps."""
    torch.manual_seed(0)
    model = nn.Sequential(
        *(nn.Linear(10, 20), nn.BatchNorm1d(20), nn.Dropout(0.2), Scale()),
        *(nn.ReLU(), nn.Linear(20, 3)),
    )
    config = mpitrain.TrainConfig(
        epochs=2, global_batch_size=32, bitwise="plain" not in flags, optimizer="adamw"
    )
    callbacks = mpitrain.default_callbacks(
        run_dir, config, fingerprint=1, keep_checkpoints=None
    )
    data = Data()
    trainer = mpitrain.Trainer(
        model, data, data, config, callbacks=[*callbacks, Change()]
    )
    trainer.fit()


if __name__ == "__main__":
    with mpitrain.init():
        main(*sys.argv[1:])
