"""The flags of `bench`."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import arg

from mpitrain.errors import UsageError

GENERATED = ("folder", "hdf5", "hdf5-pixels", "shards", "memory")
"""Formats that random images are written in."""

EXISTING = ("folder", "hdf5", "shards", "mnist", "fashion-mnist", "cifar10", "cifar100")
"""Formats that are timed with ``--data-dir``."""

Strategy = Literal["dp", "ddp", "fsdp"]


@dataclass(frozen=True, kw_only=True)
class BenchDataConfig:
    """Time data loading alone, by format and number of workers."""

    data: Annotated[tuple[str, ...], arg(metavar="NAME [NAME ...]")] = ()
    """Formats: folder, hdf5, hdf5-pixels, shards, memory (default: all). They are
    written to a temporary folder from the same random JPEG images, which hdf5-pixels
    and memory hold decoded. With --data-dir one of folder, hdf5, shards, mnist,
    fashion-mnist, cifar10, cifar100."""
    data_dir: Path | None = None
    """Folder or file of an existing data set; its training part is read."""
    image_size: int | None = None
    """Height and width of the images in pixels. Default: 224, or those of the set."""
    num_workers: Annotated[tuple[int, ...], arg(metavar="N [N ...]")] = (0, 1, 2)
    """Numbers of worker processes; data in memory has none."""
    batch_size: int = 64
    """Samples per batch."""
    samples: int = 512
    """Number of images to write, without --data-dir."""
    seconds: float = 5.0
    """Duration of the measurement of each format and number of workers."""
    output: Path | None = None
    """JSON file to write the results to."""

    def __post_init__(self) -> None:
        known = GENERATED if self.data_dir is None else EXISTING
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
                f"after --data, found {len(self.data)}: {', '.join(EXISTING)}"
            )
        for flag, value, minimum in (
            ("--image-size", self.image_size, 1),
            ("--num-workers", min(self.num_workers, default=-1), 0),
            ("--batch-size", self.batch_size, 1),
            ("--samples", self.samples, 1),
        ):
            if value is not None and value < minimum:
                raise UsageError(f"{flag} must be at least {minimum}, found {value!r}")
        if not 0 < self.seconds < math.inf:
            raise UsageError(f"--seconds must be above 0, found {self.seconds!r}")


@dataclass(frozen=True, kw_only=True)
class BenchScalingConfig:
    """Train on 1, 2, 4 ... ranks in turns, and print throughput and speed-up.

    Flags of the training follow after `--`.
    """

    ranks: Annotated[tuple[int, ...], arg(metavar="N [N ...]")] = ()
    """Numbers of ranks. Default: 1, 2, 4 ... up to the usable cores."""
    strategies: Annotated[tuple[Strategy, ...], arg(metavar="NAME [NAME ...]")] = (
        "ddp",
    )
    """Strategies for 2 ranks and more; 1 rank is always `single`, and `dp` if it is
    named (DataParallel: one process, all its GPUs)."""
    per_rank: bool = False
    """Weak scaling: --global-batch-size is the batch size of each rank."""
    rounds: int = 3
    """Rounds over all rows; the table shows the median."""
    mpirun: str = "mpirun --oversubscribe"
    """Launcher and its options, for instance "mpirun --hostfile hosts -x PATH"."""
    output: Path | None = None
    """JSON file to write the results to."""

    def __post_init__(self) -> None:
        for flag, value in (
            ("--ranks", min(self.ranks, default=1)),
            ("--rounds", self.rounds),
        ):
            if value < 1:
                raise UsageError(f"{flag} must be at least 1, found {value!r}")
