"""Data sets by name. Read this first; each format has a file of its own."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

import numpy as np
import torch

from mpitrain.config import DATA_DIR, DataConfig
from mpitrain.data.custom import Samples, build_samples, classes_of
from mpitrain.data.in_memory import InMemory
from mpitrain.data.map_style import MapStyle
from mpitrain.data.samples import PARTS, Array
from mpitrain.data.workers import start_method
from mpitrain.errors import DataError, UsageError, did_you_mean
from mpitrain.mpi.shared_arrays import Communicator
from mpitrain.mpi.world import World
from mpitrain.plugins import call_with_known, is_reference, load_reference
from mpitrain.tasks.image_classification.datasets import (
    folder,
    hdf5,
    shards,
    torchvision_sets,
)
from mpitrain.tasks.image_classification.datasets.index import (
    FileIndex,
    ImageReader,
    build_readers,
)
from mpitrain.tasks.image_classification.transforms import (
    NUM_DIMENSIONS,
    SCALED,
    Statistics,
    imagenet_statistics,
    mean_and_std,
)

logger = logging.getLogger("mpitrain")

FORMATS: Mapping[str, tuple[Callable[[Path], FileIndex], type[ImageReader]]] = {
    "folder": (folder.scan, folder.FolderReader),
    "hdf5": (hdf5.scan, hdf5.HDF5Reader),
    "shards": (shards.scan, shards.ShardReader),
}
"""Sets that are read sample by sample: how they are scanned, and read."""

_FOLDERS_OF_CLASSES = ": folders train/CLASS, not train/images/CLASS"

DEFAULT_IMAGE_SIZE = 224
GRID = 4  # rows and columns of coloured fields in an image
NOISE_DIVISOR = 4  # a quarter of a byte's values is noise; the colours have the others


@dataclass(frozen=True, kw_only=True)
class Data:
    """A data set, ready to train on."""

    train: Samples
    val: Samples
    test: Samples | None = None  # evaluated once, by the final model
    num_classes: int | None
    """Labels are 0 to ``num_classes - 1``; ``None`` if targets are not labels."""
    in_channels: int  # channels of an image: C of `(C, H, W)`
    image_size: int
    """Width of an image in pixels as the model sees it: W of `(C, H, W)`."""
    statistics: Statistics | None = None
    """Mean and standard deviation to normalize by, in the range 0 to 1; ``None``: the
    inputs are taken as they are."""


def load_data(
    config: DataConfig,
    *,
    seed: int,
    world: World,
    ranks: Communicator,
    takes_images: bool = True,
) -> Data:
    """Load a data set; collective over all ranks.

    ``takes_images``: its inputs go to a named model as they are, so that those of a
    custom set have to be images `(C, H, W)`.
    """
    name = config.data
    if name == "digits":
        return digits(config.image_size)
    if name in torchvision_sets.CLASSES or name == "synthetic":
        return _load_whole(config, ranks)
    if config.normalize == "data" and (name in FORMATS or is_reference(name)):
        raise UsageError(
            f"--normalize data needs a set that is in memory, found --data {name!r}; "
            "expected imagenet or none"
        )
    if name in FORMATS:
        return _load_indexed(config, seed, world, ranks)
    if is_reference(name):
        data = _load_custom(config, seed, world, ranks)
        if takes_images:
            _refuse_channels_last(data.train, config.data)
        return data
    known = ["digits", *torchvision_sets.CLASSES, "synthetic", *FORMATS]
    raise UsageError(
        f"--data {name!r} is not known.{did_you_mean(name, known)} Expected "
        f"{', '.join(known)}, or package.module:callable for a custom data set"
    )


def digits(image_size: int | None = None) -> Data:
    """Load the embedded UCI digits: 1,437 images to train, 360 to validate; local.

    Images are float32 `(N, 1, 8, 8)` from 0 to 1, labels int64 `(N,)`.
    """
    file = resources.files(__package__) / "digits" / "digits.npz"
    with file.open("rb") as stream, np.load(stream) as arrays:
        order = arrays["permutation"].astype(np.int64)
        num_train = int(arrays["num_train"])
        images = torch.from_numpy(arrays["images"][order])
        labels = torch.from_numpy(arrays["labels"][order]).long()
    inputs = images.unsqueeze(1).float() / 16.0
    train = InMemory(inputs[:num_train], labels[:num_train])
    train.classes = tuple(map(str, range(10)))
    return Data(
        train=train,
        val=InMemory(inputs[num_train:], labels[num_train:]),
        num_classes=10,
        in_channels=1,
        image_size=image_size or 8,
    )


def make_synthetic(
    num_samples: int, num_classes: int, image_size: int, seed: int = 0
) -> dict[str, Array]:
    """Make images that a small network can learn: coarse coloured fields, and noise.

    There are `num_samples` training images, and a quarter as many, at least one, to
    validate; the same for one seed on every machine. Arrays are as those of
    `torchvision_sets.read`.
    """
    if num_samples < num_classes:
        raise UsageError(
            f"found {num_samples} samples for {num_classes} classes; expected one of "
            "each: more --synthetic-samples, or fewer --synthetic-classes"
        )
    random = np.random.Generator(np.random.PCG64(seed))
    fields = random.integers(
        0, 256 - 256 // NOISE_DIVISOR, (num_classes, 3, GRID, GRID), dtype=np.uint8
    )
    field_of = np.arange(image_size) * GRID // image_size
    patterns = fields[:, :, field_of][..., field_of]
    arrays: dict[str, Array] = {}
    for part, count in (("train", num_samples), ("val", max(1, num_samples // 4))):
        labels = random.permutation(np.arange(count, dtype=np.int64) % num_classes)
        inputs = patterns[labels]
        # Whole bytes are drawn five times as fast as smaller numbers.
        noise = random.integers(0, 256, inputs.shape, dtype=np.uint8)
        noise //= NOISE_DIVISOR
        inputs += noise
        arrays |= {f"{part}_inputs": inputs, f"{part}_labels": labels}
    return arrays


def _load_whole(config: DataConfig, ranks: Communicator) -> Data:
    """Read a set whole on rank zero; each node holds it once."""
    name, data_dir = config.data, config.data_dir or DATA_DIR

    def read() -> Mapping[str, Array]:
        if name == "synthetic":
            size = config.image_size or DEFAULT_IMAGE_SIZE
            return make_synthetic(
                config.synthetic_samples, config.synthetic_classes, size
            )
        if not torchvision_sets.find(name, data_dir):
            torchvision_sets.fetch(name, data_dir, None)
        return torchvision_sets.read(name, data_dir)

    arrays = ranks.load_shared(read, f"read {name}")
    names = bytes(arrays.pop("classes", b"")).decode()
    tensors = {key: torch.from_numpy(array) for key, array in arrays.items()}
    train = InMemory(tensors["train_inputs"], tensors["train_labels"])
    val = InMemory(tensors["val_inputs"], tensors["val_labels"])
    train.classes = tuple(names.splitlines())
    channels = train.inputs.shape[1]
    if config.normalize in ("auto", "data"):
        statistics: Statistics | None = ranks.on_rank_zero(
            lambda: mean_and_std(train.inputs), "take the mean of the pixels"
        )
    else:
        statistics = _imagenet(config, channels)
    return Data(
        train=train,
        val=val,
        num_classes=torchvision_sets.NUM_CLASSES.get(name, config.synthetic_classes),
        in_channels=channels,
        image_size=config.image_size or train.inputs.shape[-1],
        statistics=statistics,
    )


def _load_indexed(
    config: DataConfig, seed: int, world: World, ranks: Communicator
) -> Data:
    """Index a set on rank zero; its samples are read when they are wanted."""
    scan_files, reader_type = FORMATS[config.data]
    data_dir = config.data_dir or DATA_DIR
    scanned: list[FileIndex] = []

    def scan() -> Mapping[str, Array]:
        scanned.append(scan_files(data_dir))
        return scanned[0].arrays

    arrays = ranks.load_shared(scan, f"scan {data_dir}")
    classes, facts = ranks.on_rank_zero(
        lambda: (scanned[0].classes, scanned[0].facts), "share the classes"
    )
    if len(classes) == 1 and world.is_rank_zero:
        is_folder = config.data == "folder"
        logger.warning(
            "%s has one class, %r, and so nothing to learn; expected several%s",
            *(data_dir, classes[0], _FOLDERS_OF_CLASSES if is_folder else ""),
        )
    index = FileIndex(arrays=arrays, classes=classes, facts=facts)
    # One rank of each other node scans for itself: its files may be others.
    ranks.check_same_on_nodes(
        lambda: (scanned[0] if scanned else scan_files(data_dir)).digest(),
        f"the files of {data_dir}",
    )
    size = config.image_size or facts["size"] or DEFAULT_IMAGE_SIZE
    readers = build_readers(reader_type, data_dir, index, size)
    samples = {
        part: MapStyle(
            reader,
            seed=seed,
            num_workers="auto" if config.num_workers is None else config.num_workers,
            world=world,
            method=start_method(world.num_nodes),
            random_crops=part == "train" and config.random_resized_crop,
            skip=config.on_bad_sample == "skip",
            pin=world.device != "cpu",
            order=functools.partial(shards.order, arrays[f"{part}_shards"])
            if config.data == "shards"
            else None,
        )
        for part, reader in readers.items()
    }
    samples["train"].classes = classes
    channels = int(facts["channels"])
    return Data(
        train=samples["train"],
        val=samples["val"],
        test=samples.get("test"),
        num_classes=len(classes),
        in_channels=channels,
        image_size=size,
        statistics=_imagenet(config, channels),
    )


def _load_custom(
    config: DataConfig, seed: int, world: World, ranks: Communicator
) -> Data:
    datasets = call_with_known(
        load_reference(config.data, "--data"),
        {"data_dir": config.data_dir},
        "--data",
        otherwise={"data_dir": DATA_DIR},
    )
    if not (isinstance(datasets, tuple | list) and len(datasets) in (2, 3)):
        raise DataError(
            f"--data {config.data} returned {type(datasets).__name__!r}; expected a "
            "pair (train, val) of data sets, or (train, val, test)"
        )
    samples = [
        build_samples(
            dataset,
            f"the {part} part of --data {config.data}",
            seed=seed,
            world=world,
            ranks=ranks,
            num_workers=config.num_workers or 0,
            skip=config.on_bad_sample == "skip",
        )
        for part, dataset in zip(PARTS, datasets, strict=False)
    ]
    num_classes, _ = classes_of(datasets[0])
    if num_classes is None:
        raise DataError(
            f"the train part of --data {config.data} has neither `classes` (a list) "
            "nor `num_classes` (an int); give it one of them"
        )
    inputs = samples[0].example().inputs
    if not isinstance(inputs, torch.Tensor) or inputs.ndim < 2:
        raise DataError(
            f"an input of --data {config.data} is {type(inputs).__name__!r}; expected "
            "a tensor, (C, H, W) for images (torchvision: transform=ToTensor()). Other "
            "inputs can be trained on with mpitrain.Trainer in a script"
        )
    return Data(
        train=samples[0],
        val=samples[1],
        test=samples[2] if len(samples) > 2 else None,
        num_classes=int(num_classes),
        in_channels=inputs.shape[1],
        image_size=config.image_size or inputs.shape[-1],
    )


def _refuse_channels_last(samples: Samples, name: str) -> None:
    inputs = samples.example().inputs
    channels = inputs.shape[-1]
    if (
        inputs.dtype == torch.uint8
        and inputs.ndim == NUM_DIMENSIONS
        and channels in (3, 4)
        and channels < min(inputs.shape[1:3])
    ):
        raise DataError(
            f"an image of --data {name}: found {tuple(inputs.shape[1:])}; "
            "expected (C, H, W): image.permute(2, 0, 1)"
        )


def _imagenet(config: DataConfig, channels: int) -> Statistics:
    return SCALED if config.normalize == "none" else imagenet_statistics(channels)
