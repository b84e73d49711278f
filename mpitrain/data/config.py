"""What is trained on; part of the command line."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from mpitrain.errors import UsageError

DATA_DIR = Path("data")


@dataclass(frozen=True, kw_only=True)
class DataConfig:
    """Where samples come from, and what is done to each before it is seen."""

    data: str = "digits"
    """Data set: digits (8x8 images, embedded), mnist, fashion-mnist,
    cifar10, cifar100, folder, hdf5, shards, synthetic, or
    package.module:callable."""
    data_dir: Path | None = None
    """Folder with the data set's files (hdf5: or the file). Default: data."""
    image_size: int | None = None
    """Height and width of images in pixels. Default: as they are; 224 where
    they differ."""
    num_workers: int | Literal["auto"] = "auto"
    """Processes per rank that read samples ahead; 0: the rank itself. auto:
    one less than its cores, at most 8; for data of your own 0. Sets held in
    memory need none."""
    random_crop: int = 0
    """Pixels of border, from which each training image is cut anew every
    epoch."""
    random_flip: bool = False
    """Mirror half of the training images, others in each epoch."""
    random_resized_crop: bool = False
    """Cut each training image at a random place and scale; for sets read
    from files."""
    normalize: Literal["auto", "data", "imagenet", "none"] = "auto"
    """Mean and deviation taken off the pixels: of the training set (data),
    of ImageNet, or none. auto: data where it is in memory (not digits),
    else imagenet."""
    on_bad_sample: Literal["stop", "skip"] = "stop"
    """A sample that cannot be read ends the run, or is left out and counted."""
    synthetic_samples: int = 1024
    """Samples of --data synthetic; a quarter as many to validate."""
    synthetic_classes: int = 10
    """Classes of --data synthetic."""

    def __post_init__(self) -> None:
        if self.image_size is not None and self.image_size < 1:
            raise UsageError(
                f"--image-size must be at least 1, found {self.image_size!r}"
            )
        for flag, value, least in (
            ("--random-crop", self.random_crop, 0),
            ("--synthetic-samples", self.synthetic_samples, 4),
            ("--synthetic-classes", self.synthetic_classes, 2),
        ):
            if value < least:
                raise UsageError(f"{flag} must be at least {least}, found {value!r}")
        if isinstance(self.num_workers, int) and self.num_workers < 0:
            raise UsageError(
                f"--num-workers must be at least 0, found {self.num_workers!r}"
            )
