"""What one rank alone passes to a Trainer is an error on all, and no wait."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference_training import Net, some
from torch.optim.lr_scheduler import ConstantLR

from mpitrain import DataError, TrainConfig, Trainer, UsageError, World

pytestmark = pytest.mark.mpi

TRAIN, VAL = some(64), some(64, "val")
CONFIG = TrainConfig(epochs=1, global_batch_size=16)


@pytest.mark.parametrize(
    ("name", "argument"),
    [
        ("val_data", VAL),
        ("test_data", VAL),
        ("sampler", lambda seed, epoch: range(64)),
        ("batch_sampler", lambda seed, epoch: [[0, 1], [2, 3]]),
        ("derived_metrics", lambda values: {"twice": 2 * values["loss"]}),
        ("optimizer", lambda model: torch.optim.Adam(model.parameters())),
        ("scheduler", lambda optimizer, total_steps: ConstantLR(optimizer)),
    ],
)
def test_an_argument_of_rank_zero_alone_is_named(
    world: World, name: str, argument: Any
) -> None:
    if world.world_size == 1:
        return
    given: dict[str, Any] = {"val_data": VAL}
    given[name] = argument if world.is_rank_zero else None
    trainer = Trainer(Net(), TRAIN, config=CONFIG, world=world, callbacks=[], **given)
    with pytest.raises((UsageError, DataError), match=r"differs? between ranks"):
        trainer.fit()


def test_other_rates_on_a_rank_are_named(world: World) -> None:
    def adam(model: Any) -> Any:
        return torch.optim.Adam(model.parameters(), lr=0.1 * 2.0**-world.rank)

    trainer = Trainer(Net(), TRAIN, VAL, CONFIG, world=world, optimizer=adam)
    if world.world_size > 1:
        with pytest.raises(DataError, match=r"learning rates \[0.1\] on rank 0, .*05"):
            trainer.fit()


def test_a_writer_of_one_rank_alone_is_named(world: World) -> None:
    trainer = Trainer(Net(), TRAIN, VAL, CONFIG, world=world, callbacks=[])
    trainer.fit()
    if world.world_size > 1:
        write = (lambda indices, outputs: None) if world.is_rank_zero else None
        with pytest.raises(DataError, match=r"write= differs between ranks"):
            trainer.predict(VAL, write)
