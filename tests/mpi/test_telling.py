"""What a training tells those who listen: all of it, once, on every rank."""

from __future__ import annotations

import contextlib
import json
import tempfile
import time
from pathlib import Path

import pytest
import torch
from torch import Tensor
from trainings import BATCH_SIZE, EPOCHS, NUM_SAMPLES, Heard, Net, config_of, some

from mpitrain.errors import NonFiniteError
from mpitrain.record.events import Listeners
from mpitrain.record.times import DATA, RankTimes
from mpitrain.train.clock import Clock
from mpitrain.train.pace import Untold
from mpitrain.train.steps import Steps
from mpitrain.train.trainer import Trainer
from mpitrain.world import World

pytestmark = pytest.mark.mpi

NUM_STEPS = EPOCHS * -(-NUM_SAMPLES // BATCH_SIZE)


def listened_to(
    world: World, trainer: type[Trainer] = Trainer
) -> tuple[Trainer, Heard]:
    found = trainer(Net(), some(NUM_SAMPLES), some(29, "val"), config_of(), world=world)
    found.listener = heard = Heard()
    return found, heard


def steps_of(heard: Heard) -> list[int]:
    """All that paces tell of, in their order."""
    told: list[int] = []
    for pace in heard.paces:
        told += range(pace.step - pace.num_steps + 1, pace.step + 1)
    return told


@pytest.mark.parametrize("seconds", [0.0, 0.02, 3600.0])
def test_paces_tell_of_each_step_once(world: World, seconds: float) -> None:
    trainer, heard = listened_to(world)
    trainer.pace_seconds = seconds
    trainer.fit()
    assert steps_of(heard) == list(range(1, NUM_STEPS + 1))
    assert sum(pace.num_samples for pace in heard.paces) == EPOCHS * NUM_SAMPLES
    assert all(pace.seconds >= seconds for pace in heard.paces[:-1])
    if seconds == 3600.0:
        assert len(heard.paces) == 1
    if seconds == 0.0:
        ends = [epoch.step for epoch in heard.epochs]
        assert {pace.step for pace in heard.paces} >= set(ends)


def test_a_pace_does_not_count_twice_that_ranks_are_late_by_turns(
    world: World,
) -> None:
    class MeetsEachStep(Steps):
        @property
        def are_due(self) -> bool:
            return True

    trainer, heard = listened_to(world)
    trainer.pace_seconds = 0.15
    trainer.set_up()
    trainer._steps = MeetsEachStep(trainer._steps.untold)

    def be_late(step: int) -> None:
        if step % world.world_size == world.rank:
            time.sleep(0.05)

    trainer.each_step.append(be_late)
    began = time.perf_counter()
    trainer.fit()
    whole = time.perf_counter() - began
    assert all(pace.seconds >= 0.15 for pace in heard.paces[:-1])
    assert sum(pace.seconds for pace in heard.paces) < 1.5 * whole  # 2, if twice
    assert trainer.so_far.num_steps == NUM_STEPS


def test_a_training_that_fails_has_told_of_its_steps(world: World) -> None:
    class Failing(Trainer):
        def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
            found = super().loss(outputs, targets)
            if self.so_far.num_steps == 2 and torch.is_grad_enabled():
                return found * float("nan")
            return found

    trainer, heard = listened_to(world, Failing)
    with pytest.raises(NonFiniteError):
        trainer.fit()
    assert [row.step for row in heard.rows][:2] == [1, 2]
    assert steps_of(heard)[:2] == [1, 2]


def test_what_is_between_epochs_is_no_time_of_steps(world: World) -> None:
    trainer, heard = listened_to(world)
    setup = trainer.set_up()
    (stage,) = setup.plan.stages
    setup.begin(stage)
    for _ in stage.epochs:
        trainer.train_epoch(stage)
        trainer.meet()  # as a checkpoint asks for
        assert trainer.so_far.steps_seconds == 0.0
    assert all(epoch.steps_seconds > 0.0 for epoch in heard.epochs)


def test_each_step_is_told_when_it_is_over(world: World) -> None:
    trainer, _ = listened_to(world)
    told: list[tuple[int, int]] = []
    trainer.each_step.append(lambda step: told.append((step, trainer.so_far.num_steps)))
    trainer.fit()
    assert told == [(step, step) for step in range(1, NUM_STEPS + 1)]


def test_steps_are_in_times_before_another_rank_is_waited_for(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hang(*_: Tensor) -> None:
        raise InterruptedError  # and the job is ended

    monkeypatch.setattr("mpitrain.train.pace._all_gather", hang)
    clock = Clock()
    with tempfile.TemporaryDirectory() as folder:
        times = RankTimes(Path(folder), world, 0.0)
        untold = Untold(clock, times, world.device, int)
        times.clock = clock
        clock.enter(DATA)
        clock.end(is_step=True, then=DATA)
        untold.add(1, 2.0, 2.0, (1, 1))
        with contextlib.suppress(InterruptedError):
            untold.tell(Listeners(), 0.0)
        times.cut()
        (path,) = Path(folder).glob("times/*")
        _, *lines, _ = map(json.loads, path.read_text().splitlines())
    assert sum(line[2] for line in lines) == 1
