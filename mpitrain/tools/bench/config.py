"""The flags of `bench`."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal, get_args

from tyro.conf import arg

from mpitrain.errors import UsageError
from mpitrain.launch.config import LaunchConfig

WRITTEN = ("folder", "hdf5", "hdf5-pixels", "shards", "memory")
"""Formats that are written to be timed, where no files are named."""

FILES = (
    "folder",
    "hdf5",
    "shards",
    "mnist",
    "fashion-mnist",
    "cifar10",
    "cifar100",
)
"""Formats whose files can be named."""

Strategy = Literal["single", "dp", "ddp", "fsdp"]

Precision = Literal["fp32", "fp64", "bf16", "fp16"]

HANG_TIMEOUT_SECONDS = 600.0
"""How long a step may take where nobody says otherwise."""


@dataclass(frozen=True, kw_only=True)
class BenchDataConfig:
    """Time the loading of samples alone, by format and by number of workers."""

    data: Annotated[tuple[str, ...], arg(metavar="NAME [NAME ...]")] = ()
    """Which: folder, hdf5, hdf5-pixels, shards, memory; default: all. They are written
    for it, into a temporary folder: the same random JPEG images in each format;
    hdf5-pixels and memory hold them decoded. With --data-dir one of folder, hdf5,
    shards, mnist, fashion-mnist, cifar10, cifar100."""
    data_dir: Path | None = None
    """Folder or file of a data set to time; its training part is read."""
    image_size: int | None = None
    """Height and width in pixels of the images as a model sees them. Default: 224, or
    those of the set."""
    num_workers: Annotated[tuple[int, ...], arg(metavar="N [N ...]")] = (0, 1, 2)
    """Processes that read ahead; 0: the one that trains. What is in memory needs
    none."""
    batch_size: int = 64
    """Samples of a batch."""
    samples: int = 512
    """Images to write; of no use with --data-dir."""
    seconds: float = 5.0
    """How long each pair of format and number of workers is timed."""
    output: Path | None = None
    """File to write the figures to, as JSON."""

    def __post_init__(self) -> None:
        known = WRITTEN if self.data_dir is None else FILES
        for name in self.data:
            if name not in known:
                where = "without" if self.data_dir is None else "with"
                raise UsageError(
                    f"--data {name!r} cannot be timed {where} --data-dir; expected "
                    f"{', '.join(known)}"
                )
        if self.data_dir is not None and len(self.data) != 1:
            raise UsageError(
                f"--data-dir {self.data_dir}: which format is it? Expected one name "
                f"after --data, found {len(self.data)}: {', '.join(FILES)}"
            )
        if not self.num_workers:
            raise UsageError("--num-workers: expected a number, found none")
        for flag, value, least in (
            ("--image-size", self.image_size, 1),
            ("--num-workers", min(self.num_workers), 0),
            ("--batch-size", self.batch_size, 1),
            ("--samples", self.samples, 1),
        ):
            if value is not None and value < least:
                raise UsageError(f"{flag} must be at least {least}, found {value!r}")
        if not 0 < self.seconds < math.inf:
            raise UsageError(f"--seconds must be above 0, found {self.seconds!r}")


@dataclass(frozen=True, kw_only=True)
class BenchScalingConfig:
    """Time training steps on 1, 2, 4 ... of the ranks that mpirun started."""

    model: str = "convnet"
    """Model: convnet, any of torchvision by name (resnet50), timm:NAME,
    hub:REPO_OR_DIR:ENTRY, or package.module:callable."""
    data: str = "synthetic"
    """Data set, one that is held in memory: synthetic, digits, mnist, fashion-mnist,
    cifar10, cifar100."""
    data_dir: Path | None = None
    """Folder with the data set's files. Default: data."""
    image_size: int | None = None
    """Height and width of images in pixels. Default: 32 for synthetic, else as they
    are."""
    precision: Precision = "fp32"
    """fp32 or fp64 throughout; bf16 or fp16: weights in fp32, products in 16 bits."""
    strategies: Annotated[tuple[Strategy, ...], arg(metavar="NAME [NAME ...]")] = (
        get_args(Strategy)
    )
    """single: one process. dp: one process, all GPUs that it sees. ddp: each rank has
    all weights. fsdp: each has a share. single is always timed: the others are measured
    by it."""
    ranks: Annotated[tuple[int, ...], arg(metavar="N [N ...]")] = ()
    """On how many ranks. Default: 1, 2, 4 ... and all; whole nodes, of which there are
    1, 2, 4 ... and all."""
    global_batch_size: int = 256
    """Fixed problem: samples of a step, shared by the ranks; 0: leave it out."""
    rank_batch_size: int = 64
    """Fixed work: samples of a step on each rank; 0: leave it out."""
    steps: int = 10
    """Of each round that count."""
    warmup_steps: int = 3
    """Of each round before those."""
    rounds: int = 5
    """Everything is timed so often, by turns; the median counts."""
    output: Path | None = None
    """Folder for table.md, scaling.json and scaling.png. Default: bench-scaling/ and
    the time."""
    launch: LaunchConfig = field(
        default_factory=lambda: LaunchConfig(hang_timeout=HANG_TIMEOUT_SECONDS)
    )
    """How the ranks are started."""

    def __post_init__(self) -> None:
        for flag, value, least in (
            ("--image-size", self.image_size, 1),
            ("--ranks", min(self.ranks, default=1), 1),
            ("--global-batch-size", self.global_batch_size, 0),
            ("--rank-batch-size", self.rank_batch_size, 0),
            ("--steps", self.steps, 1),
            ("--warmup-steps", self.warmup_steps, 1),
            ("--rounds", self.rounds, 1),
        ):
            if value is not None and value < least:
                raise UsageError(f"{flag} must be at least {least}, found {value!r}")
        if not (self.global_batch_size or self.rank_batch_size):
            raise UsageError(
                "--global-batch-size 0 --rank-batch-size 0 leaves nothing to time; "
                "expected samples for one of the two"
            )
