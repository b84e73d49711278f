"""What a data set is to a training: the protocols that sources fulfil."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from mpitrain.data.sharding import Indices, Share
from mpitrain.errors import DataError

MOST_BYTES = 1 << 30
"""Of one file, image or member of an archive, unpacked: what says more is refused."""

PARTS = ("train", "val", "test")
"""The parts of a data set; ``test`` may be missing."""

Array = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class Table:
    """What one rank reads for all: a small set whole, or the index of a large one.

    Its arrays are then held once per node, in shared memory.
    """

    arrays: Mapping[str, Array]
    """By name, such as ``"train_inputs"``; numbers only, no objects."""
    classes: tuple[str, ...]
    """Names of the classes, by label."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What else a reader must know; small, and JSON can carry it."""

    def digest(self) -> str:
        """Return a short text that differs where two tables differ."""
        found = hashlib.sha256(
            repr((self.classes, sorted(self.facts.items()))).encode()
        )
        for name in sorted(self.arrays):
            array = np.ascontiguousarray(self.arrays[name])
            found.update(repr((name, array.dtype.str, array.shape)).encode())
            found.update(array.reshape(-1).view(np.uint8).data)
        return found.hexdigest()[:16]


class Loaded(NamedTuple):
    """The samples of one batch, as they were read.

    A tuple: so torch finds the tensors in it that it pins.
    """

    inputs: Any
    """Tensor `(N, ...)` of their inputs (or a nest of such, for data of one's own);
    ``None`` where N is 0."""
    targets: Any
    """Tensor `(N, ...)` of what is to be found: labels int64 `(N,)` for classes."""
    indices: Indices
    """Their numbers, int64 `(N,)`: those asked for, without what could not be had."""
    skipped: tuple[str, ...] = ()
    """What was left out since it could not be read."""


class Samples(Protocol):
    """A part of a data set, as a training asks for it."""

    @property
    def num_samples(self) -> int | None:
        """How many there are; ``None`` where only reading to the end tells."""
        ...

    @property
    def may_lack(self) -> bool:
        """Whether a batch may hold fewer samples than were asked for."""
        ...

    @property
    def is_still(self) -> bool:
        """Whether a sample is the same in every epoch."""
        ...

    def order(self, seed: int, epoch: int) -> Indices:
        """Return the order in which an epoch sees all samples; equal on all ranks."""
        ...

    def example(self) -> Loaded:
        """Return one sample, for its shape; local."""
        ...

    def batches(self, share: Share, epoch: int) -> Iterator[Loaded]:
        """Load batches, in the order asked for.

        Args:
            share: What this rank takes: the samples of each batch by their numbers; may
                be none. Where `num_samples` is ``None`` they are consecutive and rise.
            epoch: Chooses what is random.
        """
        ...

    def close(self) -> None:
        """End the processes that read ahead, if there are any."""
        ...


class Reader(Protocol):
    """Reads the samples of one part of a large set, one by one, in any process.

    Must be picklable, and open its files in the process that reads them, when it first
    reads: a file that two processes share has one position for both.
    """

    def __len__(self) -> int:
        """Return the number of samples."""
        ...

    def read(self, index: int, uniform: npt.NDArray[np.float64] | None) -> Any:
        """Return sample number `index`: (image uint8 `(C, H, W)`, label).

        Args:
            index: From 0.
            uniform: Random numbers from 0 to 1 that choose how the image is cut,
                float64 `(4,)`; ``None`` to cut it the same way each time.

        Raises:
            BadSample: It cannot be read.
        """
        ...


class BadSample(DataError):
    """A sample that cannot be read, though its file was found.

    Args:
        where: File, and the place in it.
        why: What is wrong with it.
    """

    def __init__(self, where: str, why: str) -> None:
        super().__init__(
            f"{where}: {why}.\nMend or remove it, or leave such samples out and have "
            "them counted: --on-bad-sample skip"
        )
        self.where = where
        self.why = why

    def __reduce__(self) -> tuple[Any, ...]:  # through a worker's queue
        return type(self), (self.where, self.why)
