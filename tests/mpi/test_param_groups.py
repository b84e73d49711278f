"""What a callback sets in the parameter groups of an optimizer: kept, or a warning."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from reference_training import BATCH_SIZE, History, Net, Stops, some

from mpitrain import Callback, Checkpointer, Stopped, TrainConfig, Trainer, World

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module"),
]

LOST_RATE = "a callback has set `lr`"
STEPS = 3  # of each of three epochs: 16, 16 and 8 samples


class Sets(Callback):
    """Changes the groups at the end of the first epoch, or before each step."""

    def __init__(
        self, change: Callable[[dict[str, Any]], object], *, in_each: bool = False
    ) -> None:
        self.change, self.in_each = change, in_each

    def on_epoch_end(self, trainer: Trainer, epoch: Any) -> None:
        if epoch.epoch == 1 and not self.in_each:
            self._set(trainer)

    def on_batch_start(self, trainer: Trainer, batch: Any) -> None:
        if self.in_each:
            groups = trainer.engine.optimizer.param_groups
            self.before = [group["lr"] for group in groups]
            self._set(trainer)

    def on_step_end(self, trainer: Trainer) -> None:
        if self.in_each and trainer.state.step % 2:  # it may set them back
            groups = trainer.engine.optimizer.param_groups
            for group, lr in zip(groups, self.before, strict=True):
                group["lr"] = lr

    def _set(self, trainer: Trainer) -> None:
        for group in trainer.engine.optimizer.param_groups:
            self.change(group)


def more_decay(group: dict[str, Any]) -> None:
    group["weight_decay"] = 0.5


def lower_rate(group: dict[str, Any]) -> None:
    group["lr"] *= 0.01


def sgd(model: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), 0.1, weight_decay=0.01)


def halved(optimizer: Any, _: int | None) -> Any:
    return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)


def trained(
    world: World, run_dir: Path, change: Callback, stop_at: int, **kinds: Any
) -> History:
    history = History()
    config = TrainConfig(
        precision="fp64", epochs=3, global_batch_size=BATCH_SIZE, warmup_epochs=0
    )
    trainer = Trainer(
        Net(),
        some(40),
        None,
        config,
        world=world,
        callbacks=[history, Checkpointer(run_dir), change, Stops(stop_at)],
        **kinds,
    )
    with pytest.raises(Stopped):
        trainer.fit()
    return history


@pytest.mark.parametrize("kinds", [{"optimizer": sgd}, {"scheduler": halved}])
def test_custom_groups_are_resumed_with_what_a_callback_has_set(
    world: World, run_dir: Path, kinds: dict[str, Any]
) -> None:
    trained(world, run_dir, Sets(more_decay), STEPS + 1, **kinds)
    found: list[float] = []

    class Notes(Checkpointer):
        def on_step_end(self, trainer: Trainer) -> None:
            groups = trainer.engine.optimizer.param_groups
            found.append(groups[0]["weight_decay"])
            super().on_step_end(trainer)

    config = TrainConfig(
        precision="fp64", epochs=3, global_batch_size=BATCH_SIZE, warmup_epochs=0
    )
    again = Trainer(
        Net(), some(40), None, config, world=world, callbacks=[Notes(run_dir)], **kinds
    )
    again.fit()
    assert set(found) == {0.5}


@pytest.mark.parametrize("kinds", [{}, {"optimizer": sgd}])
def test_a_rate_that_the_schedule_replaces_is_named_once(
    world: World, run_dir: Path, kinds: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    trained(world, run_dir, Sets(lower_rate), 2 * STEPS, **kinds)
    found = [it for it in caplog.messages if LOST_RATE in it]
    assert len(found) == world.is_rank_zero


def test_a_rate_that_counts_is_not_named(
    world: World, run_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    in_each = Sets(lower_rate, in_each=True)
    history = trained(world, run_dir.with_name("each"), in_each, 2 * STEPS)
    assert history.steps[1].lr < 0.01
    history = trained(world, run_dir, Sets(lower_rate), 2 * STEPS, scheduler=halved)
    before = history.steps[STEPS - 1].lr
    assert history.steps[STEPS].lr == pytest.approx(before * 0.5 * 0.01)
    assert LOST_RATE not in caplog.text
