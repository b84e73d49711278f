"""Map-style data sets: what cannot be read is named, or left out and counted."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from data_files import write_folder
from torch import Tensor

from mpitrain.data.map_style import MapStyle
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
