"""The embedded digits, and which rank sees which sample."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np
import pytest
import torch
from single_process import LONE, lone_communicator

from mpitrain.config import DataConfig
from mpitrain.data import sharding
from mpitrain.errors import DataError, UsageError
from mpitrain.plugins import call_with_known, load_reference
from mpitrain.tasks.image_classification import datasets
from mpitrain.tasks.image_classification.datasets.named import (
    InMemory,
    digits,
    load_data,
)

FOLDER = Path(datasets.__file__).parent / "digits"


def test_the_digits_are_the_real_ones() -> None:
    data = digits()
    assert isinstance(data.train, InMemory)
    assert isinstance(data.val, InMemory)
    assert (len(data.train), len(data.val)) == (1437, 360)
    images = torch.cat([data.train.inputs, data.val.inputs])
    labels = torch.cat([data.train.targets, data.val.targets])
    assert images.shape == (1797, 1, 8, 8)
    assert (images.min(), images.max()) == (0.0, 1.0)
    counts = [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert torch.bincount(labels).tolist() == counts
    # Of all pixels in the original order, as scikit-learn 1.9 ships them.
    with np.load(FOLDER / "digits.npz") as arrays:
        original = arrays["images"].tobytes() + arrays["labels"].tobytes()
    assert hashlib.sha256(original).hexdigest() == DIGEST


DIGEST = "87ff0c9e40dc7e2c0e34e7257799c2e3f3aec1a016363bb11cad869ec428a826"


def test_the_split_is_that_of_the_seed_in_the_file() -> None:
    with np.load(FOLDER / "digits.npz") as arrays:
        generator = np.random.Generator(np.random.PCG64(int(arrays["split_seed"])))
        expected = generator.permutation(1797)
        np.testing.assert_array_equal(arrays["permutation"], expected)


@pytest.mark.parametrize("world_size", [1, 2, 3, 7, 64, 2000])
@pytest.mark.parametrize("global_batch_size", [1, 64, 5000])
def test_every_sample_is_in_one_shard_of_one_step(
    world_size: int, global_batch_size: int
) -> None:
    order = sharding.epoch_order(1437, seed=3, epoch=4)
    alone = sharding.RankShard(
        rank=0, world_size=1, global_batch_size=global_batch_size, order=order
    )
    steps = list(alone)
    seen = []
    for step in steps[-2:]:
        shards = [
            step[slice(*sharding.shard_bounds(len(step), r, world_size))]
            for r in range(world_size)
        ]
        np.testing.assert_array_equal(np.concatenate(shards), step)
        sizes = [len(shard) for shard in shards]
        assert max(sizes) == sharding.max_shard_size(len(step), world_size)
        assert max(sizes) - min(sizes) <= 1
        seen.append(len(step))
    np.testing.assert_array_equal(np.concatenate(steps), order)
    assert sorted(order) == list(range(1437))


@pytest.mark.parametrize("world_size", [1, 2, 3, 7, 64])
@pytest.mark.parametrize("micro_batch_size", [None, 1, 3])
@pytest.mark.parametrize("seed", range(5))
def test_shards_of_about_equal_costs_have_every_sample(
    world_size: int, micro_batch_size: int | None, seed: int
) -> None:
    random = np.random.default_rng(seed)
    costs = random.exponential(size=200) ** 2 + 1e-3
    costs[random.integers(200)] = 1e9  # larger than all others
    order = random.permutation(200)
    batches = np.split(order, np.sort(random.integers(1, 199, 9)))
    batches = [batch for batch in batches if len(batch)]
    shards = [
        list(
            sharding.RankShard(
                rank=rank,
                world_size=world_size,
                global_batch_size=1,
                micro_batch_size=micro_batch_size,
                order=order,
                batches=batches,
                costs=costs,
            ).steps()
        )
        for rank in range(world_size)
    ]
    for batch, *of_ranks in zip(batches, *shards, strict=True):
        nums, parts = zip(*of_ranks, strict=True)
        assert {*nums} == {len(batch)}
        assert len({len(part) for part in parts}) == 1  # ranks wait for each other
        rows = [np.concatenate(part) for part in parts]
        np.testing.assert_array_equal(np.concatenate(rows), batch)
        assert len(rows[0])
        of_batch = costs[batch]
        fair = of_batch.sum() / world_size + of_batch.max()
        assert max(costs[part].sum() for part in rows) <= fair * (1 + 1e-9)
        sizes = [len(micro_batch) for part in parts for micro_batch in part]
        assert max(sizes) <= (micro_batch_size or len(batch))


def test_the_order_depends_on_seed_and_epoch_alone() -> None:
    one = sharding.epoch_order(100, seed=1, epoch=1)
    np.testing.assert_array_equal(one, sharding.epoch_order(100, seed=1, epoch=1))
    assert one.tolist() != sharding.epoch_order(100, seed=1, epoch=2).tolist()
    assert one.tolist() != sharding.epoch_order(100, seed=2, epoch=1).tolist()
    assert one[:5].tolist() == [64, 9, 16, 11, 44]  # on every machine, for ever


def without_classes() -> tuple[list[int], list[int]]:
    return [1], [2]


class Unready(list):
    classes = ("a",)


def not_tensors() -> list[Unready]:
    return [Unready([("an image", 0)]), Unready([("another", 0)])]


def empty() -> tuple[list[int], list[int]]:
    return [], []


@pytest.mark.parametrize(
    ("name", "error", "words"),
    [
        ("mnist2", UsageError, "'mnist2' is not known. Did you mean 'mnist'?"),
        ("nowhere:data", UsageError, "there is no module 'nowhere'"),
        (f"{__name__}:no", UsageError, "has no callable 'no'"),
        (f"{__name__}:without_classes", DataError, "neither `classes`"),
        (f"{__name__}:empty", DataError, "has no samples"),
        (f"{__name__}:not_tensors", DataError, "'tuple'; expected a tensor"),
        (":data", UsageError, "expected package.module:callable"),
        ("builtins:len", UsageError, "wants obj"),
        ("builtins:dict", UsageError, "does not tell what it takes"),
        ("os:getcwd", DataError, "returned 'str'; expected a pair"),
    ],
)
def test_data_that_is_none_is_named(name: str, error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        load_data(DataConfig(data=name), seed=1, world=LONE, ranks=lone_communicator())


def test_a_callable_is_given_what_it_takes_by_name() -> None:
    def some(b: int, *, a: int = 0) -> tuple[int, int]:
        return a, b

    assert call_with_known(some, {"a": 1, "b": 2, "c": 3}, "--model") == (1, 2)

    def open_ended(b: int, **more: int) -> tuple[int, dict]:
        return b, more

    assert call_with_known(open_ended, {"a": 1, "b": 2}, "--model") == (2, {})


def test_an_import_error_inside_their_module_is_theirs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "theirs.py").write_text("import not_installed_anywhere\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError, match="not_installed_anywhere"):
        load_reference("theirs:x", "--model")
