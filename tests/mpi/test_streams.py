"""Samples that come one after another, shared out at any number of ranks."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, get_worker_info

from mpitrain.data.custom import Samples, build_samples
from mpitrain.data.iterable import IterableStyle
from mpitrain.data.loader import BatchLoader
from mpitrain.data.sharding import RankShard
from mpitrain.errors import DataError
from mpitrain.mpi.shared_arrays import communicator
from mpitrain.mpi.world import World
from mpitrain.tasks.image_classification.transforms import ImageTransform

pytestmark = pytest.mark.mpi

Sample = tuple[Tensor, int]
BATCH_SIZE = 5


class Numbers(IterableDataset[Sample]):
    """0, 1, 2 ... as inputs and as targets."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Iterator[Sample]:
        for number in range(self.size):
            yield torch.tensor([number]), number


class OfServer(Numbers):
    """Tells whether the process that a worker was forked off knows torch."""

    def __iter__(self) -> Iterator[Sample]:
        mapped = Path(f"/proc/{os.getppid()}/maps").read_text()
        for _ in range(self.size):
            yield torch.tensor([os.getppid()]), int("libtorch" in mapped)


class Part:
    """What `Shards.shard` returns: told of its epoch, too, or a plain list."""

    def __init__(self, numbers: list[int]) -> None:
        self.numbers = numbers

    def __iter__(self) -> Iterator[Sample]:
        for number in self.numbers:
            yield torch.tensor([number]), number


class Shards(Numbers):
    """The same, cut into one part that has half of it, and others."""

    def shard(self, num_shards: int, index: int) -> Part:
        half = self.size // 2 if num_shards > 1 else self.size
        if index == 0:
            return Part(list(range(half)))
        return Part(list(range(half + index - 1, self.size, num_shards - 1)))


def samples_of(dataset: Any, world: World, num_workers: int = 0) -> Samples:
    return build_samples(
        dataset,
        "the training data",
        seed=3,
        world=world,
        ranks=communicator(world),
        num_workers=num_workers,
    )


def alone_of(batch_size: int) -> RankShard:
    return RankShard(rank=0, world_size=1, global_batch_size=batch_size)


def steps_of(
    samples: Samples,
    world: World,
    *,
    epoch: int = 1,
    micro_batch_size: int | None = None,
) -> list[tuple[int, list[int], list[float]]]:
    """Each step's size as all ranks are told it, and what they have of it, together."""
    pixels = ImageTransform(dtype=torch.float64, seed=3)
    share = RankShard(
        rank=world.rank,
        world_size=world.world_size,
        global_batch_size=BATCH_SIZE,
        micro_batch_size=micro_batch_size,
    )
    mine = []
    loader = BatchLoader(samples, world, pixels, dtype=torch.float64)
    for step in loader.steps(share, epoch):
        targets: list[int] = []
        inputs: list[float] = []
        num_micro_batches = 0
        for batch in step.micro_batches:
            num_micro_batches += 1
            assert len(batch.inputs) >= 1  # whoever has none walks along
            targets += batch.targets[: len(batch)].tolist()
            inputs += batch.inputs[: len(batch), -1].tolist()
            assert isinstance(batch.indices, np.ndarray)
            assert len(set(batch.indices.tolist())) == len(batch)
        mine.append((step.num_samples, num_micro_batches, targets, inputs))
    by_rank = communicator(world).allgather(mine)
    steps = []
    for of_step in zip(*by_rank, strict=True):  # as many steps on every rank
        assert len({(size, micro_batches) for size, micro_batches, *_ in of_step}) == 1
        targets = [number for *_, found, _ in of_step for number in found]
        inputs = [number for *_, found in of_step for number in found]
        assert len(targets) == of_step[0][0]
        steps.append((len(targets), targets, inputs))
    return steps


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("micro_batch_size", [None, 1, 2])
def test_the_nth_sample_belongs_to_the_same_step_at_any_size(
    world: World, num_workers: int, micro_batch_size: int | None
) -> None:
    for size in (1, 4, 5, 10, 13) if num_workers == 0 else (1, 13):
        samples = samples_of(Numbers(size), world, num_workers)
        assert samples.num_samples is None
        for epoch in (1, 2):
            steps = steps_of(
                samples, world, epoch=epoch, micro_batch_size=micro_batch_size
            )
            expected = [
                list(range(size))[start : start + BATCH_SIZE]
                for start in range(0, size, BATCH_SIZE)
            ]
            assert [targets for _, targets, _ in steps] == expected


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("micro_batch_size", [None, 2])
@pytest.mark.parametrize("size", [1, 3, 23])
def test_parts_of_any_length_are_read_to_their_ends(
    world: World, num_workers: int, micro_batch_size: int | None, size: int
) -> None:
    samples = samples_of(Shards(size), world, num_workers)
    for epoch in (1, 2):
        steps = steps_of(samples, world, epoch=epoch, micro_batch_size=micro_batch_size)
        seen = [number for _, targets, _ in steps for number in targets]
        assert sorted(seen) == list(range(size))


