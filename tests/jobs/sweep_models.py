"""Models of sweeps: each fails in another way, on the last rank of its trial."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn


class Net(nn.Module):
    """A linear model whose forward pass takes PACE seconds in training."""

    def __init__(self, num_classes: int, image_size: int) -> None:
        super().__init__()
        self.head = nn.Linear(image_size * image_size, num_classes)
        self.calls = 0

    def forward(self, images: Tensor) -> Tensor:
        if self.training:
            time.sleep(float(os.environ.get("PACE", "0")))
        if dist.get_rank() == dist.get_world_size() - 1:
            self.calls += 1
            self.strike()
        return self.head(images.flatten(1))

    def strike(self) -> None:
        """Do nothing."""


class Mapped(Net):
    """Prints which shared memory of data sets this process has."""

    def __init__(self, num_classes: int, in_channels: int, image_size: int) -> None:
        super().__init__(num_classes, image_size)
        self.head = nn.Linear(in_channels * image_size * image_size, num_classes)
        maps = Path("/proc/self/maps").read_text().splitlines()
        found = {line.split()[4] for line in maps if "memfd:mpitrain-data" in line}
        print("inodes", *sorted(found))


class Raises(Net):
    def strike(self) -> None:
        if self.calls == 3:
            raise ArithmeticError("this is the fault")


class RaisesInValidation(Net):
    def strike(self) -> None:
        if not self.training:
            raise ArithmeticError("this is the fault in the validation")


class Exits(Net):
    def strike(self) -> None:
        if self.calls == 3:
            sys.exit("no more")


class NotFinite(Net):
    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images) * torch.nan


class KillsOnce(Net):
    """Kills its process when it trains for the first time."""

    def strike(self) -> None:
        mark = Path("killed")
        if self.calls == 12 and not mark.exists():
            mark.write_text("")
            os.kill(os.getpid(), signal.SIGKILL)


class Kills(Net):
    def strike(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Hangs(Net):
    def strike(self) -> None:
        if self.calls == 3:
            time.sleep(1000)


def space(trial: Any) -> dict[str, Any]:
    lr = trial.suggest_float("lr", 0.01, 0.1)
    return {"lr": lr, "ranks": trial.suggest_categorical("ranks", [1, 2])}


def broken_space(trial: Any) -> dict[str, Any]:
    raise ZeroDivisionError("the space is broken")
