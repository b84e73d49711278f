"""Custom data sets, as users write them for ``--data custom_data:NAME``."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, get_worker_info

NUM_TRAIN, NUM_VAL = 26, 9
NUM_CLASSES = 3

Sample = tuple[Tensor, int]


def image(number: int) -> Tensor:
    """The image of a sample: float `(3, 12, 12)`, in which its number stands first."""
    of_sample = torch.Generator().manual_seed(number)
    pixels = torch.randint(0, 256, (3, 12, 12), dtype=torch.uint8, generator=of_sample)
    pixels[:, 0, 0] = number
    return pixels / 255


class Photos(Dataset[Sample]):
    """A map-style set of images."""

    classes = ("a", "b", "c")

    def __init__(self, size: int) -> None:
        self.size = size

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Sample:
        return self.read(index), index % NUM_CLASSES

    def read(self, index: int) -> Tensor:
        """Nobody else's business."""
        return image(index)


class Readings(IterableDataset[Sample]):
    """An iterable set: how many there are is known at its end."""

    num_classes = NUM_CLASSES

    def __init__(self, numbers: range) -> None:
        self.numbers = numbers

    def __iter__(self) -> Iterator[Sample]:
        for number in self.numbers:
            yield image(number), number % NUM_CLASSES


class Parts(Readings):
    """The same, which can be cut: the first part is much longer than the others."""

    def shard(self, num_shards: int, index: int) -> Parts:
        half = len(self.numbers) // 2
        if num_shards == 1:
            return self
        if index == 0:
            return Parts(self.numbers[:half])
        return Parts(self.numbers[half + index - 1 :: num_shards - 1])


def photos() -> tuple[Photos, Photos]:
    return Photos(NUM_TRAIN), Photos(NUM_VAL)


def readings() -> tuple[Readings, Readings]:
    return Readings(range(NUM_TRAIN)), Readings(range(NUM_VAL))


def parts() -> tuple[Parts, Parts]:
    return Parts(range(NUM_TRAIN)), Parts(range(NUM_VAL))


def two_readings() -> tuple[Readings, Readings]:
    return Readings(range(2)), Readings(range(1))


def two_parts() -> tuple[Parts, Parts]:
    return Parts(range(2)), Parts(range(1))


# --- with faults ----------------------------------------------------------------------


class Faulty(Photos):
    """A set with one sample that cannot be read."""

    def __getitem__(self, index: int) -> Sample:
        if index == 11:
            raise ArithmeticError("this is the fault")
        return super().__getitem__(index)


def faulty() -> tuple[Faulty, Photos]:
    return Faulty(NUM_TRAIN), Photos(NUM_VAL)


class Stopping(Faulty):
    """Asks its job to stop when a sample is read for the first time."""

    def __getitem__(self, index: int) -> Sample:
        if index == 20 and not Path("stopped").exists():
            Path("stopped").touch()
            os.kill(os.getpid(), signal.SIGUSR2)
        return super().__getitem__(index)


def stopping() -> tuple[Photos, Stopping]:
    return Photos(NUM_TRAIN), Stopping(200)


class Slow(Photos):
    """Lasts for long, and is read by workers whose processes it notes."""

    def __getitem__(self, index: int) -> Sample:
        info = get_worker_info()
        if info is not None:
            name = f"worker-{os.environ['RANK']}-{info.id}-{os.getpid()}"
            Path(os.environ["NOTES"], name).touch()
        return super().__getitem__(index % NUM_TRAIN)


def slow() -> tuple[Slow, Photos]:
    return Slow(1_000_000), Photos(NUM_VAL)


# --- that take notes ------------------------------------------------------------------


class Noted(Photos):
    """Notes, in every worker, which samples are read there."""

    def __getitem__(self, index: int) -> Sample:
        if get_worker_info() is not None:
            note("read", index)
        return super().__getitem__(index)


class NotedParts(Parts):
    """The same for a set that can be cut; where it was, that is."""

    is_cut = False

    def __iter__(self) -> Iterator[Sample]:
        for number in self.numbers:
            if self.is_cut:
                note("read", number)
            yield image(number), number % NUM_CLASSES

    def shard(self, num_shards: int, index: int) -> NotedParts:
        part = NotedParts(super().shard(num_shards, index).numbers)
        part.is_cut = True
        return part


def note(what: str, *numbers: Any) -> None:
    """Write numbers into a file of this process."""
    name = f"{what}-{os.environ['RANK']}-{os.getpid()}"
    with Path(os.environ["NOTES"], name).open("a") as file:
        file.write("".join(f"{number}\n" for number in numbers))
