"""Map-style data sets: what cannot be read is named, or left out and counted."""

from __future__ import annotations

import dataclasses
import itertools
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_files import write_folder
from test_data import LONE
from torch import Tensor
from torch.utils.data import (
    ConcatDataset,
    Dataset,
    IterableDataset,
    Subset,
    default_collate,
)

from mpitrain.data.iterable import IterableStyle
from mpitrain.data.map_style import MapStyle
from mpitrain.data.randomness import random_state
from mpitrain.data.samples import BadSample
from mpitrain.data.sharding import RankShard
from mpitrain.errors import DataError
from mpitrain.tasks.image_classification.datasets import folder
from mpitrain.tasks.image_classification.datasets.index import build_readers

SHARD = RankShard(
    rank=0, world_size=1, global_batch_size=5, order=np.arange(20, dtype=np.int64)
)


class Numbers:
    """Its sample 3 raises, and its sample 7 is smaller."""

    def __init__(self, *, raises: bool) -> None:
        self.raises = raises

    def __len__(self) -> int:
        return 20

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if self.raises and index == 3:
            raise ArithmeticError("this is the fault")
        return torch.zeros(2 if index == 7 and not self.raises else 3), index


def photos(path: Path) -> folder.FolderReader:
    """20 images, of which 4 and 5 are broken."""
    write_folder(path)
    reader = build_readers(folder.FolderReader, path, folder.scan(path), 8)["train"]
    reader.path(4).write_bytes(b"")
    reader.path(5).write_bytes(reader.path(5).read_bytes()[:-300])
    return reader


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_bad_sample_is_named_by_its_file(tmp_path: Path, num_workers: int) -> None:
    reader = photos(tmp_path)
    samples = MapStyle(reader, seed=1, num_workers=num_workers)
    with pytest.raises(BadSample, match=f"{reader.path(4)}: empty, 0 bytes"):
        list(samples.batches(SHARD, 1))
    samples.close()


@pytest.mark.parametrize("num_workers", [0, 2])
def test_bad_samples_are_left_out_and_named(tmp_path: Path, num_workers: int) -> None:
    reader = photos(tmp_path)
    samples = MapStyle(reader, seed=1, num_workers=num_workers, skip=True)
    batches = list(samples.batches(SHARD, 1))
    assert [len(batch.indices) for batch in batches] == [4, 4, 5, 5]
    assert [len(batch.inputs) for batch in batches] == [4, 4, 5, 5]
    first, second = (batch.skipped[0] for batch in batches[:2])
    assert first == f"{reader.path(4)}: empty, 0 bytes"
    assert second.startswith(f"{reader.path(5)}: cannot be decoded")
    samples.close()


def test_where_nothing_can_be_read_the_last_reason_is_told(tmp_path: Path) -> None:
    reader = photos(tmp_path)
    for index in range(20):
        reader.path(index).write_text("not an image")
    samples = MapStyle(reader, seed=1, skip=True)
    with pytest.raises(DataError, match=r"none of the first 20 .* not an image to"):
        samples.example()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_of_a_custom_set_is_raised_or_its_sample_left_out(
    num_workers: int,
) -> None:
    dataset: Any = Numbers(raises=True)
    samples = MapStyle(dataset, seed=1, num_workers=num_workers)
    with pytest.raises(ArithmeticError, match="this is the fault"):
        list(samples.batches(SHARD, 1))
    samples.close()
    samples = MapStyle(dataset, seed=1, num_workers=num_workers, skip=True)
    (skipped,) = next(iter(samples.batches(SHARD, 1))).skipped
    assert skipped == "sample 3 of Numbers: ArithmeticError('this is the fault')"
    samples.close()


@pytest.mark.parametrize("num_workers", [0, 1])
def test_a_sample_of_another_shape_is_named(num_workers: int) -> None:
    samples = MapStyle(Numbers(raises=False), seed=1, num_workers=num_workers)
    words = r"sample 5 has shapes \[\(3,\), \(\)\], sample 7 \[\(2,\), \(\)\]"
    with pytest.raises(DataError, match=words):
        list(samples.batches(SHARD, 1))
    samples.close()


@pytest.mark.parametrize(
    "make",
    [
        lambda tokens: ({"id": 0, "tokens": tokens}, 1),
        lambda tokens: ([{"tokens": tokens}, torch.zeros(2)], 1),
        lambda tokens: (0, {"tokens": tokens}),
        lambda tokens: ([*tokens], 1),
        lambda tokens: (dict.fromkeys(range(len(tokens)), tokens[:1]), 1),
    ],
)
def test_a_sample_of_another_shape_is_named_within_dicts_and_lists(make: Any) -> None:
    samples = [make(torch.zeros(5 if index < 8 else 4)) for index in range(20)]
    words = r"batch differ: sample 5 has shapes \[.*\], sample 8 \[.*Resize or crop"
    with pytest.raises(DataError, match=words):
        list(MapStyle(samples, seed=1).batches(SHARD, 1))


