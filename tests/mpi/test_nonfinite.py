"""Losses that are no numbers."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from reference_training import BATCH_SIZE, NUM_SAMPLES, History, Net, config_of, some
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from mpitrain.data.sharding import epoch_order, shard_bounds
from mpitrain.errors import NonFiniteError
from mpitrain.mpi.world import World
from mpitrain.train.optimizer import SCALE_GROWTH_INTERVAL, LossScale
from mpitrain.train.trainer import Trainer

pytestmark = pytest.mark.mpi


class NotANumber(Net):
    """Its output is no number where an image says so by its first pixel."""

    def forward(self, images: Tensor) -> Tensor:
        bad = images.flatten(1)[:, :1] > 50
        return torch.where(bad, torch.nan, super().forward(images))


def spoilt(num: int, index: int) -> TensorDataset:
    inputs, targets = (it.clone() for it in some(num).tensors)
    inputs[index, 0, 0, 0] = 99.0
    return TensorDataset(inputs, targets)


def infinite(outputs: Tensor, targets: Tensor) -> Tensor:
    losses = F.cross_entropy(outputs.nan_to_num(0.0), targets, reduction="none")
    return losses.masked_fill(outputs.isnan().any(1), torch.inf)


@pytest.mark.parametrize(
    ("strategy", "loss", "number"),
    [("auto", None, "nan"), ("fsdp", None, "nan"), ("auto", infinite, "inf")],
)
def test_a_loss_that_is_no_number_stops_all_ranks_before_the_update(
    world: World, strategy: str, loss: Any, number: str
) -> None:
    order = epoch_order(NUM_SAMPLES, 1, 1)
    place = 2 * BATCH_SIZE + 3  # in the third step
    bad = int(order[place])
    bounds = [
        shard_bounds(BATCH_SIZE, r, world.world_size) for r in range(world.world_size)
    ]
    rank = next(r for r, (start, stop) in enumerate(bounds) if start <= 3 < stop)
    model = NotANumber()
    trainer = Trainer(
        model,
        spoilt(NUM_SAMPLES, bad),
        some(29, "val"),
        config_of(strategy=strategy),
        world=world,
        loss=loss,
    )
    with pytest.raises(NonFiniteError) as caught:
        trainer.fit()
    words = str(caught.value)
    assert f"the loss is {number} in step 3 (epoch 1) on rank {rank}/" in words
    assert f" {bad}" in words
    assert all(
        value.isfinite().all() for value in trainer.engine.full_state_dict().values()
    )


class Normed(NotANumber):
    """Its statistics have seen the number that is none when the step is judged."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(10)

    def forward(self, images: Tensor) -> Tensor:
        return self.norm(super().forward(images))


@pytest.mark.parametrize("kind", [NotANumber, Normed])
def test_a_step_that_is_no_number_can_be_skipped(
    world: World, kind: type[NotANumber]
) -> None:
    history = History()
    trainer = Trainer(
        kind(),
        spoilt(NUM_SAMPLES, 5),
        some(29, "val"),
        config_of(on_nonfinite="skip"),
        world=world,
    )
    trainer.callbacks.append(history)
    trainer.fit()
    assert [epoch.skipped_steps for epoch in history.epochs] == [1, 1]
    assert np.isfinite(history.epochs[-1].values["loss"])
    assert all(np.isfinite(epoch.train_loss) for epoch in history.epochs)
    sizes = [epoch.train_samples for epoch in history.epochs]
    assert all(NUM_SAMPLES - BATCH_SIZE <= size < NUM_SAMPLES for size in sizes)
    assert all(it.isfinite().all() for it in trainer.engine.full_state_dict().values())


@pytest.mark.filterwarnings("error:Detected call of")
def test_a_first_step_that_is_skipped_is_no_mistake_of_the_order(world: World) -> None:
    history = History()
    model = nn.Linear(64, 10)
    images, labels = some(NUM_SAMPLES).tensors
    images = images.flatten(1).double()
    images[0] = torch.nan
    trainer = Trainer(
        model,
        TensorDataset(images, labels),
        None,
        config_of(on_nonfinite="skip", epochs=1),
        world=world,
        sampler=lambda *_: range(NUM_SAMPLES),
        optimizer=lambda it: torch.optim.SGD(it.parameters(), lr=1.0),
        scheduler=lambda it, _: torch.optim.lr_scheduler.ExponentialLR(it, 0.5),
        callbacks=[history],
    )
    trainer.fit()
    assert history.epochs[0].skipped_steps == 1
    assert [it.lr for it in history.steps] == [0.5**n for n in range(5)]


def test_the_loss_scale_grows_after_many_good_steps_as_torchs() -> None:
    mine, torchs = LossScale(2, is_used=True), torch.amp.GradScaler("cpu")
    first = mine.value
    for _ in range(2 * SCALE_GROWTH_INTERVAL):
        mine.grow()
    assert mine.value == 4 * first
    mine.shrink()
    for _ in range(torchs.get_growth_interval() - 1):
        mine.grow()
    assert mine.value == 2 * first
    mine.grow()
    assert mine.value == 4 * first
