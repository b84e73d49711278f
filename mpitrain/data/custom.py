"""Custom data sets: torch's map-style and iterable-style ones, and plain tensors."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sized
from typing import Any

from torch.utils import data as torchs
from torch.utils.data import default_collate

from mpitrain.config import NumWorkers
from mpitrain.data.first_samples import check_first_samples
from mpitrain.data.in_memory import InMemory
from mpitrain.data.iterable import IterableStyle
from mpitrain.data.map_style import GETTERS, PAIR, MapStyle
from mpitrain.data.samples import CollateFn, sets_with_epochs, wrapped_sets
from mpitrain.data.workers import start_method
from mpitrain.errors import DataError
from mpitrain.mpi.shared_arrays import Communicator
from mpitrain.mpi.world import World

logger = logging.getLogger("mpitrain")

ONE_PASS_MODULES = ("builtins", "itertools")  # their iterators cannot begin again


Samples = InMemory | MapStyle | IterableStyle
"""One part of a data set, as a training reads it.

``num_samples`` is ``None`` if only reading to the end tells; `may_skip`: a batch may
hold fewer samples than requested; `is_deterministic`: a sample is the same in every
epoch. `order` is equal on all ranks; `batches` yields those of a rank, maybe empty.
`classes` are the names of labels, empty if there are none; `is_in_memory`: no worker
reads them; `first_digest` is of the first sample, if it is the same when it is read
again.
"""


def build_samples(
    dataset: Any,
    what: str,
    *,
    seed: int,
    world: World,
    ranks: Communicator,
    num_workers: NumWorkers = 0,
    skip: bool = False,
    collate_fn: CollateFn | None = None,
    reads_whole: bool = False,
) -> Samples:
    """Make samples of a data set; collective over all ranks, which are compared.

    It is a `TensorDataset`, a map-style or iterable-style data set, or samples already;
    `what` names it in messages. A batch of pairs is inputs and targets; one of another
    kind, which ``collate_fn`` may make, is both. With ``reads_whole`` the shards of a
    stream are not asked for.
    """
    if isinstance(dataset, InMemory | MapStyle | IterableStyle):
        return dataset
    check_data_set(dataset, what)
    classes = ranks.on_rank_zero(lambda: classes_of(dataset)[1], "share the classes")
    method, collate_fn = start_method(world.num_nodes), collate_fn or default_collate
    if not _is_map_style(dataset):
        _check_stream(dataset, what)
        stream = IterableStyle(
            dataset,
            seed=seed,
            num_workers=0 if num_workers == "auto" else num_workers,
            method=method,
            collate_fn=collate_fn,
            reads_whole=reads_whole,
        )
        if not stream.has_shards:
            check_first_samples(
                stream,
                what,
                world,
                ranks,
                "Expected the same stream on every rank: mpitrain shards it, so it "
                "must not shard itself. Or give it a method shard(num_shards, index) "
                "that returns one shard of it",
            )
        stream.classes = classes
        return stream
    ranks.check_equal(
        str(len(dataset)), f"the length of {what}", "Expected the same on every rank"
    )
    if len(dataset) == 0:
        raise DataError(f"{what} has no samples")
    if collate_fn is default_collate and _is_pair_of_tensors(dataset):
        samples: InMemory | MapStyle = InMemory(*dataset.tensors)
    else:
        samples = MapStyle(
            dataset,
            seed=seed,
            num_workers=num_workers,
            world=world,
            method=method,
            skip=skip,
            pin=world.device != "cpu",
            collate_fn=collate_fn,
        )
        try:
            samples.example()
        except DataError as error:
            raise DataError(f"{what}: {error}") from None
        except KeyError as error:
            if error.args != (0,):  # of a custom data set's own
                raise
            raise DataError(
                f"{what} is {type(dataset).__name__!r} without a sample 0; expected a "
                "data set whose samples have the numbers from 0 on"
            ).on_all_ranks() from None
    samples.classes = classes
    samples.first_digest = check_first_samples(
        samples,
        what,
        world,
        ranks,
        "Expected the same data on every rank: mpitrain shards it. Seed what is random "
        "in making it (torch.manual_seed)",
    )
    return samples


def warn_if_collate_draws(samples: Samples, world: World) -> None:
    """Warn of a ``collate_fn`` whose random numbers depend on who shares a batch.

    Of data whose batches depend on the number of ranks; local.
    """
    draws = not isinstance(samples, InMemory) and samples.collate_draws()
    if draws and world.is_rank_zero:
        logger.warning(
            "collate_fn draws random numbers, which depend on the samples of a "
            "micro-batch, and so results on the number of ranks; draw them in the data "
            "set's __getitem__"
        )


def check_data_set(dataset: Any, what: str) -> None:
    """Refuse several sets, and a `DataLoader`, which yields batches.

    Also one within torch's wrappers.
    """
    is_like_one = hasattr(dataset, "batch_size") and hasattr(dataset, "collate_fn")
    is_like_one &= not hasattr(dataset, "__getitem__")
    if isinstance(dataset, torchs.DataLoader) or is_like_one:
        raise DataError(
            f"{what} is a {type(dataset).__name__!r}, whose samples would be batches; "
            "expected a data set: pass loader.dataset, and its batch size and workers "
            "as global_batch_size and num_workers (--global-batch-size, --num-workers)"
        ).on_all_ranks()
    for inner in wrapped_sets(dataset):
        check_data_set(inner, what)
    if isinstance(dataset, list | tuple | dict) and dataset:
        first = next(iter(dataset.values() if type(dataset) is dict else dataset))
        if isinstance(first, torchs.Dataset):
            raise DataError(
                f"{what} is a {type(dataset).__name__} of data sets; expected one, "
                "such as a ConcatDataset; or several as val_data, by names that are "
                'texts: {"clean": one, "noisy": other}'
            ).on_all_ranks()


def classes_of(dataset: Any) -> tuple[Any, tuple[str, ...]]:
    """Return number and names of classes: a data set's, or of all that it wraps."""
    classes = getattr(dataset, "classes", None)
    num_classes = getattr(dataset, "num_classes", None)
    if classes is None and num_classes is None:
        found = set(map(classes_of, wrapped_sets(dataset)))
        return found.pop() if len(found) == 1 else (None, ())
    if num_classes is None and isinstance(classes, Sized):
        num_classes = len(classes) or None
    # The order of others, such as a set, may differ in the next job.
    names = classes if isinstance(classes, list | tuple) else ()
    return num_classes, tuple(map(str, names))


