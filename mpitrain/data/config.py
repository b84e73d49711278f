"""Configuration of the data; part of the command line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mpitrain.errors import UsageError

DATA_DIR = Path("data")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Data."""

    data: str = "digits"
    """digits, mnist, fashion-mnist, cifar10, cifar100, folder, hdf5, shards,
    synthetic, or package.module:callable."""
    data_dir: Path | None = None
    """Folder of the data set, or the HDF5 file. Default: data."""
    image_size: int | None = None
    """Resize images to this height and width in pixels. Default: keep; 224 if sizes
    differ."""
    num_workers: int | Literal["auto"] = "auto"
    """Data-loading processes per rank; 0: none. auto: cores - 1, at most 8, if data
    is not in memory."""
    random_crop: int = 0
    """Pad training images by this many pixels and crop at random."""
    random_flip: bool = False
    """Flip training images horizontally at random."""
    random_resized_crop: bool = False
    """Crop training images at random position and scale (folder, hdf5, shards)."""
    normalize: Literal["auto", "data", "imagenet", "none"] = "auto"
    """Mean and standard deviation to normalize with. auto: data if in memory, else
    imagenet."""
    on_bad_sample: Literal["stop", "skip"] = "stop"
    """Stop at a sample that cannot be read, or skip and count it."""
    synthetic_samples: int = 1024
    """Training samples of --data synthetic; a quarter as many for validation."""
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
