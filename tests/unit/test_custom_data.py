"""Custom data sets: each is asked for its samples; what is none is refused."""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from single_process import lone_communicator
from test_data import LONE
from torch import Tensor
from torch.utils.data import (
    ChainDataset,
    ConcatDataset,
    DataLoader,
    Dataset,
    IterableDataset,
    StackDataset,
    Subset,
    TensorDataset,
)

from mpitrain.config import DataConfig
from mpitrain.data.custom import Samples, build_samples
from mpitrain.data.samples import sample_digest
from mpitrain.data.sharding import RankShard
from mpitrain.errors import DataError
from mpitrain.tasks.image_classification.datasets.named import Data, load_data

NUM = 6
ALL = RankShard(
    rank=0, world_size=1, global_batch_size=NUM, order=np.arange(NUM, dtype=np.int64)
)


def samples_of(dataset: Any) -> Samples:
    return build_samples(
        dataset, "the training data", seed=1, world=LONE, ranks=lone_communicator()
    )


def load(name: str, **how: bool) -> Data:
    config = DataConfig(data=f"{__name__}:{name}")
    return load_data(config, seed=1, world=LONE, ranks=lone_communicator(), **how)


def pairs() -> TensorDataset:
    return TensorDataset(torch.zeros(NUM, 2), torch.zeros(NUM).long())


class LeftOf(Dataset[Any]):
    """With names of classes."""

    classes: Any = ("left", "right")

    def __len__(self) -> int:
        return NUM

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.zeros(1, 2, 2), index % 2


class Stream(IterableDataset[Any]):
    """Without a length."""

    num_classes = 2

    def __iter__(self) -> Iterator[Any]:
        return iter([(torch.zeros(1, 2, 2), 0), (torch.ones(1, 2, 2), 1)])


# --- loaders --------------------------------------------------------------------------


class MyLoader(DataLoader[Any]):
    """As PyTorch Geometric's, torchdata's and accelerate's are."""


class Batches:
    """A loader that is none of torch's."""

    batch_size = 2
    collate_fn = None

    def __iter__(self) -> Iterator[Any]:
        return iter(DataLoader(pairs(), 2))


LOADERS = [
    DataLoader(pairs(), 2),
    MyLoader(pairs(), 2, shuffle=True),
    Batches(),
    Subset(DataLoader(pairs(), 2), [0]),  # type: ignore[arg-type]
    ConcatDataset([DataLoader(pairs(), 2)]),  # type: ignore[list-item]
]


@pytest.mark.parametrize("loader", LOADERS)
def test_a_loader_in_place_of_a_data_set_is_refused(loader: Any) -> None:
    words = r"(?s)the training data is a '\w+', .*batches.*loader.dataset.*--num-work"
    with pytest.raises(DataError, match=words):
        samples_of(loader)


def loaders() -> tuple[Any, Any]:
    return DataLoader(pairs(), 2), DataLoader(pairs(), 2)


def a_loader_to_test() -> tuple[Any, Any, Any]:
    train, val = LeftOf(), LeftOf()
    return train, val, DataLoader(Stream(), 2)


@pytest.mark.parametrize("name", ["loaders", "a_loader_to_test"])
def test_the_command_line_refuses_a_loader(name: str) -> None:
    with pytest.raises(DataError, match=r"pass loader.dataset"):
        load(name)


def test_a_data_set_that_has_a_batch_size_and_a_collate_fn_is_none_the_less_one() -> (
    None
):
    class Boxes(LeftOf):
        batch_size = 2

        def collate_fn(self) -> None:
            """For loaders of others."""

    assert samples_of(Boxes()).num_samples == NUM


# --- methods of the user's ------------------------------------------------------------


class Augmented(TensorDataset):
    """Its samples are 7 in place of 0."""

    def __init__(self) -> None:
        super().__init__(*pairs().tensors)

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        inputs, target = super().__getitem__(index)
        return inputs + 7, target