def _is_map_style(dataset: Any) -> bool:
    """Whether samples have numbers, as in torch's map-style data sets."""
    # torch's iterable ones have an __getitem__ that is not to be called.
    is_sequence = hasattr(dataset, "__getitem__") and isinstance(dataset, Sized)
    return is_sequence and not isinstance(dataset, torchs.IterableDataset)


def _is_pair_of_tensors(dataset: Any) -> bool:
    """Whether it is a `TensorDataset` of two, whose methods are torch's own."""
    if not isinstance(dataset, torchs.TensorDataset) or len(dataset.tensors) != PAIR:
        return False
    if sets_with_epochs(dataset):  # it may have other tensors then
        return False
    return all(
        getattr(type(dataset), name, None) is getattr(torchs.TensorDataset, name, None)
        for name in (*GETTERS, "__len__")
    )


def _check_stream(dataset: Any, what: str) -> None:
    if not isinstance(dataset, Iterable):
        raise DataError(
            f"{what} is {type(dataset).__name__!r}; expected a data set with __len__ "
            "and __getitem__, or with __iter__"
        )
    if isinstance(dataset, Iterator) and type(dataset).__module__ in ONE_PASS_MODULES:
        raise DataError(
            f"{what} is a {type(dataset).__name__!r}, which can be read only once; "
            "expected a data set with __iter__ that begins again in every epoch"
        )