# --- random numbers of collate_fn -----------------------------------------------------


def noisy(samples: list[Any]) -> tuple[Tensor, Tensor]:
    """Draw from all three generators, for the batch."""
    drawn = random.random() + np.random.rand() + float(torch.rand(()))
    return torch.full((len(samples),), drawn, dtype=torch.float64), torch.zeros(1)


class Streamed(IterableDataset[Any]):
    """The numbers one after another."""

    def __iter__(self) -> Iterator[Any]:
        return iter(range(20))


def of_map_style(seed: int = 1, num_workers: Any = 0) -> MapStyle:
    dataset: Any = range(20)
    return MapStyle(dataset, seed=seed, num_workers=num_workers, collate_fn=noisy)


def of_stream(seed: int = 1, num_workers: int = 0) -> IterableStyle:
    of = Streamed()
    return IterableStyle(of, seed=seed, num_workers=num_workers, collate_fn=noisy)


def drawn(samples: Any, *, epoch: int = 1, **changes: Any) -> dict[int, float]:
    """What is drawn for each batch of fixed samples, by its first sample."""
    random.seed()
    torch.seed()
    np.random.seed()
    try:
        of_epoch = samples.batches(replace(SHARD, **changes), epoch)
        some = itertools.islice(of_epoch, 6)  # of a stream it has no end
        batches = [batch for batch in some if len(batch.indices)]
    finally:
        samples.close()
    return {int(batch.indices[0]): float(batch.inputs[0]) for batch in batches}


@pytest.mark.parametrize("make", [of_map_style, of_stream])
def test_what_collate_fn_draws_depends_on_seed_epoch_and_samples_alone(
    make: Any,
) -> None:
    order = None if make is of_stream else SHARD.order
    changes = {"order": order, "micro_batch_size": 5}
    expected = drawn(make(), **changes)
    assert list(expected) == [0, 5, 10, 15]
    assert len(set(expected.values())) == 4
    assert drawn(make(num_workers=2), **changes) == expected
    wide = changes | {"global_batch_size": 10, "world_size": 2}
    of_ranks = [drawn(make(), **wide, rank=rank) for rank in range(2)]
    assert of_ranks[0] | of_ranks[1] == expected
    for others in (drawn(make(), epoch=2, **changes), drawn(make(seed=2), **changes)):
        assert not {*others.values()} & {*expected.values()}


def test_what_collate_fn_draws_is_the_same_on_resume() -> None:
    rest = drawn(of_map_style(), first_step=2)
    assert rest.items() < drawn(of_map_style()).items()


class Noisy(IterableDataset[Any]):
    """Samples that draw, by their number or one after another."""

    def __getitem__(self, index: int) -> Any:
        return index + random.random() + np.random.random() + float(torch.rand(()))

    def __iter__(self) -> Iterator[Any]:
        return map(self.__getitem__, range(20))

    def __len__(self) -> int:
        return 20


@pytest.mark.parametrize("collate_fn", [noisy, default_collate])
@pytest.mark.parametrize("kind", ["map-style", "auto", "stream"])
def test_to_read_leaves_the_random_numbers_of_the_process(
    kind: str, collate_fn: Any
) -> None:
    options: dict[str, Any] = {"seed": 1, "collate_fn": collate_fn}
    order = SHARD.order
    if kind == "stream":
        samples: Any = IterableStyle(Noisy(), **options)
        order = None
    else:
        dataset = range(20) if collate_fn is noisy else Noisy()
        num_workers = 0 if kind == "map-style" else "auto"
        options |= {"num_workers": num_workers, "world": LONE}
        samples = MapStyle(dataset, **options)
    before = random_state()
    batches = samples.batches(replace(SHARD, order=order), 1)
    next(batches)
    samples.example()
    if kind != "stream":
        samples.read(np.arange(3), 1, 1)
    assert random_state() == before
    batches.close()
    samples.close()


@pytest.mark.parametrize(
    ("collate_fn", "draws"),
    [
        (noisy, True),
        (lambda rows: torch.randperm(len(rows)) if len(rows) > 1 else None, True),
        (torch.tensor, False),
        (default_collate, False),
    ],
)
@pytest.mark.parametrize("kind", [MapStyle, IterableStyle])
def test_a_collate_fn_that_draws_is_found(
    kind: Any, collate_fn: Any, draws: bool
) -> None:
    dataset = range(20) if kind is MapStyle else Streamed()
    before = torch.get_rng_state()
    assert kind(dataset, seed=1, collate_fn=collate_fn).collate_draws() is draws
    assert torch.equal(before, torch.get_rng_state())


