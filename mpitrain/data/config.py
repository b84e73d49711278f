"""Configuration of the data; part of the command line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mpitrain.errors import UsageError

DATA_DIR = Path("data")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Which data set, and how its samples are transformed."""

    data: str = "digits"
    """Data set: digits (8x8 images, embedded), mnist, fashion-mnist,
    cifar10, cifar100, folder, hdf5, shards, synthetic, or
    package.module:callable."""
    data_dir: Path | None = None
    """Folder with the data set's files (hdf5: or the file). Default: data."""
    image_size: int | None = None
    """Height and width of images in pixels. Default: as they are; 224 if
    they differ."""
    num_workers: int | Literal["auto"] = "auto"
    """Worker processes per rank that read samples ahead; 0: the rank reads.
    auto: one less than its cores, at most 8; 0 for custom data sets. Sets
    in memory need none."""
    random_crop: int = 0
    """Pad training images by this many pixels, then crop at random."""
    random_flip: bool = False
    """Flip half of the training images left to right, others in each epoch."""
    random_resized_crop: bool = False
    """Crop training images at a random place and scale; for sets that are
    read from files."""
    normalize: Literal["auto", "data", "imagenet", "none"] = "auto"
    """Subtract the mean and divide by the standard deviation: of the training
    set (data), of ImageNet, or none. auto: data if it is in memory (not
    digits), else imagenet."""
    on_bad_sample: Literal["stop", "skip"] = "stop"
    """Stop at a sample that cannot be read, or skip and count it."""
    synthetic_samples: int = 1024
    """Training samples of --data synthetic; a quarter as many validate."""
    synthetic_classes: int = 10
    """Classes of --data synthetic."""

    def __post_init__(self) -> None:
        if self.image_size is not None and self.image_size < 1:
            raise UsageError(
                f"--image-size must be at least 1, found {self.image_size!r}"
            )
        for flag, value, minimum in (
            ("--random-crop", self.random_crop, 0),
            ("--synthetic-samples", self.synthetic_samples, 4),
            ("--synthetic-classes", self.synthetic_classes, 2),
        ):
            if value < minimum:
                raise UsageError(f"{flag} must be at least {minimum}, found {value!r}")
        if isinstance(self.num_workers, int) and self.num_workers < 0:
            raise UsageError(
                f"--num-workers must be at least 0, found {self.num_workers!r}"
            )
