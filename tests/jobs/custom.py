"""Custom models, some with faults, and data that notes who reads it."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

from mpitrain.tasks.image_classification.datasets.named import InMemory
from mpitrain.tasks.image_classification.datasets.named import digits as embedded_digits


def strike() -> None:
    """Fail in the way that FAULT names, on the rank that FAULTY_RANK names."""
    if os.environ["RANK"] != os.environ["FAULTY_RANK"]:
        return
    Path(os.environ["FAULT_TIME"]).write_text(str(time.time()))
    match os.environ["FAULT"]:
        case "raise":
            raise ArithmeticError("this is the fault")
        case "exit":
            sys.exit(3)
        case "exit-text":
            sys.exit("no more")
        case "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
        case "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "segv":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "hang":
            time.sleep(1000)
        case other:
            raise AssertionError(other)


def set_clock(hours: float) -> None:
    """Let the clock be other, as if somebody had set it."""
    before = time.time
    time.time = lambda: before() + 3600 * hours


class Net(nn.Module):
    """A network that fails when FAULT_STEP comes: 0 is before the first step."""

    def __init__(self, num_classes: int, image_size: int) -> None:
        super().__init__()
        self.head = nn.Linear(image_size * image_size, num_classes)
        self.calls = 0
        if os.environ["FAULT_STEP"] == "0":
            strike()

    def forward(self, images: Tensor) -> Tensor:
        self.calls += 1
        if self.training and str(self.calls) == os.environ["FAULT_STEP"]:
            strike()
        return self.head(images.flatten(1))


class Marking(nn.Module):
    """A network that marks in this rank's notes where a step's samples end."""

    def __init__(self, num_classes: int, image_size: int) -> None:
        super().__init__()
        self.head = nn.Linear(image_size * image_size, num_classes)
        file = Path(os.environ["NOTES"]) / f"train-{os.environ['RANK']}.jsonl"
        self.notes = file.open("a", buffering=1)

    def forward(self, images: Tensor) -> Tensor:
        if self.training:
            self.notes.write('"step"\n')
        return self.head(images.flatten(1))


class Partly(nn.Module):
    """A network with weights that take no part, and a state that is no tensor."""

    def __init__(self, num_classes: int, image_size: int) -> None:
        super().__init__()
        self.first = nn.Linear(image_size * image_size, 32)
        self.unused = nn.Linear(32, 32)
        self.head = nn.Linear(32, num_classes)
        # Not flushed by us: an interpreter that ends as it should does it.
        self.notes = (Path.cwd() / f"notes-{os.environ['RANK']}").open("w")
        self.notes.write("written")

    def forward(self, images: Tensor) -> Tensor:
        return self.head(torch.relu(self.first(images.flatten(1))))

    def get_extra_state(self) -> dict[str, int]:
        return {"version": 3}

    def set_extra_state(self, state: dict[str, int]) -> None:
        assert state == {"version": 3}


class Normed(nn.Module):
    """A network with batch norm, whose statistics each rank has of its own."""

    def __init__(self, num_classes: int, in_channels: int, image_size: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, 8, 3, padding=1)
        self.norm = nn.BatchNorm2d(8)
        self.head = nn.Linear(8 * image_size * image_size, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(torch.relu(self.norm(self.conv(images))).flatten(1))


class Noted(Dataset[tuple[Tensor, int]]):
    """The digits, writing down which rank reads which sample."""

    num_classes = 10

    def __init__(self, samples: InMemory, part: str) -> None:
        self.samples = samples
        file = Path(os.environ["NOTES"]) / f"{part}-{os.environ['RANK']}.jsonl"
        self.notes = file.open("a", buffering=1)

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        self.notes.write(json.dumps(index) + "\n")
        return self.samples.inputs[index], int(self.samples.targets[index])


def noted_digits() -> tuple[Noted, Noted]:
    """The embedded digits as map-style data sets that take notes."""
    data = embedded_digits()
    assert isinstance(data.train, InMemory)
    assert isinstance(data.val, InMemory)
    return Noted(data.train, "train"), Noted(data.val, "val")


def few() -> tuple[Dataset[tuple[Tensor, int]], Dataset[tuple[Tensor, int]]]:
    """Five samples to train, three to validate: fewer than ranks."""

    class Few(Dataset[tuple[Tensor, int]]):
        classes = ("even", "odd")

        def __init__(self, size: int) -> None:
            self.size = size

        def __len__(self) -> int:
            return self.size

        def __getitem__(self, index: int) -> tuple[Tensor, int]:
            if not 0 <= index < self.size:
                raise IndexError(index)
            return torch.full((1, 8, 8), index / self.size), index % 2

    return Few(5), Few(3)


class Limited(nn.Module):
    """Computes for some milliseconds, with the processor time of a rank's cgroup."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(64, 64), nn.Linear(64, num_classes)
        group = Path(os.environ["CPU_GROUPS"], os.environ["RANK"])
        (group / "cgroup.procs").write_text(str(os.getpid()))

    def forward(self, images: Tensor) -> Tensor:
        rows = images.flatten(1).repeat(256, 1, 1)
        for _ in range(6):
            rows = torch.tanh(self.body(rows))
        return self.head(rows.mean(0))


