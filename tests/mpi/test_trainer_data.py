"""The trainer with streams, features and data that cannot be."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import custom_data
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from reference_training import (
    BATCH_SIZE,
    EPOCHS,
    NUM_SAMPLES,
    History,
    Net,
    by_hand,
    config_of,
    some,
    trained,
)
from torch import Tensor
from torch.utils.data import (
    DataLoader,
    Dataset,
    IterableDataset,
    TensorDataset,
    default_collate,
)

from mpitrain.data.custom import build_samples
from mpitrain.data.loader import Batch
from mpitrain.data.map_style import MapStyle
from mpitrain.data.sharding import Indices, epoch_order
from mpitrain.data.worker_tuner import Reading, WorkerTuner
from mpitrain.errors import DataError, UsageError
from mpitrain.mpi.shared_arrays import Communicator, communicator
from mpitrain.mpi.world import World
from mpitrain.tasks.image_classification.datasets.named import InMemory
from mpitrain.tasks.task import Task
from mpitrain.train.callbacks import Callback
from mpitrain.train.trainer import Trainer

pytestmark = pytest.mark.mpi


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    return F.cross_entropy(outputs, targets, reduction="none")


class Streamed(IterableDataset[tuple[Tensor, Tensor]]):
    """The digits one after another."""

    def __init__(self, num: int) -> None:
        self.data = some(num)

    def __iter__(self) -> Any:
        return iter(self.data)


class CanBeCut(Streamed):
    def shard(self, num_shards: int, index: int) -> list[Any]:
        return [self.data[i] for i in range(index, len(self.data), num_shards)]


@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stream_trains_like_a_set_in_its_order(
    world: World, num_workers: int
) -> None:
    hand = by_hand(order=lambda epoch: np.arange(NUM_SAMPLES))
    found, _ = trained(
        world,
        data=Streamed(NUM_SAMPLES),
        num_workers=num_workers,
        schedule="constant",
        warmup_epochs=0,
    )
    assert len(found) == len(hand[0])
    again, _ = trained(
        world, data=in_order(NUM_SAMPLES), schedule="constant", warmup_epochs=0
    )
    assert found == pytest.approx(again, rel=1e-9)


class Noting(Trainer):
    """Notes the number in the first pixel of each image that it trains on."""

    trained: dict[int, list[int]]

    def compute_loss(self, batch: Batch) -> Any:
        rows = batch.inputs[: len(batch), 0, 0, 0]
        numbers = [round(255 * float(row)) for row in rows]
        self.trained.setdefault(self.state.epoch, []).extend(numbers)
        return super().compute_loss(batch)


KINDS = {
    "map": custom_data.Noted(26),
    "stream": custom_data.Readings(range(26)),
    "parts": custom_data.NotedParts(range(26)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_sample_is_trained_on_once_in_an_epoch(
    world: World,
    ranks: Communicator,
    run_dir: Path,
    monkeypatch: pytest.MonkeyPatch,
    kind: str,
) -> None:
    """And read once by the workers of all ranks; a stream that is whole, by each."""
    ranks.on_rank_zero(run_dir.mkdir, "make a folder for notes")
    monkeypatch.setenv("NOTES", str(run_dir))
    net = torch.nn.Sequential(torch.nn.Flatten(1), torch.nn.Linear(432, 3))
    config = config_of(epochs=2, num_workers=2, global_batch_size=8, precision="fp32")
    val = custom_data.Photos(3)
    trainer = Noting(net, KINDS[kind], val, config, world=world)
    trainer.trained = {}
    trainer.fit()
    each = dict.fromkeys(range(26), 1)
    for epoch in (1, 2):
        of_ranks = ranks.allgather(trainer.trained[epoch])
        assert Counter(number for it in of_ranks for number in it) == each
        assert all(of_ranks) or world.world_size > 3
    if kind != "stream":
        files = list(run_dir.glob("read-*"))
        lines = [line for file in files for line in file.read_text().split()]
        assert Counter(map(int, lines)) == dict.fromkeys(range(26), 2)
        assert len(files) >= 2 * world.world_size or world.world_size > 3  # processes


class WithNoise(Dataset[Any]):
    """Digits, each with noise of its own."""

    def __init__(self) -> None:
        self.data = some(NUM_SAMPLES)

    def __len__(self) -> int:
        return 2 * NUM_SAMPLES

    def __getitem__(self, index: int) -> Any:
        image, label = self.data[index % NUM_SAMPLES]
        return image + torch.rand(image.shape), label


@pytest.mark.parametrize("skip", [False, True])
def test_a_number_of_workers_that_changes_changes_no_bit(
    world: World, monkeypatch: pytest.MonkeyPatch, skip: bool
) -> None:
    numbers, seen = (1, 3, 0, 2, 2, 1), list[int]()

    def change(tuner: WorkerTuner, *_: Any) -> bool:
        """Each step another number, on each rank: the search's depend on the clock."""
        number = numbers[(len(seen) + world.rank) % len(numbers)]
        seen.append(number)
        tuner.reading = Reading(number, 1 + len(seen) % 2)
        return True

    monkeypatch.setattr(WorkerTuner, "add", change)
    states = {}
    for num_workers in ("auto", 0, 3):
        config = config_of(
            num_workers=num_workers,
            on_bad_sample="skip" if skip else "stop",
            micro_batch_size=3,
            epochs=1,
        )
        trainer = Trainer(Net(), WithNoise(), some(29, "val"), config, world=world)
        trainer.fit()
        states[num_workers] = trainer.engine.full_state_dict()
    assert {*seen} == {*numbers}
    if world.is_rank_zero:
        for name, value in states[0].items():
            assert torch.equal(states["auto"][name], value)
            assert torch.equal(states[3][name], value)


