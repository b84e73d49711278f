"""`python -m mpitrain bench data`: the loader alone, by format and workers. No MPI."""

from __future__ import annotations

import importlib.util
import json
import os
import platform
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mpitrain import __version__
from mpitrain.data.config import DataConfig
from mpitrain.data.in_memory import InMemory
from mpitrain.data.samples import Samples
from mpitrain.data.sharding import RankShard
from mpitrain.data.sources import DEFAULT_IMAGE_SIZE, load_data
from mpitrain.data.transforms import (
    IMAGENET_MEAN,
    IMAGENET_STD,
    ImageTransform,
    Statistics,
)
from mpitrain.flags import PROGRAM
from mpitrain.mpi.shared_arrays import SingleProcess
from mpitrain.mpi.world import Node, World
from mpitrain.tools.bench import images
from mpitrain.tools.bench.columns import markdown
from mpitrain.tools.bench.config import WRITTEN, BenchDataConfig
from mpitrain.tools.output import deliver
from mpitrain.train.loader import BatchLoader

NUM_ROUNDS = 5
"""Each pair of format and workers is timed so often, by turns; the median counts."""

LEAST_BATCHES = 2
"""That each process reads in a round."""

SEED = 1

HEAD = ("data", "workers", "samples/s", "spread", "to first", "to fastest")


@dataclass(kw_only=True)
class Road:
    """One way from the files to what a model sees."""

    data: str
    """The format."""
    num_workers: int
    """Processes that read ahead."""
    samples: Samples
    """What is read."""
    feed: BatchLoader
    """Makes batches of it, as in a training."""
    rates: list[float] = field(default_factory=list)
    """Samples per second of each round."""

    @property
    def rate(self) -> float:
        """Samples per second, the median over the rounds."""
        return statistics.median(self.rates)

    def load(self, num: int, batch_size: int, epoch: int) -> float:
        """Load so many samples.

        Args:
            num: How many; from the beginning again where the set has fewer.
            batch_size: Of so many at once.
            epoch: Chooses their order.

        Returns:
            Samples per second.
        """
        share = RankShard(
            rank=0,
            world_size=1,
            global_batch_size=batch_size,
            order=np.resize(self.samples.order(SEED, epoch), num),
        )
        count = 0
        started = time.perf_counter()
        for step in self.feed.steps(share, epoch):
            count += sum(len(batch) for batch in step.micro_batches)
        seconds = time.perf_counter() - started
        assert count == num
        return count / seconds


def bench(config: BenchDataConfig, words: Sequence[str]) -> None:
    """Time all that was asked for, and print a table.

    Args:
        config: What was asked for.
        words: The words of the command line, for the record.

    Raises:
        UsageError: A library is missing, or the figures cannot be written.
        DataError: The files are missing or broken.
    """
    load_before = os.getloadavg()
    with tempfile.TemporaryDirectory(prefix="mpitrain-bench-") as folder:
        if config.data_dir is None:
            roads, what = _written(config, Path(folder))
        else:
            roads, what = _found(config)
        cores = len(os.sched_getaffinity(0))
        print(f"{what}; batches of {config.batch_size}, {cores} cores\n", flush=True)
        try:
            _measure(roads, config)
        finally:
            for road in roads:
                road.samples.close()
    rows = _rows(roads)
    print(table(rows), flush=True)
    if config.output is not None:
        packages = ("torch", "numpy", "pillow", "h5py")
        report = {
            "date": date.today().isoformat(),
            "command": " ".join([PROGRAM, "bench data", *words]),
            "hostname": socket.gethostname(),
            "platform": f"{platform.system()} {platform.machine()}",
            "cores": cores,
            "load_before": load_before,
            "versions": {"mpitrain": __version__} | _versions(packages),
            "what": what,
            "batch_size": config.batch_size,
            "rounds": NUM_ROUNDS,
            "rows": rows,
        }
        deliver(json.dumps(report, indent=2) + "\n", config.output)


def table(rows: list[dict[str, Any]]) -> str:
    """Write the figures down in Markdown.

    Args:
        rows: See `_rows`.

    >>> print(table([{"data": "folder", "num_workers": 0, "samples_per_second": 123.4,
    ...     "least": 120.0, "most": 130.0, "to_first": 1.0, "to_fastest": 0.5}]))
    | data   | workers | samples/s |     spread | to first | to fastest |
    |:-------|--------:|----------:|-----------:|---------:|-----------:|
    | folder |       0 |       123 | 120 to 130 |     1.00 |       0.50 |
    """
    lines = [HEAD] + [
        (
            row["data"],
            str(row["num_workers"]),
            f"{row['samples_per_second']:.0f}",
            f"{row['least']:.0f} to {row['most']:.0f}",
            f"{row['to_first']:.2f}",
            f"{row['to_fastest']:.2f}",
        )
        for row in rows
    ]
    return markdown(lines)


