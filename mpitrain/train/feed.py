"""From a data set to a rank's share of every step, ready on its device."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from mpitrain.data.memory import InMemory
from mpitrain.data.nests import in_precision, moved, rows_of
from mpitrain.data.pixels import Pixels
from mpitrain.data.samples import Loaded, Samples
from mpitrain.data.sharding import Indices, Share
from mpitrain.data.streams import Stream
from mpitrain.world import World


@dataclass
class Batch:
    """The samples of one microstep, as the model sees them.

    There may be more rows than count: a rank whose share is used up walks along with a
    row of weight zero, since collectives need every rank and most models one sample;
    and batch norm needs two.
    """

    inputs: Any
    """`(N or more, ...)`; with partners, one row more at the front."""
    targets: Any
    """`(N or more, ...)`; likewise."""
    indices: Indices
    """Numbers of the N samples that count, int64 `(N,)`: the first rows, but for a
    partner's."""

    def __len__(self) -> int:
        """Return the number of samples that count."""
        return len(self.indices)


@dataclass
class Step:
    """One rank's part of a step."""

    number: int
    """Of its epoch, from 0; one whose samples all are missing is left out."""
    num_samples: int
    """Samples on all ranks together."""
    num_microsteps: int
    """Equal on all ranks."""
    microsteps: Iterable[Batch]
    """To be taken in order, and to the end, before the next step."""