class SplitByWorker(Numbers):
    """Shares itself out among the workers, as torch's documentation shows."""

    def __iter__(self) -> Iterator[Sample]:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        for number in range(first, self.size, step):
            yield torch.tensor([number]), number


class SplitByWorkerInShards(SplitByWorker):
    def __init__(self, numbers: range) -> None:
        self.numbers = numbers

    def __iter__(self) -> Iterator[Sample]:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        for number in self.numbers[first::step]:
            yield torch.tensor([number]), number

    def shard(self, num_shards: int, index: int) -> SplitByWorkerInShards:
        return SplitByWorkerInShards(self.numbers[index::num_shards])


@pytest.mark.parametrize(
    "dataset", [SplitByWorker(13), SplitByWorkerInShards(range(13))]
)
def test_a_stream_that_shares_itself_out_among_workers_loses_nothing(
    world: World, dataset: Any
) -> None:
    steps = steps_of(samples_of(dataset, world, num_workers=2), world)
    seen = [number for _, targets, _ in steps for number in targets]
    assert sorted(seen) == list(range(13))


class Shuffled(Numbers):
    """Shuffles itself by the epoch, and adds noise from all three generators."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def __iter__(self) -> Iterator[Sample]:
        numbers = list(range(self.size))
        random.Random(self.epoch).shuffle(numbers)
        random.shuffle(numbers)
        for number in numbers:
            noise = random.random() + np.random.random() + float(torch.rand(()))
            yield torch.tensor([number, noise]), number


@pytest.mark.parametrize("num_workers", [0, 2])
def test_what_a_stream_draws_is_the_same_at_any_size(
    world: World, num_workers: int
) -> None:
    before = random.getstate()
    samples = samples_of(Shuffled(13), world, num_workers)
    found = [steps_of(samples, world, epoch=epoch) for epoch in (1, 2)]
    assert random.getstate() == before
    assert found[0] != found[1]
    for epoch, steps in enumerate(found, start=1):
        dataset = Shuffled(13)
        alone = IterableStyle(dataset, seed=3).batches(alone_of(13), epoch)
        inputs, targets, *_ = next(alone)
        assert [number for _, part, _ in steps for number in part] == targets.tolist()
        noises = [noise for *_, part in steps for noise in part]
        assert noises == inputs[:, 1].tolist()


class EpochsOfShards(Numbers):
    """Gives its parts as plain lists, in the order of the epoch."""

    epoch = -1

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def shard(self, num_shards: int, index: int) -> list[Sample]:
        numbers = [10 * n + self.epoch for n in range(index, self.size, num_shards)]
        return [(torch.tensor([number]), number) for number in numbers]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stream_knows_its_epoch_before_it_is_cut(
    world: World, num_workers: int
) -> None:
    samples = samples_of(EpochsOfShards(13), world, num_workers)
    for epoch in (1, 2):
        steps = steps_of(samples, world, epoch=epoch)
        seen = [number for _, targets, _ in steps for number in targets]
        assert sorted(seen) == [10 * n + epoch for n in range(13)]


class NoisyShards(Numbers):
    """Its parts draw as they are read."""

    def shard(self, num_shards: int, index: int) -> NoisyPart:
        return NoisyPart(range(index, self.size, num_shards))


class NoisyPart:
    def __init__(self, numbers: range) -> None:
        self.numbers = numbers

    def __iter__(self) -> Iterator[Sample]:
        for number in self.numbers:
            yield torch.rand(1, dtype=torch.float64), number


@pytest.mark.parametrize("num_workers", [0, 2])
def test_no_two_samples_of_a_cut_stream_draw_the_same(
    world: World, num_workers: int
) -> None:
    steps = steps_of(samples_of(NoisyShards(40), world, num_workers), world)
    noises = [noise for *_, part in steps for noise in part]
    assert len(set(noises)) == 40


def test_a_stream_may_say_its_length(world: World) -> None:
    class Sized(Numbers):
        def __len__(self) -> int:
            return self.size

    steps = steps_of(samples_of(Sized(13), world), world)
    assert [number for _, part, _ in steps for number in part] == list(range(13))


def test_a_stream_that_shares_itself_out_among_ranks_is_refused(world: World) -> None:
    class Split(Numbers):
        def __iter__(self) -> Iterator[Sample]:
            for number in range(world.rank, self.size, world.world_size):
                yield torch.tensor([number]), number

    if world.world_size == 1:
        assert len(steps_of(samples_of(Split(13), world), world)) == 3
        return
    with pytest.raises(DataError) as caught:
        samples_of(Split(13), world)
    said = str(caught.value)
    assert said.startswith("the first sample of the training data differs between rank")
    assert "shard(num_shards, index)" in said
    assert len(said) < 400
    assert (caught.value.reporting_rank, caught.value.is_collective) == (0, True)


def test_a_stream_without_samples_is_refused(world: World) -> None:
    with pytest.raises(DataError, match="the stream 'Numbers' has no samples"):
        samples_of(Numbers(0), world)


@pytest.mark.parametrize("kind", ["generator", "map", "zip"])
def test_what_can_be_read_but_once_is_refused(world: World, kind: str) -> None:
    made = {
        "generator": (sample for sample in Numbers(3)),
        "map": map(tuple, Numbers(3)),
        "zip": zip(torch.zeros(3, 1), range(3), strict=True),
    }
    with pytest.raises(DataError, match=f"'{kind}'.* read only once"):
        samples_of(made[kind], world)


def test_an_error_in_a_stream_comes_out_where_it_is_read(world: World) -> None:
    class Broken(Numbers):
        def __iter__(self) -> Iterator[Sample]:
            yield from super().__iter__()
            raise ArithmeticError("this is the fault")

    samples = samples_of(Broken(7), world)
    with pytest.raises(ArithmeticError, match="this is the fault"):
        list(itertools.islice(samples.batches(alone_of(5), 1), 2))


@pytest.mark.parametrize("kind", ["stream", "map-style"])
def test_torch_does_not_tell_every_rank_that_workers_outnumber_cores(
    world: World, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Warnings are errors here."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0})
    dataset = Numbers(3) if kind == "stream" else list(Numbers(3))
    samples = samples_of(dataset, world, num_workers=2)
    assert len(next(samples.batches(alone_of(3), 1)).indices) == 3
    samples.close()


def test_workers_of_a_fork_server_need_not_import_torch(world: World) -> None:
    if world.rank:
        return  # one such server is enough
    stream = IterableStyle(OfServer(4), seed=3, num_workers=1, method="forkserver")
    inputs, targets, *_ = next(stream.batches(alone_of(4), 1))
    assert inputs.unique().tolist() != [os.getpid()]
    assert targets.tolist() == [1] * 4


def test_samples_that_are_no_pairs_are_whole_batches(world: World) -> None:
    class Single(Numbers):
        def __iter__(self) -> Iterator[Any]:
            for number in range(self.size):
                yield torch.tensor([number])

    found = samples_of(Single(3), world).example(num_rows=2)
    assert (found.inputs.tolist(), found.targets) == ([[0], [0]], None)


class Placed(Numbers):
    """Knows its place, as a whole and cut into shards; counts what is read."""

    num_read = 0

    def __init__(self, size: int, *, is_cut: bool, part: tuple[int, int] = (1, 0)):
        super().__init__(size)
        self.part, self.start, self.at = part, 0, 0
        if is_cut:
            self.shard = self._shard

    def _shard(self, num_shards: int, index: int) -> Placed:
        return Placed(self.size, is_cut=True, part=(num_shards, index))

    def __iter__(self) -> Iterator[Sample]:
        self.at, self.start = self.start, 0
        num_shards, index = self.part
        for number in range(self.size)[index::num_shards][self.at :]:
            self.at += 1
            Placed.num_read += 1
            yield torch.tensor([number]), number

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["at"]


def read_by(
    dataset: Placed, num_ranks: int, max_steps: int | None, **before: Any
) -> tuple[list[int], dict[int, Any], tuple[int, ...]]:
    """What so many ranks read: numbers, places, and how many of each rank's shard."""
    numbers, places = list[int](), dict(before.get("places", {}))
    for rank in range(num_ranks):
        samples = IterableStyle(dataset, seed=1)
        shard = RankShard(
            rank=rank,
            world_size=num_ranks,
            global_batch_size=BATCH_SIZE,
            max_steps=max_steps,
            **before,
        )
        for batch in samples.batches(shard, 1):
            if not len(batch.indices) and max_steps is None:
                break
            numbers += batch.indices.tolist()
            if batch.place is not None:
                index, place = batch.place
                known = places.get(index, place)
                places[index] = max(known, place, key=lambda it: it.num_read)
    counts = [sum(n % num_ranks == rank for n in numbers) for rank in range(num_ranks)]
    return numbers, places, tuple(counts)


