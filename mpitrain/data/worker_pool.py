"""Workers whose number changes between two steps: those of `--num-workers auto`.

A `DataLoader` cannot change its number of workers. So here each worker is the only one
of a DataLoader of its own. Batches are given to the workers in turn, and taken in the
order in which they were given. A worker too many is given none any more, and ends when
the last of its batches was taken. What is in a batch depends on none of that.
"""

from __future__ import annotations

import logging
import math
import os
import signal
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from torch import Tensor

from mpitrain.console import say
from mpitrain.data.samples import LoadedBatch, leaves_of
from mpitrain.data.worker_tuner import MAX_PREFETCH, WorkerTuner
from mpitrain.data.workers import (
    StartMethod,
    build_loader,
    deaths_named,
    next_batch,
    worker_context,
)
from mpitrain.launch.cpu import cores_for_workers
from mpitrain.mpi.world import World
from mpitrain.torch_compat import end_workers, request_batch

logger = logging.getLogger("mpitrain")

Keys = list[tuple[int, int]]
"""What a worker is given to read: (epoch, index) of each sample of a batch."""

MIN_WORKERS = 8  # that a rank may have for files that are waited for, on any cores
MEMORY_FRACTION = 0.5  # of what is free for batches, on all ranks of a node
SHARED_MEMORY = "/dev/shm"  # where workers write batches
NOTABLE = 0.05  # of the time waited for samples: worth to say what is missing


class _Given(deque[Keys]):
    """A batch sampler that has a batch when one was given, and may be asked again."""

    def __iter__(self) -> Iterator[Keys]:
        return self

    def __next__(self) -> Keys:
        if not self:
            raise StopIteration
        return self.popleft()


class _Worker:
    """Reads batches in a process of its own; without ``num_workers`` in this one."""

    def __init__(self, dataset: Any, options: Mapping[str, Any]) -> None:
        self._given = _Given()
        self._loader = build_loader(dataset, batch_sampler=self._given, **options)
        self.begin()

    def begin(self) -> None:
        """Begin an epoch; batches of another are forgotten."""
        self._given.clear()
        with deaths_named(self._loader.num_workers):
            self._batches = iter(self._loader)

    def end(self) -> None:
        if self._loader.num_workers:
            end_workers(self._batches)

    def give(self, keys: Keys) -> None:
        self._given.append(keys)
        if self._loader.num_workers:
            request_batch(self._batches)

    def take(self) -> Any:
        return next_batch(self._loader, self._batches)


class WorkerPool:
    """Reads batches by as many workers as a `WorkerTuner` says; local to a rank.

    ``options`` are further ones of `DataLoader`.
    """

    def __init__(
        self, dataset: Any, world: World, method: StartMethod, **options: Any
    ) -> None:
        self._dataset, self._world = dataset, world
        self._options = options | {
            "num_workers": 1,
            "persistent_workers": True,
            "multiprocessing_context": worker_context(method),
            "prefetch_factor": 2 * MAX_PREFETCH,  # more than it is given at any time
        }
        num = world.num_cores
        self._most = max(MIN_WORKERS, 2 * num)
        # The first try leaves the rank a core.
        self.tuner = WorkerTuner(min(MIN_WORKERS, num - 1), self._most)
        self._rank = _Worker(dataset, options)
        self._given = deque[tuple[_Worker, Keys, list[Keys]]]()
        self._workers: list[_Worker] = []
        self._turn = 0

    def batches(
        self, steps: Iterable[list[Keys]], *, is_training: bool
    ) -> Iterator[LoadedBatch]:
        """Yield the batches of some steps; in training the log says what is found."""
        asked = ((keys, step) for step in steps for keys in step)
        self._given.clear()
        for each in (self._rank, *self._workers):
            each.begin()
        self._resize()
        since, waited = None, 0.0
        while True:
            self._give(asked)
            if not self._given:
                return
            worker, keys, step = self._given.popleft()
            before = time.perf_counter()
            batch = worker.take()
            waited += time.perf_counter() - before
            self._give(asked)  # before the step: they work meanwhile
            yield batch
            if keys is not step[-1]:  # a time is from one step's end to the next one's
                continue
            now = time.perf_counter()
            if since is not None and not self.tuner.is_done:
                self.tuner.max_batches = self._max_batches(batch)
                if self.tuner.add(waited, now - since, len(step)):
                    self._resize()
                if self.tuner.is_done and is_training:
                    logger.info("%s", found := self._found())
                    if self._world.is_rank_zero:
                        say(found)
            since, waited = now, 0.0

    def close(self) -> None:
        """End the workers, also where one was killed: its error may hold the others."""
        # Torch's handler of SIGCHLD would raise about that one again, in the middle of
        # the end of each of the others, which then takes ten seconds.
        is_main = threading.current_thread() is threading.main_thread()
        handler = signal.signal(signal.SIGCHLD, signal.SIG_DFL) if is_main else None
        try:
            for worker in (*self._workers, *(it[0] for it in self._given)):
                worker.end()
        finally:
            if handler is not None:
                signal.signal(signal.SIGCHLD, handler)
        self._workers = []

    def _give(self, asked: Iterator[tuple[Keys, list[Keys]]]) -> None:
        """Give batches to the workers in turn, until enough are ahead."""
        workers = self._workers or [self._rank]
        num = len(self._workers) * self.tuner.reading.prefetch
        while len(self._given) < max(1, num) and (found := next(asked, None)):
            worker = workers[self._turn % len(workers)]
            self._turn += 1
            worker.give(found[0])
            self._given.append((worker, *found))

    def _resize(self) -> None:
        num = self.tuner.reading.num_workers
        while len(self._workers) < num:
            self._workers.append(_Worker(self._dataset, self._options))
        del self._workers[num:]  # one ends when its last batch has been taken

    def _max_batches(self, batch: LoadedBatch) -> float:
        """Return how many batches may be ahead: they lie in shared memory."""
        tensors = (it for it in leaves_of(batch[:2]) if isinstance(it, Tensor))
        try:
            found = os.statvfs(SHARED_MEMORY)
        except OSError:
            return math.inf
        free = MEMORY_FRACTION * found.f_bavail * found.f_frsize
        num_bytes = sum(it.nbytes for it in tensors)
        return free / self._world.local_world_size / max(1, num_bytes)

    def _found(self) -> str:
        """Say what the search has found, and what limits it."""
        (num, prefetch), waited = self.tuner.reading, self.tuner.waited
        text = f"--num-workers auto: {num} on rank {self._world.rank}, prefetch "
        text += f"{prefetch}; steps wait {100 * waited:.0f} % of the time for samples"
        if waited < NOTABLE:
            return text
        is_end = num == self._most or (num + 1) * prefetch > self.tuner.max_batches
        more = "more are not tried" if is_end else "more bring nothing"
        return f"{text}, and {more}: {cores_for_workers(self._world)}"