class Feed:
    """Hands a rank its share of a set, step by step.

    Args:
        samples: The set.
        world: Where this process stands.
        pixels: What is done to images.
        least_rows: Rows that a batch must have: 2 for batch norm.

    Attributes:
        skipped: In words, each sample that was left out by this rank.
        num_parts: Into how many parts the set is cut that ranks read; 0: into none.
        taken: How many samples of each part this rank has had since somebody cleared
            it.
    """

    def __init__(
        self,
        samples: Samples,
        world: World,
        pixels: Pixels,
        *,
        least_rows: int = 1,
    ) -> None:
        self.samples = samples
        self.skipped: list[str] = []
        self.num_parts = 0
        self.taken: Counter[int] = Counter()
        self._world = world
        self._pixels = pixels
        self._least_rows = least_rows
        self._example: Loaded | None = None
        # Counts travel through host memory; where NCCL alone carries, through the GPU.
        in_host_memory = world.device == "cpu" or "cpu:" in world.backend
        self._count_device = "cpu" if in_host_memory else world.device

    def example(self) -> Batch:
        """Return a batch of one sample, which does not count; local."""
        nothing = Loaded(None, None, np.zeros(0, np.int64))
        return self._ready(nothing, with_partner=False, epoch=0)

    def steps(self, share: Share, epoch: int) -> Iterator[Step]:
        """Yield this rank's part of every step.

        Collective over the default group, where the set may lack samples.

        Args:
            share: What this rank takes.
            epoch: Chooses what is random.
        """
        if self.samples.may_lack:
            loaded = self.samples.batches(share, epoch)
            yield from self._agreed(share, loaded, epoch)
            return
        if isinstance(self.samples, InMemory):
            yield from self._from_memory(self.samples, share, epoch)
            return
        loaded = self.samples.batches(share, epoch)
        for number, (num_samples, microsteps) in _numbered(share):
            yield Step(
                number,
                num_samples,
                len(microsteps),
                (
                    self._ready(next(loaded), share.with_partner, epoch)
                    for _ in microsteps
                ),
            )

    def _from_memory(
        self, samples: InMemory, share: Share, epoch: int
    ) -> Iterator[Step]:
        """Yield steps whose samples are at hand.

        Small batches are made ready many at once: each costs some kernels, however
        small it is.
        """
        steps, ahead = itertools.tee(share.steps())
        batches = self._joined(samples, ahead, share.with_partner, epoch)
        for number, (num_samples, microsteps) in enumerate(steps, share.first_step):
            num = len(microsteps)
            yield Step(number, num_samples, num, itertools.islice(batches, num))

    def _joined(
        self,
        samples: InMemory,
        steps: Iterable[tuple[int, list[Indices]]],
        with_partner: bool,
        epoch: int,
    ) -> Iterator[Batch]:
        asked = (rows for _, microsteps in steps for rows in microsteps)
        first = self._first().inputs[0]
        for group in samples.groups(asked, first.numel() * first.element_size()):
            whole = self._prepared(samples.batch(np.concatenate(group)), epoch)
            start = 0
            for rows in group:
                stop = start + len(rows)
                part = Loaded(whole.inputs[start:stop], whole.targets[start:stop], rows)
                yield self._filled(part, with_partner)
                start = stop

    def _agreed(
        self, share: Share, loaded: Iterator[Loaded], epoch: int
    ) -> Iterator[Step]:
        """Yield steps whose size only reading tells.

        Each is read one ahead, and its size is added up over the ranks while the one
        before is computed: nobody waits for it.
        """
        self.num_parts = 0
        self.taken.clear()
        if isinstance(self.samples, Stream):
            self.num_parts = self.samples.num_parts(share)
        ahead = self._read(share, loaded)
        now = next(ahead, None)
        for number in itertools.count(share.first_step):
            if now is None:
                return
            batches, total = now
            following = next(ahead, None)
            num_samples = total()
            for batch in batches:
                self.skipped += batch.skipped
                if self.num_parts:
                    self.taken.update((batch.indices % self.num_parts).tolist())
            if num_samples:
                ready = (
                    self._ready(batch, share.with_partner, epoch) for batch in batches
                )
                yield Step(number, num_samples, len(batches), ready)
            elif share.order is None:  # all ranks are dry
                if following is not None:
                    following[1]()
                return
            now = following

    def _read(
        self, share: Share, loaded: Iterator[Loaded]
    ) -> Iterator[tuple[list[Loaded], Callable[[], int]]]:
        """Yield each step's batches, and what waits for its size."""
        for _, microsteps in share.steps():
            batches = [next(loaded) for _ in microsteps]
            count = torch.tensor(
                sum(len(batch.indices) for batch in batches),
                device=self._count_device,
            )
            work = dist.all_reduce(count, async_op=True)

            def total(count: Tensor = count, work: Any = work) -> int:
                work.wait()
                return int(count)

            yield batches, total

    def _ready(self, loaded: Loaded, with_partner: bool, epoch: int) -> Batch:
        """Bring a batch to the device; fill it up where rows are missing."""
        if len(loaded.indices):
            loaded = self._prepared(loaded, epoch)
        return self._filled(loaded, with_partner)

    def _prepared(self, loaded: Loaded, epoch: int) -> Loaded:
        """Bring samples to the device, as the model sees them."""
        dtype = self._pixels.dtype
        inputs, targets = (moved(it, self._world.device) for it in loaded[:2])
        if isinstance(inputs, Tensor):
            inputs = self._pixels(inputs, loaded.indices, epoch)
        else:
            inputs = in_precision(inputs, dtype)
        return Loaded(inputs, in_precision(targets, dtype), loaded.indices)

    def _first(self) -> Loaded:
        """Return the first sample, as the model sees it."""
        if self._example is None:
            self._example = self._prepared(self.samples.example(), epoch=0)
        return self._example

    def _filled(self, loaded: Loaded, with_partner: bool) -> Batch:
        """Return a batch with as many rows as it must have."""
        indices = loaded.indices[1:] if with_partner else loaded.indices
        num, least = len(loaded.indices), self._least_rows + with_partner
        if num >= least:
            return Batch(loaded.inputs, loaded.targets, indices)
        if not num:
            loaded = self._first()
        chosen = torch.arange(least).clamp_(max=len(loaded.indices) - 1)
        inputs, targets = (rows_of(it, chosen) for it in loaded[:2])
        return Batch(inputs, targets, indices)


def _numbered(share: Share) -> Iterator[tuple[int, tuple[int, list[Indices]]]]:
    return enumerate(share.steps(), share.first_step)
