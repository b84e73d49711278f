"""The in-memory road beside torchvision's Dataset and DataLoader, on MNIST-sized data.

    .venv/bin/python benchmarks/in_memory.py
    .venv/bin/python benchmarks/in_memory.py --samples 2000 --rounds 1

Both read the same IDX files, 60,000 images of 28 x 28 pixels that are written here, and
make shuffled batches of normalized float32: ours as in a training, theirs by ToTensor
and Normalize, with 0, 1 and 2 workers, of which the best counts. Once as the images
are, once cut at random from a border of 2 pixels and mirrored at random. All take
turns; each ratio is of one round.
"""

from __future__ import annotations

import argparse
import socket
import statistics
import struct
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from record import about, spread, write
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.datasets import MNIST

from mpitrain.config import DataConfig
from mpitrain.data.loader import BatchLoader
from mpitrain.data.sharding import RankShard
from mpitrain.mpi.shared_arrays import Communicator
from mpitrain.mpi.world import Node, World
from mpitrain.tasks.image_classification.datasets.named import Data, load_data
from mpitrain.tasks.image_classification.transforms import ImageTransform

SIZE = 28

BORDER = 2

MEAN, STD = 0.1307, 0.3081
"""Of MNIST, as everybody writes them."""

WORKERS = (0, 1, 2)

LEAST_SECONDS = 0.3
"""Quick loaders go through the set again and again for so long."""

WORLD = World(
    rank=0,
    world_size=1,
    local_rank=0,
    local_world_size=1,
    node_rank=0,
    nodes=(Node(hostname=socket.gethostname(), ranks=(0,)),),
)

Load = Callable[[int], int]
"""Loads an epoch; returns its samples."""


def main() -> None:
    """Measure all, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=60_000)
    parser.add_argument("--batch-sizes", type=int, nargs="+", default=[64, 256])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, help="default: torch's")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    asked = parser.parse_args()
    sizes = " ".join(map(str, asked.batch_sizes))
    words = f"--samples {asked.samples} --batch-sizes {sizes} --rounds {asked.rounds}"
    if asked.threads:
        words += f" --threads {asked.threads}"
        torch.set_num_threads(asked.threads)
    report = about(f"benchmarks/in_memory.py {words}", "torchvision")
    report["threads"] = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as folder:
        write_files(Path(folder), asked.samples)
        data = load_data(
            DataConfig(data="mnist", data_dir=Path(folder)),
            seed=1,
            world=WORLD,
            ranks=Communicator(MPI.COMM_SELF, WORLD),
        )
        compare_pixels(data, Path(folder))
        report["rows"] = [
            row(data, Path(folder), batch_size, augment, asked.rounds)
            for augment in (False, True)
            for batch_size in asked.batch_sizes
        ]
    write(report, asked.json)


def row(
    data: Data, folder: Path, batch_size: int, augment: bool, num_rounds: int
) -> dict[str, Any]:
    """Compare at one batch size."""
    loads = {"ours": ours(data, batch_size, augment)}
    for num_workers in WORKERS:
        name = f"torchvision, {num_workers} workers"
        loads[name] = torchvisions(folder, batch_size, augment, num_workers)
    rates: dict[str, list[float]] = {name: [] for name in loads}
    for number in range(num_rounds + 1):
        for name, load in loads.items():
            rate = timed(load, number)
            if number > 0:  # the first starts the workers
                rates[name].append(rate)
    best = max(list(rates)[1:], key=lambda name: statistics.median(rates[name]))
    ratio = spread([a / b for a, b in zip(rates["ours"], rates[best], strict=True)])
    what = "cropped and mirrored" if augment else "as they are"
    medians = {name: statistics.median(of) for name, of in rates.items()}
    low, high = ratio["range"]
    print(
        f"{what}, batch {batch_size}: ours {medians['ours']:,.0f} samples/s; {best} "
        f"{medians[best]:,.0f}; ratio {ratio['median']:.1f} ({low:.1f} to {high:.1f})",
        flush=True,
    )
    return {
        "images": what,
        "batch_size": batch_size,
        "samples_per_second": {name: spread(of) for name, of in rates.items()},
        "best_of_torchvision": best,
        "ratio": ratio,
    }


def timed(load: Load, epoch: int) -> float:
    """Return samples per second."""
    count = 0
    started = time.perf_counter()
    while (seconds := time.perf_counter() - started) < LEAST_SECONDS:
        count += load(epoch)
    return count / seconds


def ours(data: Data, batch_size: int, augment: bool) -> Load:
    feed = BatchLoader(data.train, WORLD, pixels(augment), dtype=torch.float32)

    def load(epoch: int) -> int:
        share = RankShard(
            rank=0,
            world_size=1,
            global_batch_size=batch_size,
            order=data.train.order(1, epoch),
        )
        count = 0
        for step in feed.steps(share, epoch):
            for batch in step.micro_batches:
                count += len(batch.inputs)
        return count

    return load


def pixels(augment: bool) -> ImageTransform:
    return ImageTransform(
        dtype=torch.float32,
        seed=1,
        mean=(MEAN,),
        std=(STD,),
        border=BORDER if augment else 0,
        flip=augment,
    )


def torchvisions(
    folder: Path, batch_size: int, augment: bool, num_workers: int
) -> Load:
    loader = DataLoader(
        MNIST(folder, transform=transform(augment)),
        batch_size=batch_size,
        shuffle=True,
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
    )

    def load(epoch: int) -> int:
        del epoch
        return sum(len(inputs) for inputs, _ in loader)

    return load


def transform(augment: bool) -> Callable[[Any], Any]:
    cut: list[Any] = []
    if augment:
        cut = [
            transforms.RandomCrop(SIZE, padding=BORDER),
            transforms.RandomHorizontalFlip(),
        ]
    return transforms.Compose(
        [*cut, transforms.ToTensor(), transforms.Normalize((MEAN,), (STD,))]
    )


def compare_pixels(data: Data, folder: Path) -> None:
    """See that both make the same of an image."""
    theirs = MNIST(folder, transform=transform(augment=False))
    indices = np.arange(10)
    made = pixels(augment=False)(data.train.inputs[:10], indices, 1)
    expected = torch.stack([theirs[index][0] for index in range(10)])
    torch.testing.assert_close(made, expected)


def write_files(folder: Path, num: int) -> None:
    """Write random images as MNIST's files, a sixth as many to validate."""
    random = np.random.Generator(np.random.PCG64(0))
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for prefix, count in (("train", num), ("t10k", max(1, num // 6))):
        images = random.integers(0, 256, (count, SIZE, SIZE), np.uint8)
        labels = random.integers(0, 10, count, np.uint8)
        for kind, array in (("images-idx3", images), ("labels-idx1", labels)):
            head = struct.pack(f">{1 + array.ndim}I", 0x800 + array.ndim, *array.shape)
            (raw / f"{prefix}-{kind}-ubyte").write_bytes(head + array.tobytes())


if __name__ == "__main__":
    main()
