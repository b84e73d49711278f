"""Data sets by name: the embedded digits, or anybody's own."""

from __future__ import annotations

from collections.abc import Sized
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from mpitrain.data.sharding import Indices
from mpitrain.errors import DataError, UsageError
from mpitrain.plugins import call_with_known, is_reference, load_reference


class Samples(Protocol):
    """What training asks of a set of samples."""

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def batch(self, indices: Indices) -> tuple[Tensor, Tensor]:
        """Return the inputs `(N, ...)` and labels int64 `(N,)` of N samples."""
        ...


@dataclass(frozen=True, kw_only=True)
class Data:
    """A data set, ready to train on."""

    train: Samples
    """What the weights are fitted to."""
    val: Samples
    """What they are judged by."""
    num_classes: int
    """Labels are 0 to ``num_classes - 1``."""
    in_channels: int
    """Channels of an image: C of `(C, H, W)`."""
    image_size: int
    """Width of an image in pixels: W of `(C, H, W)`."""


class InMemory:
    """Samples held whole in memory; a batch is one gather."""

    def __init__(self, inputs: Tensor, labels: Tensor) -> None:
        self.inputs = inputs
        self.labels = labels

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.labels)

    def batch(self, indices: Indices) -> tuple[Tensor, Tensor]:
        """Return the inputs and labels of some samples."""
        chosen = torch.from_numpy(indices)
        return self.inputs[chosen], self.labels[chosen]


class MapStyle:
    """Samples of a map-style `torch.utils.data.Dataset`, read one by one."""

    def __init__(self, dataset: Any) -> None:
        self.dataset = dataset

    def __len__(self) -> int:
        """Return the number of samples."""
        return len(self.dataset)

    def batch(self, indices: Indices) -> tuple[Tensor, Tensor]:
        """Return the inputs and labels of some samples, collated as torch does."""
        from torch.utils.data import default_collate

        inputs, labels = default_collate([self.dataset[int(i)] for i in indices])
        return inputs, labels


def load_data(name: str, data_dir: Path | None) -> Data:
    """Load a data set.

    Args:
        name: ``"digits"``, or ``"package.module:callable"``: called with `data_dir` if
            it takes that, it returns a pair (train, val) of map-style data sets of
            (image `(C, H, W)`, label) whose `classes` lists the classes, as in
            torchvision's; or whose `num_classes` counts them.
        data_dir: Where the data set's files are; ``None`` if it needs none.

    Returns:
        The data; what every rank holds is the same.

    Raises:
        UsageError: There is no data set of that name.
        DataError: What the callable returned is no such pair.
    """
    if name == "digits":
        return digits()
    if is_reference(name):
        return own_data(name, data_dir)
    raise UsageError(
        f"--data {name!r} is not known. Expected digits, or package.module:callable "
        "for a data set of your own."
    )


def digits() -> Data:
    """Load the embedded UCI digits: 1,437 images to train, 360 to validate.

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
        image_size=8,
    )


def own_data(reference: str, data_dir: Path | None) -> Data:
    """Load a data set of the user's own; see `load_data`."""
    made = call_with_known(
        load_reference(reference, "--data"), {"data_dir": data_dir}, "--data"
    )
    if not (isinstance(made, tuple | list) and len(made) == 2):
        raise DataError(
            f"--data {reference} returned {type(made).__name__!r}; expected a pair "
            "(train, val) of map-style data sets"
        )
    train, val = made
    for part, dataset in (("train", train), ("val", val)):
        if not (isinstance(dataset, Sized) and hasattr(dataset, "__getitem__")):
            raise DataError(
                f"the {part} part of --data {reference} is "
                f"{type(dataset).__name__!r}, without __len__ and __getitem__; "
                "expected a map-style data set"
            )
        if len(dataset) == 0:
            raise DataError(f"the {part} part of --data {reference} has no samples")
    num_classes = getattr(train, "num_classes", None)
    if num_classes is None and hasattr(train, "classes"):
        num_classes = len(train.classes)
    if num_classes is None:
        raise DataError(
            f"the train part of --data {reference} has neither `classes` (a list) nor "
            "`num_classes` (an int); give it one of them"
        )
    first = train[0]
    image = first[0] if isinstance(first, tuple | list) and len(first) == 2 else first
    if not isinstance(image, Tensor) or image.ndim == 0 or image is first:
        raise DataError(
            f"the first sample of --data {reference} is a {type(first).__name__} of "
            f"{type(image).__name__}; expected (tensor, label), the tensor (C, H, W) "
            "for images (torchvision: transform=ToTensor())"
        )
    return Data(
        train=MapStyle(train),
        val=MapStyle(val),
        num_classes=int(num_classes),
        in_channels=image.shape[0],
        image_size=image.shape[-1],
    )