@pytest.mark.parametrize("ranks", [(1, 1), (1, 3), (3, 2), (2, 5)], ids=str)
@pytest.mark.parametrize("is_cut", [False, True])
def test_places_are_for_any_number_of_ranks(
    ranks: tuple[int, int], is_cut: bool
) -> None:
    size, done = 203, 30
    dataset = Placed(size, is_cut=is_cut)
    first, places, counts = read_by(dataset, ranks[0], done)
    before: dict[str, Any] = {"first_step": done, "places": places}
    if is_cut:
        before["samples_read_per_shard"] = counts
    Placed.num_read = 0
    second, *_ = read_by(dataset, ranks[1], None, **before)
    assert sorted(first + second) == list(range(size))
    num_readers = 1 if is_cut else ranks[1]
    assert Placed.num_read <= num_readers * (size - done * BATCH_SIZE + BATCH_SIZE)


class Bordered(Placed):
    """Large arrays that differ in the middle alone; its place is one sample late."""

    def __iter__(self) -> Iterator[Any]:
        for _, number in super().__iter__():
            image = np.zeros((40, 40))
            image[20, 20] = number
            yield image, 0

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["at"] + 1


def test_a_wrong_place_is_noticed_by_any_number_of_an_array() -> None:
    batches = IterableStyle(Bordered(12, is_cut=False), seed=1).batches(alone_of(3), 1)
    _, expected = itertools.islice(batches, 2)
    assert expected.place is not None
    shard = replace(alone_of(3), first_step=1, places=dict([expected.place]))
    again = IterableStyle(Bordered(12, is_cut=False), seed=1)
    assert torch.equal(next(again.batches(shard, 1)).inputs, expected.inputs)