def _written(config: BenchDataConfig, folder: Path) -> tuple[list[Road], str]:
    """Write images in each format; return the roads to them, and what they are."""
    size = config.image_size or DEFAULT_IMAGE_SIZE
    files = images.jpegs(config.samples, size)
    roads: list[Road] = []
    for data in config.data or WRITTEN:
        if data.startswith("hdf5") and not importlib.util.find_spec("h5py"):
            print(
                f"{data} is left out: it needs h5py (pip install 'mpitrain[hdf5]')",
                file=sys.stderr,
            )
        elif data == "memory":
            samples = InMemory(*images.decoded(files, size))
            statistics = IMAGENET_MEAN, IMAGENET_STD
            roads.append(_road(data, 0, samples, statistics, size))
        else:
            images.write(data, folder / data, files, size)
            roads += _roads(config, data, folder / data, size)
    width, height = (round(size * scale) for scale in images.SCALE)
    kilobytes = sum(map(len, files)) / len(files) / 1000
    return roads, (
        f"{len(files)} JPEG images of {width} x {height} pixels, {kilobytes:.0f} kB "
        f"each, seen as {size} x {size}"
    )


def _found(config: BenchDataConfig) -> tuple[list[Road], str]:
    """Return the roads to files that are there, and what they are."""
    assert config.data_dir is not None
    (data,) = config.data
    roads = _roads(config, data, config.data_dir, config.image_size)
    example = roads[0].feed.example()
    size = " x ".join(map(str, example.inputs.shape[2:]))
    num = roads[0].samples.num_samples
    return roads, f"{data} in {config.data_dir}: {num} images, seen as {size}"


def _roads(
    config: BenchDataConfig, data: str, data_dir: Path, size: int | None
) -> list[Road]:
    """Return one road to a set for each number of workers; one alone to memory."""
    roads: list[Road] = []
    for num_workers in config.num_workers:
        found = load_data(
            DataConfig(
                data=data.removesuffix("-pixels"),
                data_dir=data_dir,
                image_size=size,
                num_workers=num_workers,
            ),
            seed=SEED,
            world=_alone(),
            ranks=SingleProcess(),
        )
        in_memory = isinstance(found.train, InMemory)
        roads.append(
            _road(
                data,
                0 if in_memory else num_workers,
                found.train,
                found.statistics,
                found.image_size,
            )
        )
        if in_memory:
            break
    return roads


def _road(
    data: str,
    num_workers: int,
    samples: Samples,
    statistics: Statistics | None,
    size: int,
) -> Road:
    mean, std = statistics or (None, None)
    pixels = ImageTransform(
        dtype=torch.float32, seed=SEED, mean=mean, std=std, size=size
    )
    feed = BatchLoader(samples, _alone(), pixels)
    return Road(data=data, num_workers=num_workers, samples=samples, feed=feed)


def _measure(roads: list[Road], config: BenchDataConfig) -> None:
    """Time all roads by turns; start the workers and guess the speed before."""
    size = config.batch_size
    seconds = config.seconds / NUM_ROUNDS
    nums: list[int] = []
    for road in roads:
        least = LEAST_BATCHES * max(1, road.num_workers) * size
        road.load(least, size, 0)
        nums.append(max(least, int(road.load(least, size, 0) * seconds)))
    for epoch in range(1, NUM_ROUNDS + 1):
        for road, num in zip(roads, nums, strict=True):
            road.rates.append(road.load(num, size, epoch))


def _rows(roads: list[Road]) -> list[dict[str, Any]]:
    """Sum up, in what JSON can hold."""
    fastest = max(road.rate for road in roads)
    return [
        {
            "data": road.data,
            "num_workers": road.num_workers,
            "samples_per_second": road.rate,
            "least": min(road.rates),
            "most": max(road.rates),
            "to_first": road.rate / roads[0].rate,
            "to_fastest": road.rate / fastest,
        }
        for road in roads
    ]


def _versions(packages: Sequence[str]) -> dict[str, str]:
    found = {}
    for package in packages:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _alone() -> World:
    """Return a world of one that no MPI started."""
    return World(
        rank=0,
        world_size=1,
        local_rank=0,
        local_world_size=1,
        node_rank=0,
        nodes=(Node(hostname=socket.gethostname(), ranks=(0,)),),
    )
