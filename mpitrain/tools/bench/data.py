"""`python -m mpitrain bench data`: data loading alone, without MPI."""

from __future__ import annotations

import importlib.util
import json
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mpitrain.config import DataConfig
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
from mpitrain.tools.bench.config import GENERATED, BenchDataConfig
from mpitrain.tools.output import deliver, markdown_table
from mpitrain.train.loader import BatchLoader

NUM_ROUNDS = 5
"""All rows are timed in turns; the table shows medians."""

MIN_BATCHES = 2
"""Batches of each worker in a round."""

SEED = 1

ALONE = World(
    rank=0,
    world_size=1,
    local_rank=0,
    local_world_size=1,
    node_rank=0,
    nodes=(Node(hostname=socket.gethostname(), ranks=(0,)),),
)


@dataclass(kw_only=True)
class LoaderRow:
    """One row of the table: a format with a number of workers."""

    data: str
    num_workers: int
    samples: Samples
    loader: BatchLoader
    rates: list[float] = field(default_factory=list)
    """Samples per second of each round."""

    def load(self, num: int, batch_size: int, epoch: int) -> float:
        """Load `num` samples, repeatedly if there are fewer; return samples per second.

        Args:
            num: Number of samples.
            batch_size: Samples per batch.
            epoch: Chooses their order.
        """
        order = np.resize(self.samples.order(SEED, epoch), num)
        shard = RankShard(
            rank=0, world_size=1, global_batch_size=batch_size, order=order
        )
        started = time.perf_counter()
        steps = self.loader.steps(shard, epoch)
        count = sum(len(batch) for step in steps for batch in step.micro_batches)
        assert count == num
        return count / (time.perf_counter() - started)


def bench_data(config: BenchDataConfig, words: Sequence[str]) -> None:
    """Time all formats and numbers of workers, and print a table.

    Args:
        config: The flags.
        words: The command line, for the record.

    Raises:
        UsageError: A library is missing, or the results cannot be written.
        DataError: The files are missing or broken.
    """
    with tempfile.TemporaryDirectory(prefix="mpitrain-bench-") as folder:
        if config.data_dir is None:
            rows, what = _generated(config, Path(folder))
        else:
            rows, what = _existing(config, config.data_dir)
        cores = len(os.sched_getaffinity(0))
        print(f"{what}; batches of {config.batch_size}, {cores} cores\n", flush=True)
        try:
            _measure(rows, config)
        finally:
            for row in rows:
                row.samples.close()
    results = [
        {
            "data": row.data,
            "num_workers": row.num_workers,
            "samples_per_second": statistics.median(row.rates),
            "min": min(row.rates),
            "max": max(row.rates),
        }
        for row in rows
    ]
    print(table(results), flush=True)
    if config.output is not None:
        report = {
            "date": date.today().isoformat(),
            "command": " ".join([PROGRAM, "bench data", *words]),
            "hostname": socket.gethostname(),
            "cores": cores,
            "torch": torch.__version__,
            "what": what,
            "batch_size": config.batch_size,
            "rounds": NUM_ROUNDS,
            "rows": results,
        }
        deliver(json.dumps(report, indent=2) + "\n", config.output)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the results in Markdown; `to first` is relative to the first row.

    >>> print(table([{"data": "folder", "num_workers": 0, "samples_per_second": 123.4,
    ...               "min": 120.0, "max": 130.0}]))
    | data   | workers | samples/s | min to max | to first |
    |:-------|--------:|----------:|-----------:|---------:|
    | folder |       0 |       123 | 120 to 130 |     1.00 |
    """
    lines = [("data", "workers", "samples/s", "min to max", "to first")]
    for row in rows:
        rate = row["samples_per_second"]
        spread = f"{row['min']:.0f} to {row['max']:.0f}"
        ratio = f"{rate / rows[0]['samples_per_second']:.2f}"
        num_workers = str(row["num_workers"])
        lines.append((row["data"], num_workers, f"{rate:.0f}", spread, ratio))
    return markdown_table(lines)


def _generated(config: BenchDataConfig, folder: Path) -> tuple[list[LoaderRow], str]:
    """Write images in each format; return the rows, and what the images are."""
    size = config.image_size or DEFAULT_IMAGE_SIZE
    files = images.jpegs(config.samples, size)
    rows: list[LoaderRow] = []
    for data in config.data or GENERATED:
        if data.startswith("hdf5") and not importlib.util.find_spec("h5py"):
            text = f"{data} is left out: it needs h5py (pip install 'mpitrain[hdf5]')"
            print(text, file=sys.stderr)
        elif data == "memory":
            samples = InMemory(*images.decoded(files, size))
            rows.append(_row(data, 0, samples, (IMAGENET_MEAN, IMAGENET_STD), size))
        else:
            images.write(data, folder / data, files, size)
            rows += _rows(config, data, folder / data, size)
    width, height = (round(size * scale) for scale in images.SCALE)
    kilobytes = sum(map(len, files)) / len(files) / 1000
    what = f"{len(files)} JPEG images of {width} x {height} pixels, {kilobytes:.0f} kB "
    return rows, f"{what}each, seen as {size} x {size}"


def _existing(config: BenchDataConfig, data_dir: Path) -> tuple[list[LoaderRow], str]:
    (data,) = config.data
    rows = _rows(config, data, data_dir, config.image_size)
    size = " x ".join(map(str, rows[0].loader.example().inputs.shape[2:]))
    num = rows[0].samples.num_samples
    return rows, f"{data} in {data_dir}: {num} images, seen as {size}"


def _rows(
    config: BenchDataConfig, data: str, data_dir: Path, size: int | None
) -> list[LoaderRow]:
    """Return a row for each number of workers; one row for data in memory."""
    rows: list[LoaderRow] = []
    for num_workers in config.num_workers:
        data_config = DataConfig(
            data=data.removesuffix("-pixels"),
            data_dir=data_dir,
            image_size=size,
            num_workers=num_workers,
        )
        found = load_data(data_config, seed=SEED, world=ALONE, ranks=SingleProcess())
        in_memory = isinstance(found.train, InMemory)
        num_workers = 0 if in_memory else num_workers
        it = _row(data, num_workers, found.train, found.statistics, found.image_size)
        rows.append(it)
        if in_memory:
            break
    return rows


def _row(
    data: str, num_workers: int, samples: Samples, norm: Statistics | None, size: int
) -> LoaderRow:
    mean, std = norm or (None, None)
    pixels = ImageTransform(
        dtype=torch.float32, seed=SEED, mean=mean, std=std, size=size
    )
    loader = BatchLoader(samples, ALONE, pixels)
    return LoaderRow(data=data, num_workers=num_workers, samples=samples, loader=loader)


def _measure(rows: list[LoaderRow], config: BenchDataConfig) -> None:
    """Time all rows in turns, after the workers have started."""
    size = config.batch_size
    nums: list[int] = []
    for row in rows:
        minimum = MIN_BATCHES * max(1, row.num_workers) * size
        row.load(minimum, size, 0)
        rate = row.load(minimum, size, 0)
        nums.append(max(minimum, int(rate * config.seconds / NUM_ROUNDS)))
    for epoch in range(1, NUM_ROUNDS + 1):
        for row, num in zip(rows, nums, strict=True):
            row.rates.append(row.load(num, size, epoch))