class Attention(nn.Module):
    """A small transformer with dropout, over the rows of an 8 x 8 image."""

    def __init__(self, num_classes: int) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.1, batch_first=True)
        self.embed = nn.Linear(8, 64)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(64, num_classes)

    def forward(self, images: Tensor) -> Tensor:
        rows = self.embed(images.flatten(1).view(-1, 8, 8))
        return self.head(self.encoder(rows).mean(1))


class Learner(nn.Module):
    """A small network that draws random numbers, takes its time, and takes notes.

    The first pixel of a sample is its number.
    """

    def __init__(self, num_classes: int, image_size: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(1) if "NORM" in os.environ else nn.Identity()
        self.drop = nn.Dropout(float(os.environ.get("DROPOUT", "0")))
        self.body = nn.Linear(image_size * image_size, 32)
        self.head = nn.Linear(32, num_classes)
        # Something that takes time to write.
        size = int(1e6 * float(os.environ.get("BALLAST_MB", "0")))
        self.register_buffer("ballast", torch.ones(size, dtype=torch.uint8))
        self.calls = 0

    def forward(self, images: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            if "NOTES" in os.environ:
                self.note([round(float(image[0, 0, 0])) for image in images])
            if str(self.calls) == os.environ.get("FAULT_STEP"):
                strike()
            if str(self.calls) in os.environ.get("CLOCK_STEPS", "").split():
                set_clock(hours=5 if self.calls % 2 else -9)
            time.sleep(float(os.environ.get("STEP_SECONDS", "0")))
        features = self.body(self.drop(self.norm(images / 100)).flatten(1))
        return self.head(torch.tanh(features))

    def note(self, numbers: list[int]) -> None:
        file = (
            Path(os.environ["NOTES"])
            / f"{os.environ['MASTER_PORT']}-{os.environ['RANK']}"
        )
        with file.open("a") as notes:
            notes.write(json.dumps(numbers) + "\n")


class Numbered(Dataset[tuple[Tensor, int]]):
    """Images whose first pixel is their number."""

    num_classes = 4

    def __init__(self, size: int) -> None:
        self.images = torch.randn(
            (size, 1, 8, 8), generator=torch.Generator().manual_seed(5)
        )
        self.labels = (self.images.sum((1, 2, 3)) * 1e3).long() % self.num_classes
        self.images[:, 0, 0, 0] = torch.arange(size)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.images[index], int(self.labels[index])


def numbered() -> tuple[Numbered, Numbered]:
    """96 samples to train, 40 to validate."""
    return Numbered(96), Numbered(40)


class Series(IterableDataset[tuple[Tensor, int]]):
    """The same, one after another; may be cut, into parts of unequal lengths."""

    num_classes = Numbered.num_classes

    def __init__(self, numbers: list[int]) -> None:
        self.numbers = numbers

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        whole = Numbered(96)
        for number in self.numbers:
            yield whole[number]


class Cut(Series):
    """One that is cut."""

    def shard(self, num_shards: int, index: int) -> Series:
        if num_shards == 1:
            return Series(self.numbers)
        # The last part has twice as many as the others.
        edges = [
            len(self.numbers) * at // (num_shards + 1) for at in range(num_shards + 2)
        ]
        edges.pop(-2)
        return Series(self.numbers[edges[index] : edges[index + 1]])


def series() -> tuple[Series, Numbered]:
    return Series(list(range(96))), Numbered(40)


def cut_series() -> tuple[Cut, Numbered]:
    return Cut(list(range(96))), Numbered(40)