class InOrder(InMemory):
    def order(self, seed: int, epoch: int) -> Indices:
        return np.arange(self.num_samples, dtype=np.int64)


def in_order(num: int) -> InMemory:
    return InOrder(*some(num).tensors)


@pytest.mark.parametrize("num", [NUM_SAMPLES, 3])
def test_a_stream_that_can_be_cut_is_read_once(world: World, num: int) -> None:
    history = History()
    trainer = Trainer(
        Net(),
        CanBeCut(num),
        some(29, "val"),
        config_of(schedule="constant"),
        world=world,
    )
    trainer.callbacks.append(history)
    trainer.fit()
    assert [epoch.train_samples for epoch in history.epochs] == [num] * EPOCHS


@pytest.mark.parametrize("strategy", ["auto", "fsdp"])
def test_a_probe_and_then_all_is_the_same_at_any_size(
    world: World, strategy: str
) -> None:
    """The features road and the frozen road agree, and both with one process."""

    class Random(Dataset[tuple[Tensor, Tensor]]):
        """Of unknown randomness, so that its features are not kept."""

        def __len__(self) -> int:
            return NUM_SAMPLES

        def __getitem__(self, index: int) -> Any:
            return some(NUM_SAMPLES)[index]

    settings: dict[str, Any] = {"probe_epochs": 1, "epochs": 1, "strategy": strategy}
    first, state = trained(world, **settings)
    second, other = trained(world, data=Random(), **settings)
    assert first == pytest.approx(second, rel=1e-9)

    model = Net().double()
    torch.manual_seed(0)
    x, y = (it for it in some(NUM_SAMPLES).tensors)
    order = epoch_order(NUM_SAMPLES, 1, 1)[:BATCH_SIZE]
    loss = F.cross_entropy(model(x[order].double()), y[order])
    assert first[0] == pytest.approx(loss.item(), rel=1e-9)
    if world.rank == 0:
        assert state.keys() == model.state_dict().keys() == other.keys()


