"""Samples that are read one by one, ahead of time, by processes beside the rank."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from torch.utils.data import DataLoader, Dataset, default_collate

from mpitrain.data.randomness import seeded, uniform
from mpitrain.data.samples import BadSample, Loaded, Reader
from mpitrain.data.sharding import Indices, Share, epoch_order
from mpitrain.data.workers import Method, context_of, living, loader_of
from mpitrain.errors import DataError

PAIR = 2

TRIES = 100
"""Samples that may be bad before the first good one."""


class Read:
    """A set that is read sample by sample.

    Args:
        dataset: A `Reader`, or a map-style data set of one's own.
        seed: The run's.
        num_workers: Processes that read ahead; 0: this one reads, when it is wanted.
        method: How they are started.
        random_cuts: Whether a `Reader` cuts its images at random.
        skip: Whether to leave out samples that cannot be read.
        pin: Whether batches go to a GPU, from pinned memory.
        order: What `Samples.order` returns, if not a plain permutation.
    """

    def __init__(
        self,
        dataset: Any,
        *,
        seed: int,
        num_workers: int = 0,
        method: Method = "fork",
        random_cuts: bool = False,
        skip: bool = False,
        pin: bool = False,
        order: Callable[[int, int], Indices] | None = None,
    ) -> None:
        self.dataset = dataset
        self.num_samples: int = len(dataset)
        self.may_lack = skip
        self.is_still = is_reader(dataset) and not random_cuts
        self._one_by_one = _OneByOne(dataset, seed, random_cuts, skip)
        self._asked = _Asked()
        self._order = order
        self._loader: DataLoader[Any] | None = None
        self._example: Loaded | None = None
        self._options: dict[str, Any] = {
            "batch_sampler": self._asked,
            "collate_fn": collate,
            "num_workers": num_workers,
            "pin_memory": pin,
        }
        if num_workers:
            self._options |= {
                "multiprocessing_context": context_of(method),
                "persistent_workers": True,
            }

    def __len__(self) -> int:
        """Return the number of samples."""
        return self.num_samples

    def order(self, seed: int, epoch: int) -> Indices:
        """Return the order of an epoch."""
        if self._order is not None:
            return self._order(seed, epoch)
        return epoch_order(self.num_samples, seed, epoch)

    def example(self) -> Loaded:
        """Read the first sample that can be read.

        Raises:
            DataError: None of the first hundred can.
        """
        tries = min(self.num_samples, TRIES)
        for index in range(tries):
            if self._example is not None:
                return self._example
            loaded = checked(collate([self._one_by_one[0, index]]))
            if len(loaded.indices):
                self._example = loaded
        if self._example is None:
            raise DataError(
                f"none of the first {tries} samples can be read; the last is "
                f"{loaded.skipped[0]}"
            )
        return self._example

    def reread_example(self) -> Loaded:
        """Read the same sample once more; it may have changed by chance."""
        index = int(self.example().indices[0])
        return checked(collate([self._one_by_one[0, index]]))

    def batches(self, share: Share, epoch: int) -> Iterator[Loaded]:
        """Read batches, ahead of time where there are workers."""
        self._asked.batches, self._asked.epoch = share, epoch
        if self._loader is None:
            self._loader = loader_of(self._one_by_one, **self._options)
        yield from map(checked, living(self._loader))

    def close(self) -> None:
        """End the workers."""
        self._loader = None


def is_reader(dataset: Any) -> bool:
    """Whether a set is one of ours: others may have a method `read`, too."""
    return hasattr(dataset, "read") and not hasattr(dataset, "__getitem__")


class _Asked:
    """What the workers are asked for, in the words of DataLoader: a batch sampler."""

    def __init__(self) -> None:
        self.batches: Iterable[Indices] = ()
        self.epoch = 0

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        for indices in self.batches:
            yield [(self.epoch, int(index)) for index in indices]


class _OneByOne(Dataset[Any]):
    """Reads a sample, or says why it cannot be read; in a worker or in the rank."""

    def __init__(self, dataset: Any, seed: int, random_cuts: bool, skip: bool) -> None:
        self.dataset = dataset
        self.seed = seed
        self.random_cuts = random_cuts
        self.skip = skip

    def __getitem__(self, asked: tuple[int, int]) -> tuple[int, Any]:
        epoch, index = asked
        try:
            return index, self._read(epoch, index)
        except BadSample as bad:
            # Returned, not raised: DataLoader cannot carry it out of a worker whole.
            return index, _Failed(bad, is_final=not self.skip)
        except Exception as error:
            if not self.skip:
                raise
            where = f"sample {index} of {type(self.dataset).__name__}"
            return index, _Failed(BadSample(where, repr(error)), is_final=False)

    def _read(self, epoch: int, index: int) -> Any:
        if not is_reader(self.dataset):
            with seeded(self.seed, epoch, index):
                return self.dataset[index]
        reader: Reader = self.dataset
        numbers = None
        if self.random_cuts:
            numbers = uniform(self.seed, epoch, np.array([index]), 4, "cut")[0]
        return reader.read(index, numbers)


class _Failed:
    """A sample that could not be read."""

    def __init__(self, bad: BadSample, *, is_final: bool) -> None:
        self.bad = bad
        self.is_final = is_final


def collate(samples: list[tuple[int, Any]]) -> Loaded:
    """Make a batch of samples, as torch does; leave out what could not be read.

    Args:
        samples: Pairs of number and sample.

    Returns:
        The batch; where one may not be left out, what is wrong with it as inputs.
    """
    good = [(i, sample) for i, sample in samples if not isinstance(sample, _Failed)]
    failed = [sample for _, sample in samples if isinstance(sample, _Failed)]
    indices = np.array([index for index, _ in good], np.int64)
    skipped = tuple(f"{f.bad.where}: {f.bad.why}" for f in failed)
    final = next((f.bad for f in failed if f.is_final), None)
    if final is not None:
        return Loaded(final, None, indices, skipped)
    if not good:
        return Loaded(None, None, indices, skipped)
    for _, sample in good:
        if not (isinstance(sample, tuple | list) and len(sample) == PAIR):
            kind = type(sample).__name__
            raise DataError(f"a sample is {kind!r}; expected a pair (input, target)")
    try:
        inputs, targets = default_collate([sample for _, sample in good])
    except (RuntimeError, TypeError):
        uneven = _uneven(good)
        if uneven is None:
            raise
        return Loaded(uneven, None, indices, skipped)
    return Loaded(inputs, targets, indices, skipped)


def _uneven(samples: list[tuple[int, Any]]) -> DataError | None:
    """Say which sample has another shape than the first."""
    for place, kind in enumerate(("input", "target")):
        shapes = [getattr(sample[place], "shape", None) for _, sample in samples]
        for (number, _), shape in zip(samples, shapes, strict=True):
            if shape != shapes[0]:
                return DataError(
                    f"samples of one batch differ: sample {samples[0][0]} has "
                    f"{_with_shape(kind, shapes[0])}, sample {number} "
                    f"{_with_shape(kind, shape)}; expected one shape in all. Resize or "
                    "crop them in the data set"
                )
    return None


def _with_shape(kind: str, shape: Any) -> str:
    return f"{kind} shape {'none' if shape is None else tuple(shape)}"


def checked(loaded: Loaded) -> Loaded:
    """Raise what a worker could not, else return the batch."""
    if isinstance(loaded.inputs, DataError):
        raise loaded.inputs
    return loaded
