"""Data sets of one's own: torch's map-style and iterable ones, and plain tensors."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.utils.data import IterableDataset, TensorDataset

from mpitrain.data.config import DATA_DIR
from mpitrain.data.loading import PAIR, Read
from mpitrain.data.memory import InMemory
from mpitrain.data.nests import digest
from mpitrain.data.samples import PARTS, Loaded, Samples
from mpitrain.data.streams import Stream
from mpitrain.data.workers import start_method
from mpitrain.errors import DataError
from mpitrain.mpi.shared_arrays import Communicator
from mpitrain.mpi.world import World
from mpitrain.plugins import call_with_known, load_reference

ONCE = ("builtins", "itertools")
"""Modules whose iterators, such as generators, cannot begin anew."""


@dataclass(frozen=True, kw_only=True)
class OwnParts:
    """What somebody's callable returned."""

    reference: str
    """``package.module:callable``."""
    datasets: Sequence[Any]
    """Train and val, perhaps test."""
    num_classes: int | None
    """As the training part says it; ``None`` where it says nothing."""

    def shape(self, train: Samples) -> tuple[int, ...]:
        """Return the shape of an input, `(C, H, W)` for images.

        Raises:
            DataError: A sample is no pair of a tensor and a target.
        """
        inputs = train.example().inputs
        if not isinstance(inputs, Tensor) or inputs.ndim < PAIR:
            raise DataError(
                f"an input of --data {self.reference} is {type(inputs).__name__!r}; "
                "expected a tensor, (C, H, W) for images (torchvision: "
                "transform=ToTensor()). Inputs of other kinds can be trained on with "
                "mpitrain.Trainer in a script"
            )
        return tuple(inputs.shape[1:])


def own_parts(reference: str, data_dir: Path | None) -> OwnParts:
    """Call what returns the parts of a data set.

    Args:
        reference: ``"package.module:callable"``: called with `data_dir` if it takes
            that, it returns (train, val) or (train, val, test): map-style or iterable
            data sets of (input, target). The `classes` of train list the classes, as
            torchvision's do, or its `num_classes` counts them.
        data_dir: Where the data set's files are; ``None`` if nobody said.

    Raises:
        DataError: What it returned is nothing of that kind.
    """
    made = call_with_known(
        load_reference(reference, "--data"),
        {"data_dir": data_dir},
        "--data",
        otherwise={"data_dir": DATA_DIR},
    )
    if not (isinstance(made, tuple | list) and len(made) in (PAIR, PAIR + 1)):
        raise DataError(
            f"--data {reference} returned {type(made).__name__!r}; expected a pair "
            "(train, val) of data sets, or (train, val, test)"
        )
    for part, dataset in zip(PARTS, made, strict=False):
        if isinstance(dataset, Sized) and len(dataset) == 0:
            raise DataError(f"the {part} part of --data {reference} has no samples")
    train = made[0]
    num_classes = getattr(train, "num_classes", None)
    if num_classes is None and hasattr(train, "classes"):
        num_classes = len(train.classes)
    if num_classes is None:
        raise DataError(
            f"the train part of --data {reference} has neither `classes` (a list) nor "
            "`num_classes` (an int); give it one of them"
        )
    return OwnParts(reference=reference, datasets=made, num_classes=int(num_classes))


def as_samples(
    dataset: Any,
    what: str,
    *,
    seed: int,
    world: World,
    ranks: Communicator,
    num_workers: int = 0,
    skip: bool = False,
) -> Samples:
    """Make samples of a data set.

    Collective over all ranks.

    Args:
        dataset: A `TensorDataset` of inputs and targets, a map-style or an iterable
            data set of pairs, or samples already.
        what: What it is, for messages.
        seed: The run's.
        world: Where this process stands.
        ranks: All of them; what they have is compared.
        num_workers: Processes that read ahead.
        skip: Whether to leave out samples that cannot be read.

    Raises:
        DataError: It is nothing of that kind, is empty, holds no pairs, or differs
            between ranks; on every rank or on none.
    """
    if isinstance(dataset, InMemory | Read | Stream):
        return dataset
    method = start_method(world.num_nodes)
    is_map_style = hasattr(dataset, "__getitem__") and isinstance(dataset, Sized)
    # torch's iterable ones have an __getitem__ that is not to be called.
    if is_map_style and not isinstance(dataset, IterableDataset):
        return _map_style(dataset, what, seed, world, ranks, num_workers, skip)
    if not isinstance(dataset, Iterable):
        raise DataError(
            f"{what} is {type(dataset).__name__!r}; expected a data set with __len__ "
            "and __getitem__, or with __iter__"
        )
    if isinstance(dataset, Iterator) and type(dataset).__module__ in ONCE:
        raise DataError(
            f"{what} is a {type(dataset).__name__!r}, which can be read only once; "
            "expected a data set with __iter__ that begins anew for every epoch"
        )
    stream = Stream(
        dataset,
        seed=seed,
        num_workers=num_workers,
        method=method,
    )
    if not stream.is_cut:
        ranks.check_equal(
            stream.fingerprint(),
            f"the first sample of {what}",
            "Expected the same stream on every rank: it is shared out here, so that it "
            "must not share itself out. Or give it a method shard(num_shards, index) "
            "that returns one part of it",
        )
    return stream


def _map_style(
    dataset: Any,
    what: str,
    seed: int,
    world: World,
    ranks: Communicator,
    num_workers: int,
    skip: bool,
) -> Samples:
    ranks.check_equal(
        str(len(dataset)), f"the length of {what}", "Expected the same on every rank"
    )
    if len(dataset) == 0:
        raise DataError(f"{what} has no samples")
    if isinstance(dataset, TensorDataset) and len(dataset.tensors) == PAIR:
        samples: InMemory | Read = InMemory(*dataset.tensors)
        _agree_on_first(samples.example(), what, ranks)
        return samples
    samples = Read(
        dataset,
        seed=seed,
        num_workers=num_workers,
        method=start_method(world.num_nodes),
        skip=skip,
        pin=world.device != "cpu",
    )
    try:
        samples.example()
    except DataError as error:
        raise DataError(f"{what}: {error}") from None
    again = samples.reread_example()
    # One that is drawn by chance, from a generator of its own, differs rightly.
    is_by_chance = digest(again) != digest(samples.example())
    _agree_on_first(None if is_by_chance else again, what, ranks)
    return samples


def _agree_on_first(first: Loaded | None, what: str, ranks: Communicator) -> None:
    ranks.check_equal(
        "" if first is None else digest((first.inputs, first.targets)),
        f"the first sample of {what}",
        "Expected the same data on every rank: it is shared out here. Seed what is "
        "random in making it (torch.manual_seed)",
    )
