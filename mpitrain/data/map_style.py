"""Map-style data sets: samples read one by one, ahead of time in worker processes."""

from __future__ import annotations

import abc
import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Dataset, Subset, default_collate

from mpitrain.config import NumWorkers
from mpitrain.data.randomness import (
    batch_seed,
    own_random_state,
    random_state,
    sample_seed,
    seed_all,
    uniform,
)
from mpitrain.data.samples import (
    BadSample,
    CollateFn,
    LoadedBatch,
    SampleReader,
    kind_of,
    leaves_of,
    sets_with_epochs,
    tell_epoch,
)
from mpitrain.data.sharding import Indices, RankShard, epoch_order
from mpitrain.data.worker_pool import Keys, WorkerPool
from mpitrain.data.workers import (
    StartMethod,
    build_loader,
    iterate_loader,
    worker_context,
)
from mpitrain.errors import DataError
from mpitrain.mpi.world import World

PAIR = 2
GETTERS = ("__getitem__", "__getitems__")
MAX_TRIES = 100  # samples that may be bad before the first good one


PADDING = -1  # in place of the number of a sample, see `Collate`

Key = tuple[int, int]
"""Of a sample: the epoch, and its number."""


class CollatedSamples(abc.ABC):
    """Samples that are read one by one and joined by a `Collate`."""

    is_in_memory = False
    classes: tuple[str, ...] = ()  # names by label, if they are known
    first_digest = ""  # of a custom map-style set, see `Samples`

    def __init__(self, collate: Collate) -> None:
        self.collate = collate

    @abc.abstractmethod
    def _read_first(self) -> tuple[Key, Any]:
        """Return the first sample that can be read, and its key."""

    @functools.cached_property
    def _first(self) -> tuple[Key, Any]:
        # Kept, since in the middle of a training the other ranks wait for a read.
        return self._read_first()

    def example(self, num_rows: int = 1) -> LoadedBatch:
        """Return the first sample that can be read; repeated, if rows are wanted."""
        return self._collated([self._first] * num_rows)

    def reread_example(self) -> LoadedBatch:
        """Read the same sample again; it differs if the data set is random."""
        return self._collated([self._read_first()])

    def _collated(self, samples: list[tuple[Key, Any]]) -> LoadedBatch:
        with own_random_state():
            return raise_if_bad(self.collate(samples))

    def collate_draws(self) -> bool:
        """Whether ``collate_fn`` draws random numbers; local."""
        self.example()  # with it is decided, before there are workers, what is a pair
        return self.collate.draws(self._first[1])