class ManyAtOnce(TensorDataset):
    """The same, by the method that torch's loaders prefer."""

    def __init__(self) -> None:
        super().__init__(*pairs().tensors)

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [(self.tensors[0][i] + 7, self.tensors[1][i]) for i in indices]


class Shorter(Augmented):
    """Half of it."""

    def __len__(self) -> int:
        return NUM // 2


class OneOfMany(ManyAtOnce):
    """Its parent has the method for many; this class has the one for a sample."""

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        return torch.full((2,), 7.0), torch.tensor(0)

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [self[i] for i in indices]


class OneAgain(OneOfMany):
    """Others' loaders would not ask it."""

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        inputs, target = super().__getitem__(index)
        return inputs + 1, target


class Inputs(Dataset[Tensor]):
    """Without targets."""

    def __len__(self) -> int:
        return NUM

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((2,), 7.0)


@pytest.mark.parametrize(
    "dataset",
    [
        Augmented(),
        ManyAtOnce(),
        Subset(Augmented(), range(NUM)),
        ConcatDataset([Augmented()]),
        Subset(ManyAtOnce(), range(NUM)),
        StackDataset(Inputs(), torch.zeros(NUM).long()),
        OneOfMany(),
        OneAgain(),
    ],
)
def test_a_data_set_is_asked_by_its_own_method(dataset: Any) -> None:
    samples = samples_of(dataset)
    (batch,) = samples.batches(ALL, 1)
    expected = 8.0 if isinstance(dataset, OneAgain) else 7.0
    assert batch.inputs.unique().tolist() == [expected]


def test_a_data_set_is_as_long_as_it_says() -> None:
    assert samples_of(Shorter()).num_samples == NUM // 2


# --- random numbers -------------------------------------------------------------------


class Noisy(Dataset[Any]):
    """Draws from a generator of its own, as NumPy's documentation shows."""

    def __init__(self) -> None:
        self.generator = np.random.default_rng(0)

    def __len__(self) -> int:
        return NUM

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.from_numpy(self.generator.normal(size=2)), 0


class NoisyStream(IterableDataset[Any]):
    """The same, one after another."""

    def __iter__(self) -> Iterator[Any]:
        return (self.noisy[index] for index in range(NUM))

    noisy = Noisy()


class Seeded(Noisy):
    """Draws from what is seeded for each sample."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.rand(2) + float(np.random.rand()), 0


@pytest.mark.parametrize(
    ("dataset", "is_told"),
    [
        (Noisy(), True),
        (Subset(Noisy(), range(2)), True),
        (NoisyStream(), True),
        (Seeded(), False),
        (Stream(), False),
        (pairs(), False),
    ],
)
def test_a_set_that_draws_from_its_own_generator_is_told_once(
    dataset: Any, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    samples_of(dataset)
    words = "results depend on the number of ranks"
    assert caplog.text.count(words) == is_told
    if is_told:
        assert "torch.rand" in caplog.text


class Debugged(Dataset[Any]):
    """Samples with what is another one whenever they are read."""

    def __len__(self) -> int:
        return NUM

    def __getitem__(self, index: int) -> Any:
        of_read = {"time": time.perf_counter(), "of": np.array([object()], object)}
        return {"inputs": torch.zeros(2), "path": "/job.1/a.png", **of_read}


def test_what_is_no_tensor_may_change_when_it_is_read_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    found = {
        build_samples(
            Debugged(),
            "the training data",
            seed=1,
            world=LONE,
            ranks=lone_communicator(),
            collate_fn=list,
        ).first_digest
        for _ in range(2)
    }
    assert len(found) == 1
    assert "" not in found
    assert not caplog.messages


@pytest.mark.parametrize(
    ("first", "second", "is_equal"),
    [
        ("/job.1/a.png", "/job.2/a.png", True),
        ("/job.1/a.png", "/job.1/b.png", False),
        (
            np.array([object(), "/1/a"], object),
            np.array([object(), "/22/a"], object),
            1,
        ),
        (np.array(["/1/a"]), np.array(["/22/a"]), True),
        (np.array(["/1/a"]), np.array(["/1/b"]), False),
        (np.array([1]), np.array([2]), False),
    ],
)
def test_a_sample_is_told_by_the_names_of_its_files_not_by_their_folders(
    first: Any, second: Any, is_equal: bool
) -> None:
    one, other = (sample_digest({"of": [it]}) for it in (first, second))
    assert (one == other) == is_equal


# --- streams and classes --------------------------------------------------------------


def chained() -> tuple[Any, Any]:
    return ChainDataset([Stream(), Stream()]), ChainDataset([Stream()])


def parts_of_one() -> tuple[Any, Any]:
    return Subset(LeftOf(), [0, 1]), Subset(Subset(LeftOf(), [2, 3]), [0])


def joined() -> tuple[Any, Any]:
    return ConcatDataset([LeftOf(), Subset(LeftOf(), [1])]), LeftOf()


@pytest.mark.parametrize("name", ["chained", "parts_of_one", "joined"])
def test_classes_are_those_of_the_sets_inside(name: str) -> None:
    data = load(name)
    assert data.num_classes == 2
    assert len(data.train.example().indices) == 1


def other_classes() -> tuple[Any, Any]:
    other = LeftOf()
    other.classes = ("left", "right", "straight on")
    return ConcatDataset([LeftOf(), other]), LeftOf()


def test_sets_of_other_classes_are_not_joined() -> None:
    with pytest.raises(DataError, match="neither `classes`"):
        load("other_classes")


# --- images ---------------------------------------------------------------------------


class Bytes(LeftOf):
    """Images of bytes."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.zeros(1, 2, 2, dtype=torch.uint8), index % 2


