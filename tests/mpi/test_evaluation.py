"""What an evaluation gives to losses and metrics, on any number of ranks."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from reference_training import BATCH_SIZE, NUM_SAMPLES, History, Net, config_of, some
from torch import Tensor
from torch.utils.data import IterableDataset, TensorDataset

from mpitrain.data.sharding import evaluation_batch_size
from mpitrain.errors import DataError
from mpitrain.mpi.collectives import world_comm
from mpitrain.mpi.world import World
from mpitrain.tasks.task import Task
from mpitrain.train.early_stopping import EarlyStopping
from mpitrain.train.trainer import Trainer

pytestmark = pytest.mark.mpi


def numbered(num: int) -> TensorDataset:
    """Samples whose targets are their numbers."""
    images = some(num).tensors[0]
    return TensorDataset(images, torch.arange(num))


class Stream(IterableDataset[Any]):
    """The same, without a length."""

    def __init__(self, num: int) -> None:
        self.data = numbered(num)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.data)


class Accumulating(Trainer):
    """Keeps the targets of each batch that its loss and its metric get."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.of_loss: list[list[int]] = []
        self.of_metrics: list[list[int]] = []

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        self.of_loss.append(targets.tolist())
        return outputs.mean(1)

    def metrics(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        self.of_metrics.append(targets.tolist())
        return {"first": targets[0].double(), "number": targets.double()}


def evaluated(world: World, val_data: Any, **settings: Any) -> tuple[Any, Any]:
    sets = some(NUM_SAMPLES), val_data, config_of(**settings)
    trainer = Accumulating(Net(), *sets, world=world, callbacks=())
    engine = trainer.set_up()
    engine.start_stage(engine.plan.stages[0])
    return trainer.evaluate(), trainer


def of_all_ranks(batches: Sequence[list[int]]) -> list[list[int]]:
    return sorted(itertools.chain(*world_comm().allgather(batches)))


@pytest.mark.parametrize(
    "settings", [{}, {"bitwise": True}, {"strategy": "fsdp"}, {"micro_batch_size": 3}]
)
@pytest.mark.parametrize("num", [1, 17, 75])
def test_loss_and_metrics_get_every_sample_of_an_evaluation_once(
    world: World, num: int, settings: Any
) -> None:
    """Also where some ranks have no sample at all, and know no name of a metric."""
    found, trainer = evaluated(world, numbered(num), **settings)
    for batches in (trainer.of_loss, trainer.of_metrics):
        assert [*itertools.chain(*of_all_ranks(batches))] == list(range(num))
        assert [] not in batches
    assert found.num_samples == num
    assert found.values["number"] == (num - 1) / 2


@pytest.mark.parametrize("kind", [numbered, Stream])
@pytest.mark.parametrize("num", [17, 300, 1000])
def test_batches_of_an_evaluation_are_the_same_on_any_number_of_ranks(
    world: World, num: int, kind: Any
) -> None:
    """So a scalar, the mean of a batch, has the same mean over batches."""
    found, trainer = evaluated(world, kind(num))
    size = evaluation_batch_size(num, BATCH_SIZE, 256) if kind is numbered else 256
    starts = range(0, num, size)
    expected = [list(range(at, min(at + size, num))) for at in starts]
    assert of_all_ranks(trainer.of_metrics) == expected
    first = math.fsum(batch[0] * len(batch) for batch in expected) / num
    assert found.values["first"] == first


def test_a_small_evaluation_keeps_all_ranks_busy(world: World) -> None:
    _, trainer = evaluated(world, numbered(512))
    nums = world_comm().allgather(sum(map(len, trainer.of_metrics)))
    assert max(nums) <= 1.1 * 512 / world.world_size


def test_a_weighted_loss_of_batches_is_validated_the_same(world: World) -> None:
    """As torch's of classes, whose weights are divided by their sum in the batch."""
    weights = torch.linspace(0.1, 3, 10, dtype=torch.float64)
    val = some(100, "val")

    class Weighted(Trainer):
        def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return F.cross_entropy(outputs, targets, weights.to(outputs.device))

    trainer = Weighted(
        Net(), some(NUM_SAMPLES), val, config_of(), world=world, callbacks=()
    )
    engine = trainer.set_up()
    engine.start_stage(engine.plan.stages[0])
    found = trainer.evaluate().loss
    model, total = Net().double(), 0.0
    size = evaluation_batch_size(100, BATCH_SIZE, 256)
    with torch.no_grad():
        for at in range(0, 100, size):
            x, y = (it[at : at + size] for it in val.tensors)
            total += F.cross_entropy(model(x.double()), y, weights).item() * len(y)
    assert found == pytest.approx(total / 100, rel=1e-12)


def test_places_whose_number_varies_are_warned_of_once(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    def padded(outputs: Tensor, targets: Tensor) -> Tensor:
        losses = F.cross_entropy(outputs, targets, reduction="none")
        return losses[:, None].expand(-1, 2 + int(targets.sum()) % 7)

    def weighted(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
        losses = padded(outputs, targets)
        return losses, torch.ones_like(losses)

    sets = some(NUM_SAMPLES), some(100, "val"), config_of()
    for loss, num in ((padded, 1), (weighted, 0)):
        caplog.clear()
        Trainer(Net(), *sets, world=world, callbacks=[History()], loss=loss).fit()
        found = [
            it.message for it in caplog.records if "has other shapes" in it.message
        ]
        assert len(found) == num * world.is_rank_zero


def test_scalars_are_warned_of_once(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    def mean(outputs: Tensor, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs, targets)

    def metrics(outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {"f1": torch.tensor(0.5), "each": targets.double()}

    sets = some(NUM_SAMPLES), some(100, "val"), config_of()
    for options, names in (
        ({}, []),
        ({"loss": mean}, ["loss"]),
        ({"loss": mean, "metrics": metrics}, ["loss", "f1"]),
    ):
        caplog.clear()
        Trainer(Net(), *sets, world=world, callbacks=[History()], **options).fit()
        found = [it.message for it in caplog.records if it.levelno == logging.WARNING]
        assert len(found) == len(names) * world.is_rank_zero
        for message, name in zip(found, names, strict=False):
            assert message.startswith(f"{name} is a scalar")
            assert 'reduction="none"' in message


def test_metrics_that_one_rank_lacks_are_refused(world: World) -> None:
    """Each of its batches has none: it has no sums to add to those of the others."""

    class Lacks(Task):
        def training_step(self, model: Any, batch: Any) -> Tensor:
            return model(batch.inputs).mean(1)

        def validation_step(self, model: Any, batch: Any) -> dict[str, Tensor]:
            outputs = model(batch.inputs)
            return {} if world.rank == 1 else {"score": outputs.mean(1)}

    trainer = Trainer(
        Net(),
        some(NUM_SAMPLES),
        numbered(NUM_SAMPLES * world.world_size),
        config_of(epochs=1),
        task=Lacks(),
        world=world,
    )
    if world.world_size == 1:
        trainer.fit()
        return
    with pytest.raises(DataError, match="what metrics returned differs between ranks"):
        trainer.fit()


@pytest.mark.parametrize("best_by", ["val_loss", "min:val_loss", None])
def test_a_set_named_val_has_its_metrics_by_that_name(
    world: World, best_by: str | None
) -> None:
    """Else only `val_val_loss` would choose."""
    trainer = Trainer(
        Net(),
        some(NUM_SAMPLES),
        {"val": some(9), "test": some(7)},
        config_of(epochs=2),
        loss=lambda outputs, _: outputs.mean(1),
        callbacks=[EarlyStopping(best_by, patience=5)],
        world=world,
    )
    assert set(trainer.fit().values) == {"val_loss", "test_loss"}
