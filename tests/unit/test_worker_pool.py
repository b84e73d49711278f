"""Workers whose number changes while they read: order, bits, and what they find."""

from __future__ import annotations

import multiprocessing
import os
import signal
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from single_process import LONE
from torch import Tensor

from mpitrain.data import worker_pool
from mpitrain.data.map_style import MapStyle
from mpitrain.data.samples import LoadedBatch
from mpitrain.data.sharding import RankShard
from mpitrain.data.worker_pool import WorkerPool
from mpitrain.data.worker_tuner import Reading, WorkerTuner
from mpitrain.data.workers import StartMethod
from mpitrain.errors import DataError

NUM_STEPS = 30
NUMBERS = (0, 1, 4, 2, 7, 0, 3)  # of workers, one after another


class Noise:
    """Samples with noise, which each takes some seconds to wait for, and on a core."""

    def __init__(self, latency: float = 0.0, decode: float = 0.0) -> None:
        self.latency, self.decode = latency, decode

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        time.sleep(self.latency)
        end = time.thread_time() + self.decode
        while time.thread_time() < end:
            pass
        return torch.rand(3) + index, os.getpid()


class Scripted(WorkerTuner):
    """Changes the number of workers every few steps, whatever they take."""

    def __init__(self) -> None:
        super().__init__(0, 8)
        self.num_steps = 0
        self.seen: list[int] = []

    def add(self, waited: float, seconds: float, num_batches: int = 1) -> bool:
        self.num_steps += 1
        number = NUMBERS[self.num_steps // 4 % len(NUMBERS)]
        before, self.reading = self.reading, Reading(number, 1 + self.num_steps % 3)
        return self.reading != before


def shard(num_steps: int = NUM_STEPS, micro_batch_size: int | None = 2) -> RankShard:
    return RankShard(
        rank=0,
        world_size=1,
        global_batch_size=6,
        micro_batch_size=micro_batch_size,
        order=np.arange(6 * num_steps, dtype=np.int64)[::-1],
    )


def read(samples: MapStyle, epochs: int = 2) -> list[LoadedBatch]:
    return [it for epoch in range(epochs) for it in samples.batches(shard(), 1 + epoch)]


def pool_of(samples: MapStyle) -> Any:
    for _ in samples.batches(shard(1), 1):
        pass
    return samples._loader


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_order_and_bits_do_not_depend_on_the_number_of_workers(
    method: StartMethod,
) -> None:
    expected = read(MapStyle(Noise(), seed=1))
    samples = MapStyle(Noise(), seed=1, num_workers="auto", world=LONE, method=method)
    pool_of(samples).tuner = Scripted()
    found = read(samples)
    samples.close()
    processes = {int(pid) for batch in found for pid in batch.targets}
    assert os.getpid() in processes
    assert len(processes) >= 1 + max(NUMBERS)
    for one, other in zip(found, expected, strict=True):
        assert one.indices.tolist() == other.indices.tolist()
        assert torch.equal(one.inputs, other.inputs)


def test_the_number_changes_between_two_steps_only() -> None:
    samples = MapStyle(Noise(), seed=1, num_workers="auto", world=LONE)
    pool = pool_of(samples)
    pool.tuner = Scripted()
    before: list[Any] = []
    changed_at = set()
    for number, _ in enumerate(samples.batches(shard(), 1)):
        if pool._workers != before:
            changed_at.add(number % 3)
        before = list(pool._workers)
    samples.close()
    assert changed_at == {0}


@pytest.mark.parametrize("num_batches", [4, 40, 68])  # 0, 2 and 0 workers
def test_an_epoch_may_be_left_in_its_middle(num_batches: int) -> None:
    samples = MapStyle(Noise(), seed=1, num_workers="auto", world=LONE)
    pool_of(samples).tuner = Scripted()
    for number, _ in enumerate(samples.batches(shard(), 1)):
        if number == num_batches:
            break
    pool: Any = samples._loader
    assert len(pool._workers) == (2 if num_batches == 40 else 0)
    found = list(samples.batches(shard(), 2))
    samples.close()
    expected = list(MapStyle(Noise(), seed=1).batches(shard(), 2))
    for one, other in zip(found, expected, strict=True):
        assert torch.equal(one.inputs, other.inputs)


# Torch raises in a handler of SIGCHLD; in a `__del__`, perhaps, where it is ignored.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_a_worker_that_is_killed_while_the_number_changes_is_an_error(
    method: StartMethod,
) -> None:
    samples = MapStyle(Noise(), seed=1, num_workers="auto", world=LONE, method=method)
    pool_of(samples).tuner = Scripted()
    seen: set[int] = set()

    def read_and_kill() -> None:
        for batch in samples.batches(shard(), 1):
            seen.update(batch.targets.tolist())
            if len(seen) == 4:
                os.kill(max(seen - {os.getpid()}), signal.SIGKILL)

    begin = time.monotonic()
    with pytest.raises((DataError, RuntimeError), match="killed"):
        read_and_kill()
    samples.close()
    assert (
        time.monotonic() - begin < 20
    )  # on a busy machine; ten for each worker before
    assert {it.pid for it in multiprocessing.active_children()}.isdisjoint(seen)


class Broken(Noise):
    def __getitem__(self, index: int) -> Any:
        raise OSError("this is the fault")


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_of_the_data_set_is_no_killed_worker(num_workers: int) -> None:
    world = replace(LONE, num_cores=1 + num_workers)
    samples = MapStyle(Broken(), seed=1, num_workers="auto", world=world)
    with pytest.raises(OSError, match="this is the fault"):
        next(samples.batches(shard(), 1))
    samples.close()


def test_as_many_batches_are_ahead_as_shared_memory_has_room_for(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    samples = MapStyle(Noise(), seed=1, num_workers="auto", world=LONE)
    pool: WorkerPool = pool_of(samples)
    batch = LoadedBatch(torch.zeros(1 << 20), torch.zeros(10), np.arange(1))
    found = os.statvfs("/dev/shm")
    free = found.f_bavail * found.f_frsize
    assert pool._max_batches(batch) == pytest.approx(free / 2 / (1 << 22), rel=0.1)
    monkeypatch.setattr(worker_pool, "SHARED_MEMORY", "/nowhere")
    assert pool._max_batches(batch) == float("inf")
