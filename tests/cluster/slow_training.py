"""A small data set that takes its time, and a model of one layer: a user's own."""

from __future__ import annotations

import time
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset


class Slow(Dataset[tuple[Tensor, int]]):
    """Numbers; to read one takes as many seconds as the file `pause` says."""

    num_classes = 2

    def __init__(self, size: int) -> None:
        self.pause = float(Path("pause").read_text())
        values = torch.Generator().manual_seed(size)
        self.inputs = torch.randn(size, 1, 4, 4, generator=values)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        time.sleep(self.pause)
        value = self.inputs[index]
        return value, int(value.sum() > 0)


def data() -> tuple[Slow, Slow]:
    return Slow(96), Slow(8)


def model() -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(16, 2))
