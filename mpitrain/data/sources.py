"""Data sets by name. Read this first; each format has a file of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import torch

from mpitrain.data import cifar, fetching, folder, hdf5, idx, shards, synthetic
from mpitrain.data.config import DATA_DIR, DataConfig
from mpitrain.data.loading import Read
from mpitrain.data.memory import InMemory
from mpitrain.data.own import as_samples, own_parts
from mpitrain.data.pixels import (
    Statistics,
    mean_and_std,
    of_imagenet,
)
from mpitrain.data.samples import PARTS, Array, Reader, Samples, Table
from mpitrain.data.workers import start_method
from mpitrain.errors import UsageError, did_you_mean
from mpitrain.mpi.shared_arrays import Communicator
from mpitrain.mpi.world import World
from mpitrain.plugins import is_reference


@dataclass(frozen=True, kw_only=True)
class Data:
    """A data set, ready to train on."""

    train: Samples
    """What the weights are fitted to."""
    val: Samples
    """What they are judged by."""
    test: Samples | None = None
    """What the finished weights are judged by, once."""
    num_classes: int | None
    """Labels are 0 to ``num_classes - 1``; ``None`` where targets are no labels."""
    in_channels: int
    """Channels of an image: C of `(C, H, W)`."""
    image_size: int
    """Width of an image in pixels as the model sees it: W of `(C, H, W)`."""
    statistics: Statistics | None = None
    """Mean and deviation to take off, per channel, in the range 0 to 1."""

    def close(self) -> None:
        """End the processes that read ahead."""
        for samples in (self.train, self.val, self.test):
            if samples is not None:
                samples.close()


SMALL: Mapping[str, Callable[[str, Path], Table]] = {
    "mnist": idx.read,
    "fashion-mnist": idx.read,
    "cifar10": cifar.read,
    "cifar100": cifar.read,
}
"""Sets that live whole in memory, once per node: who reads them."""

LARGE: Mapping[str, Any] = {"folder": folder, "hdf5": hdf5, "shards": shards}
"""Sets that are read sample by sample: a module with `scan` and `readers`."""

DEFAULT_IMAGE_SIZE = 224

MOST_WORKERS = 8
"""That are started where nobody says otherwise."""


def load_data(
    config: DataConfig, *, seed: int, world: World, ranks: Communicator
) -> Data:
    """Load a data set.

    Collective over all ranks.

    Args:
        config: Which, and from where. ``package.module:callable`` is called with
            `data_dir` if it takes that; see `mpitrain.data.own`.
        seed: The run's.
        world: Where this process stands.
        ranks: All of them.

    Returns:
        The data; what it holds is equal on all ranks.

    Raises:
        UsageError: There is no data set of that name.
        DataError: Its files are missing, broken, or differ between nodes.
    """
    name = config.data
    if name == "digits":
        return digits(config.image_size)
    if name in SMALL or name == "synthetic":
        return _small(config, ranks)
    if name in LARGE:
        return _large(config, seed, world, ranks)
    if is_reference(name):
        return _own(config, seed, world, ranks)
    known = ["digits", *SMALL, "synthetic", *LARGE]
    raise UsageError(
        f"--data {name!r} is not known.{did_you_mean(name, known)} Expected "
        f"{', '.join(known)}, or package.module:callable for a data set of your own."
    )


def digits(image_size: int | None = None) -> Data:
    """Load the embedded UCI digits: 1,437 images to train, 360 to validate.

    So small that each rank reads them by itself.

    Args:
        image_size: What a model sees them resized to; ``None``: as they are.

    Returns:
        Images float32 `(N, 1, 8, 8)` from 0 to 1, labels int64 `(N,)`.
    """
    file = resources.files("mpitrain.data.digits") / "digits.npz"
    with file.open("rb") as stream, np.load(stream) as arrays:
        order = arrays["permutation"].astype(np.int64)
        num_train = int(arrays["num_train"])
        images = torch.from_numpy(arrays["images"][order])
        labels = torch.from_numpy(arrays["labels"][order]).long()
    inputs = images.unsqueeze(1).float() / 16.0
    return Data(
        train=InMemory(inputs[:num_train], labels[:num_train]),
        val=InMemory(inputs[num_train:], labels[num_train:]),
        num_classes=10,
        in_channels=1,
        image_size=image_size or 8,
    )


def _small(config: DataConfig, ranks: Communicator) -> Data:
    """Read a set once, and hold it whole, once per node."""
    name, data_dir = config.data, config.data_dir or DATA_DIR
    outline: dict[str, Any] = {}

    def read() -> Mapping[str, Array]:
        if name == "synthetic":
            size = config.image_size or DEFAULT_IMAGE_SIZE
            table = synthetic.make(
                config.synthetic_samples, config.synthetic_classes, size
            )
        else:
            if fetching.missing(name, data_dir):
                fetching.fetch(name, data_dir, None)
            table = SMALL[name](name, data_dir)
        outline["num_classes"] = len(table.classes)
        return table.arrays

    arrays = ranks.load_shared(read, f"read {name}")
    num_classes = ranks.on_rank_zero(lambda: int(outline["num_classes"]), "count")
    train, val = (
        InMemory(
            torch.from_numpy(arrays[f"{part}_inputs"]),
            torch.from_numpy(arrays[f"{part}_labels"]),
        )
        for part in ("train", "val")
    )
    return Data(
        train=train,
        val=val,
        num_classes=num_classes,
        in_channels=train.inputs.shape[1],
        image_size=config.image_size or train.inputs.shape[-1],
        statistics=_statistics(config, train, ranks),
    )


def _large(config: DataConfig, seed: int, world: World, ranks: Communicator) -> Data:
    """Scan a set once; its samples are read when they are wanted."""
    module = LARGE[config.data]
    data_dir = config.data_dir or DATA_DIR
    scanned: list[Table] = []

    def scan() -> Mapping[str, Array]:
        scanned.append(module.scan(data_dir))
        return scanned[0].arrays

    arrays = ranks.load_shared(scan, f"scan {data_dir}")
    classes, facts = ranks.on_rank_zero(
        lambda: (scanned[0].classes, scanned[0].facts), "tell what was scanned"
    )
    table = Table(arrays=arrays, classes=classes, facts=facts)
    ranks.check_same_on_nodes(
        lambda: (scanned[0] if scanned else module.scan(data_dir)).digest(),
        f"the files of {data_dir}",
    )
    size = config.image_size or facts["size"] or DEFAULT_IMAGE_SIZE
    readers: dict[str, Reader] = module.readers(data_dir, table, size)
    asked = config.num_workers
    spare = max(0, min(MOST_WORKERS, world.num_cores - 1))
    num_workers = spare if asked == "auto" else asked

    def samples(part: str) -> Samples | None:
        if part not in readers:
            return None
        is_train = part == "train"
        order = None
        if config.data == "shards":
            of_sample = arrays[f"{part}_shards"]
            order = lambda seed, epoch: shards.order(of_sample, seed, epoch)  # noqa: E731
        return Read(
            readers[part],
            seed=seed,
            num_workers=num_workers,
            method=start_method(world.num_nodes),
            random_cuts=is_train and config.random_resized_crop,
            skip=config.on_bad_sample == "skip",
            pin=world.device != "cpu",
            order=order,
        )

    train, val, test = (samples(part) for part in PARTS)
    assert train is not None
    assert val is not None
    channels = int(facts["channels"])
    return Data(
        train=train,
        val=val,
        test=test,
        num_classes=len(classes),
        in_channels=channels,
        image_size=size,
        statistics=_imagenet(config, channels),
    )


def _own(config: DataConfig, seed: int, world: World, ranks: Communicator) -> Data:
    """Load a data set of the user's own."""
    parts = own_parts(config.data, config.data_dir)
    num_workers = 0 if config.num_workers == "auto" else config.num_workers
    ready = [
        as_samples(
            dataset,
            f"the {part} part of --data {config.data}",
            seed=seed,
            world=world,
            ranks=ranks,
            num_workers=num_workers,
            skip=config.on_bad_sample == "skip",
        )
        for part, dataset in zip(PARTS, parts.datasets, strict=False)
    ]
    shape = parts.shape(ready[0])
    return Data(
        train=ready[0],
        val=ready[1],
        test=ready[2] if len(ready) > 2 else None,
        num_classes=parts.num_classes,
        in_channels=shape[0],
        image_size=config.image_size or shape[-1],
        statistics=_imagenet(config, shape[0]),
    )


def _statistics(
    config: DataConfig, train: InMemory, ranks: Communicator
) -> Statistics | None:
    if config.normalize in ("auto", "data"):
        return ranks.on_rank_zero(
            lambda: mean_and_std(train.inputs), "take the mean of the pixels"
        )
    return _imagenet(config, train.inputs.shape[1])


def _imagenet(config: DataConfig, channels: int) -> Statistics | None:
    """Return ImageNet's, unless nothing is asked for."""
    if config.normalize == "none":
        return None
    if config.normalize == "data":
        raise UsageError(
            f"--normalize data needs a set that is in memory, found --data "
            f"{config.data!r}; expected imagenet or none"
        )
    return of_imagenet(channels)