def of_bytes() -> tuple[Bytes, Bytes]:
    return Bytes(), Bytes()


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"normalize": "none"},
        {"normalize": "imagenet"},
        {"random_flip": True},
        {"random_crop": 1, "normalize": "none"},
    ],
)
def test_whether_custom_bytes_are_normalized_is_left_to_the_trainer(
    asked: dict[str, Any],
) -> None:
    """So that the command and a script do alike."""
    config = DataConfig(data=f"{__name__}:of_bytes", **asked)
    data = load_data(config, seed=1, world=LONE, ranks=lone_communicator())
    assert data.statistics is None


class ChannelsLast(LeftOf):
    """As Pillow and OpenCV have images."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.zeros(16, 12, 3, dtype=torch.uint8), index % 2


class FourWide(LeftOf):
    """Images of 8 channels, 4 pixels wide."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.zeros(8, 4, 4, dtype=torch.uint8), index % 2


class Signal(LeftOf):
    """Twelve signals of 500 values."""

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.zeros(12, 500, 1, dtype=torch.uint8), index % 2


def signals() -> tuple[Any, Any]:
    return Signal(), Signal()


def channels_last() -> tuple[Any, Any]:
    return ChannelsLast(), ChannelsLast()


def four_wide() -> tuple[Any, Any]:
    return FourWide(), FourWide()


def test_images_with_the_channels_last_are_refused() -> None:
    words = r"found \(16, 12, 3\); expected \(C, H, W\): image.permute\(2, 0, 1\)"
    with pytest.raises(DataError, match=words):
        load("channels_last")
    assert load("four_wide").in_channels == 8
    assert load("signals").in_channels == 12


def test_a_custom_model_may_take_the_channels_last() -> None:
    data = load("channels_last", takes_images=False)
    assert (data.in_channels, data.image_size) == (16, 3)


def test_tensors_that_change_with_the_epoch_are_read_by_sample() -> None:
    class Grows(TensorDataset):
        def set_epoch(self, epoch: int) -> None:
            self.tensors = (torch.full((NUM, 2), float(epoch)), self.tensors[1])

    samples = samples_of(Grows(*pairs().tensors))
    for epoch in (1, 2):
        (batch,) = samples.batches(ALL, epoch)
        assert batch.inputs.tolist() == [[float(epoch)] * 2] * NUM
    samples.close()
