"""Models and data that take their time, or all of it, on one rank: for the report."""

from __future__ import annotations

import os
import time

from torch import Tensor, nn
from torch.utils.data import Dataset

from mpitrain.tasks.image_classification.datasets.named import InMemory
from mpitrain.tasks.image_classification.datasets.named import digits as embedded_digits


def seconds_of(name: str) -> float:
    """What a variable says, on the rank that SLOW_RANK names; 0 on the others."""
    is_slow = os.environ["RANK"] == os.environ.get("SLOW_RANK")
    return float(os.environ.get(name, "0")) if is_slow else 0.0


class SlowModel(nn.Module):
    """A network whose forward pass takes PACE seconds, and SLOW more on one rank.

    From step HANG_STEP on that rank takes for ever.
    """

    def __init__(self, num_classes: int, image_size: int) -> None:
        super().__init__()
        self.head = nn.Sequential(
            nn.Linear(image_size * image_size, 64),
            nn.ReLU(),
            nn.Linear(64, num_classes),
        )
        self.calls = 0

    def forward(self, images: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            time.sleep(float(os.environ.get("PACE", "0.01")) + seconds_of("SLOW"))
            if seconds_of("HANG_STEP") and self.calls >= seconds_of("HANG_STEP"):
                time.sleep(1000)
        return self.head(images.flatten(1))


class SlowDigits(Dataset[tuple[Tensor, int]]):
    """Digits that come slowly: DRIP seconds for each sample."""

    num_classes = 10

    def __init__(self, samples: InMemory) -> None:
        self.images, self.labels = samples.inputs, samples.targets

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        time.sleep(float(os.environ.get("DRIP", "0.001")))
        return self.images[index], int(self.labels[index])


def slow_digits() -> tuple[SlowDigits, SlowDigits]:
    data = embedded_digits()
    return SlowDigits(data.train), SlowDigits(data.val)