class MapStyle(CollatedSamples):
    """A `SampleReader` or a custom map-style data set, read sample by sample.

    With ``num_workers="auto"`` the cores of `world` bound the number that is found.
    `skip` leaves out samples that cannot be read; `pin` reads into pinned memory;
    `order` replaces the plain permutation of `Samples.order`; `collate_fn` is
    `DataLoader`'s.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        seed: int,
        num_workers: NumWorkers = 0,
        world: World | None = None,
        method: StartMethod = "fork",
        random_crops: bool = False,
        skip: bool = False,
        pin: bool = False,
        order: Callable[[int, int], Indices] | None = None,
        collate_fn: CollateFn = default_collate,
    ) -> None:
        super().__init__(Collate(collate_fn, seed, skip=skip))
        self.dataset = dataset
        self.num_samples: int = len(dataset)
        self.may_skip = skip
        self.is_deterministic = isinstance(dataset, SampleReader) and not random_crops
        self._sample_dataset = _SampleDataset(dataset, seed, random_crops, skip)
        # A custom ``collate_fn`` is called in the process that reads.
        self._sample_dataset.is_seeded |= not self.collate.is_default
        self._batch_sampler = _BatchSampler()
        self._order = order
        self._loader: DataLoader[Any] | WorkerPool | None = None
        options: dict[str, Any] = {"collate_fn": self.collate, "pin_memory": pin}
        if num_workers == "auto":
            assert world is not None
            self._build: Callable[[], DataLoader[Any] | WorkerPool] = functools.partial(
                WorkerPool, self._sample_dataset, world, method, **options
            )
            return
        options |= {"batch_sampler": self._batch_sampler, "num_workers": num_workers}
        if num_workers:
            options |= {
                "multiprocessing_context": worker_context(method),
                "persistent_workers": True,
            }
        self._build = functools.partial(build_loader, self._sample_dataset, **options)

    def __len__(self) -> int:
        return self.num_samples

    def order(self, seed: int, epoch: int) -> Indices:
        """Return the order of an epoch."""
        if self._order is None:
            return epoch_order(self.num_samples, seed, epoch)
        return self._order(seed, epoch)

    def _read_first(self) -> tuple[Key, Any]:
        tries = min(self.num_samples, MAX_TRIES)
        for index in range(tries):
            with own_random_state():
                first = self._sample_dataset[0, index]
            loaded = self._collated([first])
            if len(loaded.indices):
                return first
        raise DataError(
            f"none of the first {tries} samples can be read; the last is "
            f"{loaded.skipped[0]}"
        )

    def batches(self, rank_shard: RankShard, epoch: int) -> Iterator[LoadedBatch]:
        """Read batches, ahead of time if there are workers."""
        self._batch_sampler.rank_shard, self._batch_sampler.epoch = rank_shard, epoch
        if self._loader is None:
            self._loader = self._build()
        if isinstance(self._loader, WorkerPool):
            steps = self._batch_sampler.steps()
            batches = self._loader.batches(steps, is_training=epoch > 0)
        else:
            batches = iterate_loader(self._loader)
        yield from map(raise_if_bad, batches)

    def read(self, indices: Indices, epoch: int, min_rows: int) -> LoadedBatch:
        """Read some samples in this process, and repeat the last of fewer."""
        keys = _keys_of(indices, epoch, min_rows)
        with own_random_state():
            found = self._sample_dataset.__getitems__(keys)
        return self._collated(found)

    def close(self) -> None:
        """End the workers."""
        if isinstance(self._loader, WorkerPool):
            self._loader.close()
        self._loader = None


class _BatchSampler:
    """What the workers read next: (epoch, index) of each sample of a batch."""

    rank_shard: RankShard
    epoch: int

    def __iter__(self) -> Iterator[Keys]:
        return itertools.chain.from_iterable(self.steps())

    def steps(self) -> Iterator[list[Keys]]:
        for _, batches in self.rank_shard.steps():
            min_rows = self.rank_shard.min_rows
            yield [_keys_of(indices, self.epoch, min_rows) for indices in batches]


def _keys_of(indices: Indices, epoch: int, min_rows: int) -> Keys:
    padding = [(epoch, PADDING)] * (min_rows - 1)
    return [*((epoch, int(index)) for index in indices), *padding]


class _SampleDataset(Dataset[Any]):
    """Reads a sample, or returns why it cannot be read; in a worker or in the rank.

    ``is_seeded``: reading seeds the process; `workers.next_batch` asks for it.
    """

    def __init__(self, dataset: Any, seed: int, random_crops: bool, skip: bool) -> None:
        self.dataset = dataset
        self.seed = seed
        self.random_crops = random_crops
        self.skip = skip
        self.is_seeded = not isinstance(dataset, SampleReader)
        self._sets_with_epochs = sets_with_epochs(dataset) if self.is_seeded else []
        while isinstance(dataset, Subset):  # its methods ask the same of the set inside
            dataset = dataset.dataset
        # Of the two methods that torch's loaders ask, the one that a subclass has.
        names = (n for of in type(dataset).__mro__ for n in GETTERS if n in vars(of))
        self._has_many = next(names, "") == "__getitems__"

    def __getitems__(self, keys: list[Key]) -> list[tuple[Key, Any]]:
        return [self._get(*key) for key in keys]

    def __getitem__(self, key: Key) -> tuple[Key, Any]:
        return self._get(*key)

    def _get(self, epoch: int, index: int) -> tuple[Key, Any]:
        key = epoch, index
        if index == PADDING:
            return key, None
        tell_epoch(self._sets_with_epochs, epoch)
        try:
            return key, self._read(epoch, index)
        except BadSample as bad:
            # Returned, not raised: DataLoader cannot carry it out of a worker whole.
            return key, bad
        except Exception as error:
            if not self.skip:
                raise
            where = f"sample {index} of {type(self.dataset).__name__}"
            return key, BadSample(where, repr(error))

    def _read(self, epoch: int, index: int) -> Any:
        if not isinstance(self.dataset, SampleReader):
            seed_all(sample_seed(self.seed, epoch, index))
            if self._has_many:
                return self.dataset.__getitems__([index])[0]
            return self.dataset[index]
        numbers = None
        if self.random_crops:
            numbers = uniform(self.seed, epoch, np.array([index]), 4, "cut")[0]
        return self.dataset.read(index, numbers)


class Collate:
    """Makes a batch of pairs of key and sample; a `BadSample` is left out.

    Without `skip` the batch's inputs are the first `BadSample` instead. A number
    `PADDING` asks for a row more than one: the last sample is repeated, if there are
    fewer. That is done here, since a batch of any kind cannot be cut or joined later.

    Whether batches are inputs and targets is decided once: a list of two texts, or of
    two graphs, looks like a pair, but is none of three.

    What a custom ``collate_fn`` draws depends on ``seed``, the epoch and the samples of
    the batch, not on the process, or on what it has drawn before.
    """

    def __init__(self, collate_fn: CollateFn, seed: int, *, skip: bool = False) -> None:
        self._collate_fn, self._seed, self._skip = collate_fn, seed, skip
        self.is_default = collate_fn is default_collate
        self._makes_pairs: bool | None = None  # not known yet

    def __call__(self, samples: list[tuple[Key, Any]]) -> LoadedBatch:
        """Make a batch; of no samples, an empty one."""
        epoch = samples[0][0][0] if samples else 0
        numbered = [(number, sample) for (_, number), sample in samples]
        num_rows = 1 + sum(number == PADDING for number, _ in numbered)
        numbered = [pair for pair in numbered if pair[0] != PADDING]
        bad = [sample for _, sample in numbered if isinstance(sample, BadSample)]
        good = [pair for pair in numbered if not isinstance(pair[1], BadSample)]
        indices = np.array([number for number, _ in good], np.int64)
        skipped = tuple(f"{sample.where}: {sample.reason}" for sample in bad)
        if bad and not self._skip:
            return LoadedBatch(bad[0], None, indices, skipped)
        if not good:
            return LoadedBatch(None, None, indices, skipped)
        rows = [sample for _, sample in good]
        rows += rows[-1:] * (num_rows - len(rows))
        try:
            batch = self._call(rows, epoch, indices)
        # Returned, as a `BadSample` is: `raise_if_bad` raises it in the rank.
        except (KeyError, RuntimeError, TypeError) as error:
            if not self.is_default:
                raise
            return LoadedBatch(_refused(rows, indices, error), None, indices, skipped)
        if self._makes_pairs is None:
            self._makes_pairs = self._is_pair_of_any_length(batch, rows)
        if not self._makes_pairs:
            return LoadedBatch(batch, None, indices, skipped)
        if _is_pair(batch):
            return LoadedBatch(batch[0], batch[1], indices, skipped)
        mixed = DataError(
            f"collate_fn made {kind_of(batch)} of {len(rows)} samples, and pairs of "
            "inputs and targets of others; expected pairs of all, or of none"
        )
        return LoadedBatch(mixed, None, indices, skipped)

    def _is_pair_of_any_length(self, batch: Any, rows: list[Any]) -> bool:
        if self.is_default:  # it makes a list of a row with two parts, or of texts
            is_text = isinstance(rows[0], str | bytes)
            return isinstance(rows[0], Sequence) and not is_text and _is_pair(batch)
        found = [batch]
        # Of one and of three samples, since lists of two look like pairs.
        for num in (1, 3) * _is_pair(batch):
            with own_random_state(), contextlib.suppress(Exception):
                found.append(self._collate_fn(rows[:1] * num))
        return all(map(_is_pair, found))

    def _call(self, rows: list[Any], epoch: int, indices: Indices) -> Any:
        if not self.is_default:  # which draws nothing
            seed_all(batch_seed(self._seed, epoch, indices))
        return self._collate_fn(rows)

    def draws(self, sample: Any) -> bool:
        """Whether ``collate_fn`` draws from torch, numpy or `random`; local."""
        if self.is_default:
            return False
        with own_random_state():
            before = random_state()
            with contextlib.suppress(Exception):  # raised again for a real batch
                self._collate_fn([sample] * PAIR)  # of one it may mix nothing
            return random_state() != before


def _is_pair(batch: Any) -> bool:
    return isinstance(batch, tuple | list) and len(batch) == PAIR


def _refused(samples: list[Any], indices: Indices, error: Exception) -> DataError:
    """Return why torch cannot collate samples: they differ, or are of no known kind."""
    shapes = [
        [tuple(getattr(leaf, "shape", ())) for leaf in leaves_of(sample)]
        for sample in samples
    ]
    odd = next((i for i, shape in enumerate(shapes) if shape != shapes[0]), None)
    if odd is None:
        return DataError(
            f"torch cannot collate samples such as {kind_of(samples[0])}: {error}\n"
            "Expected tensors, numbers, or dicts, lists and tuples of them; or a "
            "collate_fn that makes a batch of a list of samples, as DataLoader's"
        )
    return DataError(
        f"samples of one batch differ: sample {indices[0]} has shapes {shapes[0]}, "
        f"sample {indices[odd]} {shapes[odd]}; expected one shape in all. Resize or "
        "crop them in the data set, or pad them in a collate_fn (mpitrain.Trainer)"
    )


def raise_if_bad(loaded: LoadedBatch) -> LoadedBatch:
    """Raise what a worker returned instead of raising, else return the batch."""
    if isinstance(loaded.inputs, DataError):
        raise loaded.inputs
    return loaded