def test_features_need_no_shared_memory(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    shared_memory, _ = trained(world, probe_epochs=1, epochs=0)

    def refuse(*_args: object) -> None:
        raise OSError("no memory to share")

    monkeypatch.setattr("os.memfd_create", refuse)
    own_memory, _ = trained(world, probe_epochs=1, epochs=0)
    assert own_memory == pytest.approx(shared_memory, rel=1e-12)


def test_mixing_is_refused_where_a_step_is_not_known_beforehand(world: World) -> None:
    with pytest.raises(UsageError, match="--mixup"):
        trained(world, data=Streamed(NUM_SAMPLES), mixup=0.2)


def test_data_that_differ_between_ranks_are_refused(world: World) -> None:
    if world.world_size == 1:
        return
    own = TensorDataset(torch.full((8, 64), float(world.rank)), torch.zeros(8).long())
    with pytest.raises(
        DataError, match="the first sample of the training data differs"
    ):
        trained(world, data=own)


class Texts(Dataset[dict[str, Any]]):
    """Samples of which one part alone is another one on another rank."""

    def __init__(self, part: Any) -> None:
        self.part = part

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Any:
        return {"inputs": torch.zeros(64), "meta": {"part": self.part}}


def check_texts(world: World, part: Any) -> None:
    build_samples(
        Texts(part),
        "the training data",
        seed=1,
        world=world,
        ranks=communicator(world),
        collate_fn=list,
    )


@pytest.mark.parametrize(
    "kind", [str, int, lambda it: np.array([str(it)], object), lambda it: [f"/a/b{it}"]]
)
def test_texts_that_differ_between_ranks_are_named_once(
    world: World, caplog: pytest.LogCaptureFixture, kind: Any
) -> None:
    if world.world_size == 1:
        return
    check_texts(world, kind(world.rank))
    assert len(caplog.messages) == world.is_rank_zero
    if world.is_rank_zero:
        (said,) = caplog.messages
        assert "but 0.meta.part" in said
        assert all(f"{it} on rank {it}" in said.replace("'", "") for it in (0, 1))


@pytest.mark.parametrize(
    "kind",
    [
        lambda rank: f"/local/{rank}/cat.png",
        lambda rank: np.array([f"/local/{'r' * rank}/cat.png"]),
        lambda rank: np.array([f"/local/{rank}/cat.png", object()], object),
        lambda rank: object(),
    ],
    ids=["path", "array", "objects", "object"],
)
def test_files_that_are_elsewhere_on_each_node_are_the_same(
    world: World, caplog: pytest.LogCaptureFixture, kind: Any
) -> None:
    check_texts(world, kind(world.rank))
    assert not caplog.messages


def test_arrays_that_differ_between_ranks_are_refused(world: World) -> None:
    if world.world_size == 1:
        return
    with pytest.raises(DataError, match="first sample of the training data differs"):
        check_texts(world, np.full(3, world.rank))


@pytest.mark.parametrize("which", [0, 1, 2])
def test_a_loader_is_refused_before_the_first_step(world: World, which: int) -> None:
    sets: list[Any] = [some(16), some(8, "val"), some(8, "val")]
    sets[which] = DataLoader(sets[which], batch_size=4, shuffle=True)
    train, val, test = sets
    trainer = Trainer(Net(), train, val, config_of(), world=world, test_data=test)
    with pytest.raises(DataError, match=r"is a 'DataLoader'.*pass loader.dataset"):
        trainer.fit()
    assert trainer.state.step == 0


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Draws from a generator of its own; on rank zero alone the first draws are equal.

    As a random flip would that is seeded by the system.
    """

    def __init__(self, rank: int) -> None:
        self.data, self.rank, self.reads = some(NUM_SAMPLES), rank, 0

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Any:
        self.reads += 1
        inputs, target = self.data[index]
        return (inputs + self.reads if self.rank else inputs), target


def test_a_random_data_set_is_told_by_rank_zero_whoever_notices(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    trained(world, data=Noisy(world.rank), epochs=1)
    told = caplog.text.count("results depend on the number of ranks")
    assert told == (world.is_rank_zero and world.world_size > 1)


def mixing(samples: list[Any]) -> Any:
    """Draw for the whole batch."""
    inputs, targets = default_collate(samples)
    return inputs.lerp(inputs.roll(1, 0), float(torch.rand(()))), targets


class Perturbing(Task):
    """Its inputs are noisy in training, or in evaluations."""

    def __init__(self, *, in_training: bool) -> None:
        super().__init__()
        self.in_training = in_training

    def transform(self, inputs: Any, *args: Any, is_training: bool) -> Any:
        found = super().transform(inputs, *args, is_training=is_training)
        is_noisy = is_training is self.in_training
        return found + torch.rand(()) if is_noisy else found


@pytest.mark.parametrize("bitwise", [False, True])
def test_a_collate_fn_that_draws_is_told_where_it_depends_on_the_ranks(
    world: World, bitwise: bool, caplog: pytest.LogCaptureFixture
) -> None:
    seen: dict[tuple[int, ...], float] = {}

    class Sees(Callback):
        def on_batch_start(self, trainer: Any, batch: Batch) -> None:
            if len(batch):
                seen[(batch.epoch, *batch.indices.tolist())] = float(batch.inputs.sum())

    data, settings = some(NUM_SAMPLES), config_of(bitwise=bitwise, epochs=1)
    trainer = Trainer(
        Net(),
        data,
        data,
        settings,
        world=world,
        callbacks=[Sees()],
        collate_fn=mixing,
        loss=cross_entropy,
    )
    trainer.fit()
    told = caplog.text.count("collate_fn draws random numbers")
    assert told == (world.is_rank_zero and not bitwise)
    # This rank's batches, made by a process that has drawn otherwise.
    again = MapStyle(data, seed=1, collate_fn=mixing)
    for (epoch, *indices), total in seen.items():
        read = again.read(np.array(indices), epoch, 1).inputs.double().sum()
        assert float(read) == total


@pytest.mark.parametrize("in_training", [False, True])
def test_a_transform_that_draws_is_told_or_refused(
    world: World, in_training: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def fit(**settings: Any) -> None:
        data, task = some(NUM_SAMPLES), Perturbing(in_training=in_training)
        config = config_of(epochs=1, **settings)
        Trainer(
            Net(), data, data, config, world=world, task=task, loss=cross_entropy
        ).fit()

    fit()
    told = caplog.text.count("Perturbing.transform draws random numbers")
    assert told == world.is_rank_zero
    with pytest.raises(UsageError, match=r"--bitwise: Perturbing.transform draws"):
        fit(bitwise=True)


class ByName(Task):
    """The model is given arguments by name."""

    def transform(self, inputs: Any, *args: Any, is_training: bool) -> Any:
        return {"images": super().transform(inputs, *args, is_training=is_training)}


def test_a_transform_may_make_something_else_of_tensors(world: World) -> None:
    def losses(task: Task) -> list[float]:
        history, data = History(), some(NUM_SAMPLES)
        Trainer(
            Net(),
            data,
            data,
            config_of(micro_batch_size=2),
            world=world,
            task=task,
            loss=cross_entropy,
            callbacks=[history],
        ).fit()
        return history.losses

    assert losses(ByName()) == losses(Task())


class Mirrored(TensorDataset):
    """Its own method changes what its tensors hold."""

    def __getitem__(self, index: int) -> tuple[Tensor, ...]:
        inputs, target = super().__getitem__(index)
        return inputs.flip(-1), target


def test_the_method_of_a_tensor_data_set_is_asked(world: World) -> None:
    inputs, targets = some(NUM_SAMPLES).tensors
    asked, _ = trained(world, data=Mirrored(inputs, targets))
    expected, _ = trained(world, data=TensorDataset(inputs.flip(-1), targets))
    assert asked == pytest.approx(expected, rel=1e-12)


def test_a_label_that_no_output_has_is_named(world: World) -> None:
    inputs, labels = some(8).tensors
    data = TensorDataset(inputs, torch.full_like(labels, 10))
    words = r"sample \d of the training data has label 10, and the model has 10"
    with pytest.raises(DataError, match=words):
        trained(world, data=data)


def test_images_are_not_mirrored_where_the_targets_are_images(world: World) -> None:
    images = TensorDataset(torch.zeros(4, 1, 8, 8), torch.zeros(4, 1, 8, 8))
    trainer = Trainer(Net(), images, images, config_of(random_flip=True), world=world)
    with pytest.raises(UsageError, match="change the images alone"):
        trainer.fit()


def test_data_without_a_sample_0_are_refused(world: World) -> None:
    """Such as a dict of the parts; an error of a custom set's own is not hidden."""

    class Wrong(Dataset[Any]):
        def __len__(self) -> int:
            return 8

        def __getitem__(self, index: int) -> Any:
            return {"labels": 1}["label"]

    for train_data, kind, words in (
        ({"train": some(8)}, DataError, "the training data is a dict of data sets"),
        ({"x": [1, 2]}, DataError, "the training data is 'dict' without a sample"),
        (Wrong(), KeyError, "label"),
    ):
        trainer = Trainer(Net(), train_data, some(8), config_of(), world=world)
        with pytest.raises(kind, match=words):
            trainer.fit()


@pytest.mark.parametrize("kind", [list, tuple, enumerate])
@pytest.mark.parametrize("name", ["train", "val"])
def test_several_data_sets_without_names_are_refused(
    world: World, kind: Any, name: str
) -> None:
    several = kind([some(20), some(5)])
    several = dict(several) if kind is enumerate else several
    given = {"train": some(20), "val": None} | {name: several}
    with pytest.raises(DataError, match=r"the \w+ data is a (list|tuple|dict) of data"):
        Trainer(Net(), given["train"], given["val"], config_of(), world=world).fit()