TEXTS = [f"text {i}" for i in range(7)]
COLLATE_FNS: dict[str, tuple[list[Any], Any, bool]] = {  # samples, collate_fn, is pair
    "texts": (TEXTS, default_collate, False),
    "the samples": ([torch.zeros(i + 1) for i in range(7)], list, False),
    "pairs as they are": ([(torch.zeros(i + 1), i) for i in range(7)], list, False),
    "lengths": (TEXTS, lambda texts: [len(it) for it in texts], False),
    "two views": (TEXTS, lambda texts: [*texts, *texts], False),
    "a pair of each": ([(1, 2)] * 7, default_collate, True),
    "a list of two": ([[1, "a"]] * 7, default_collate, True),
    "columns": ([(1, 2)] * 7, lambda rows: tuple(zip(*rows, strict=True)), True),
    "a pair of a text": (TEXTS, lambda texts: [texts, len(texts)], True),
}


@pytest.mark.parametrize("kind", [*COLLATE_FNS])
@pytest.mark.parametrize("num_workers", [0, 1])
@pytest.mark.parametrize("is_stream", [False, True])
def test_two_samples_are_a_pair_only_if_three_are(
    kind: str, num_workers: int, is_stream: bool
) -> None:
    dataset, collate_fn, is_pair = COLLATE_FNS[kind]
    style: Any = IterableStyle if is_stream else MapStyle
    options = {"seed": 1, "num_workers": num_workers, "collate_fn": collate_fn}
    for size in (1, 2, 3) if not num_workers else (2,):
        samples = style(dataset, **options)  # in no worker anything is decided yet
        order = None if is_stream else np.arange(6, dtype=np.int64)
        shard = RankShard(
            rank=0, world_size=1, global_batch_size=size, order=order, max_steps=2
        )
        batches = [it for it in samples.batches(shard, 1) if len(it.indices)]
        samples.close()
        for number, found in enumerate(batches):
            batch = collate_fn(dataset[number * size : (number + 1) * size])
            expected = tuple(batch) if is_pair else (batch, None)
            assert repr((found.inputs, found.targets)) == repr(expected)
        assert len(batches) == 2


def test_whether_batches_are_pairs_draws_nothing_and_holds_for_all() -> None:
    samples = MapStyle([*range(8)], seed=1, collate_fn=lambda rows: torch.rand(2))
    torch.manual_seed(0)
    samples.example()
    found = torch.get_rng_state()
    torch.manual_seed(0)
    assert found.equal(torch.get_rng_state())
    odd = MapStyle([*range(8)], seed=1, collate_fn=lambda rows: (*rows[:2], *rows[4:]))
    assert odd.example(2).targets is None
    odd = MapStyle(
        [*range(8)], seed=1, collate_fn=lambda rows: [1] * (2 + (max(rows) > 1))
    )
    with pytest.raises(DataError, match=r"made list of int, int, int of 2 samples"):
        list(odd.batches(dataclasses.replace(SHARD, global_batch_size=2), 1))


class Epochs(Dataset[Any]):
    """Its samples are the epoch that it was told last."""

    def __init__(self) -> None:
        self.epoch, self.told = -1, list[int]()

    def __len__(self) -> int:
        return 20

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch
        self.told.append(epoch)

    def __getitem__(self, index: int) -> Any:
        return torch.tensor(float(self.epoch)), index


@pytest.mark.parametrize("num_workers", [0, 1, "auto"])
@pytest.mark.parametrize(
    "wrap",
    [
        lambda it: it,
        lambda it: Subset(it, range(20)),
        lambda it: ConcatDataset([Subset(it, range(20))]),
    ],
    ids=["plain", "subset", "within others"],
)
def test_the_epoch_is_told_wherever_samples_are_read(
    num_workers: Any, wrap: Any
) -> None:
    data = wrap(Epochs())
    train, val = (
        MapStyle(data, seed=1, num_workers=num_workers, world=LONE) for _ in range(2)
    )

    def epoch_of(batch: Any) -> float:
        (found,) = {*batch.inputs.tolist()}
        return float(found)

    for epoch in (1, 2):
        batches = train.batches(SHARD, epoch)
        assert epoch_of(next(batches)) == epoch
        # Between two steps, of the same set: a validation always reads epoch 0.
        assert {epoch_of(it) for it in val.batches(SHARD, 0)} == {0.0}
        assert {epoch_of(it) for it in batches} == {float(epoch)}
    train.close()
    val.close()


def test_an_epoch_is_told_once() -> None:
    data = Epochs()
    train, val = (MapStyle(Subset(data, range(20)), seed=1) for _ in range(2))
    train.example()
    train.reread_example()
    shard = dataclasses.replace(SHARD, global_batch_size=2)
    for epoch in (1, 2):
        assert len(list(train.batches(shard, epoch))) > 2
    assert data.told == [0, 1, 2]
    list(val.batches(shard, 0))
    list(train.batches(shard, 3))
    assert data.told == [0, 1, 2, 0, 3]
