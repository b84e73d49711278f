"""Callbacks: every step once, at the right time, in the right order, on every rank."""

from __future__ import annotations

import contextlib
import json
import re
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from reference_training import (
    BATCH_SIZE,
    EPOCHS,
    NUM_SAMPLES,
    History,
    Net,
    config_of,
    some,
)
from torch import Tensor

import mpitrain
from mpitrain.errors import NonFiniteError, Stopped
from mpitrain.mpi.world import World
from mpitrain.record.rank_times import RankTimes
from mpitrain.train.callbacks import Callback, StopRequested
from mpitrain.train.step_metrics import PendingSteps
from mpitrain.train.trainer import Trainer

pytestmark = pytest.mark.mpi

PAGE = Path(__file__).parents[2] / "docs/reference/callbacks.md"

NUM_STEPS = EPOCHS * -(-NUM_SAMPLES // BATCH_SIZE)


def trainer_of(
    world: World, kind: type[Trainer] = Trainer, *callbacks: Callback
) -> tuple[Trainer, History]:
    history = History()
    data = some(NUM_SAMPLES), some(29, "val")
    return (
        kind(Net(), *data, config_of(), world=world, callbacks=[history, *callbacks]),
        history,
    )


def steps_of(history: History) -> list[int]:
    """All steps that throughputs cover, in their order."""
    found: list[int] = []
    for it in history.throughputs:
        found += range(it.step - it.num_steps + 1, it.step + 1)
    return found


def noting(calls: list[str], name: str) -> Callback:
    """A callback that notes which hooks are called."""

    def noter(hook: str) -> Any:
        return lambda *_: calls.append(f"{name}.{hook}")

    hooks = [it for it in dir(Callback) if it.startswith("on_") or it == "setup"]
    kind = type("Noting", (Callback,), {hook: noter(hook) for hook in hooks})
    found = kind()
    assert isinstance(found, Callback)
    return found


def test_hooks_are_called_in_order_and_those_of_the_end_in_reverse(
    world: World,
) -> None:
    calls: list[str] = []
    callbacks = [noting(calls, name) for name in "ab"]
    trainer = Trainer(
        Net(),
        some(16),
        some(5, "val"),
        config_of(epochs=1, global_batch_size=8),
        world=world,
        callbacks=callbacks,
        test_data=some(3, "val"),
    )
    trainer.fit()
    both = [f"{name}.on_batch_start" for name in "ab"]
    step = [*both, *(f"{name}.on_step_end" for name in "ab")]
    start = [f"{n}.{hook}" for hook in ("setup", "on_fit_start") for n in "ab"]
    assert calls[: len(start)] == start
    timeless = [
        it
        for it in calls
        if not it.endswith(("on_metrics", "on_throughput", "on_validation_batch_end"))
    ]
    assert timeless == [
        *start,
        *(f"{name}.on_stage_start" for name in "ab"),
        *step,
        *step,
        *(f"{name}.on_validation_end" for name in "ab"),
        *(f"{name}.on_epoch_end" for name in "ab"),
        *(f"{name}.on_train_end" for name in "ab"),
        *(f"{name}.on_test_end" for name in "ab"),
        *(f"{name}.on_fit_end" for name in "ba"),
    ]
    assert {"a.on_metrics", "b.on_throughput", "a.on_validation_batch_end"} < set(calls)
    loop = PAGE.read_text().partition("```text\n")[2].partition("```")[0]
    on_page = re.findall(r"(\w+)\(trainer", loop)
    assert {"setup", *(it for it in dir(Callback) if it.startswith("on_"))} == {
        *on_page,
        *("on_checkpoint", "on_images", "on_predict_end"),
    }
    first_calls = dict.fromkeys(it[2:] for it in calls if it.startswith("a."))
    left_out = ("on_throughput", "on_stop", "on_exception")  # the first has a clock
    assert [it for it in first_calls if it not in left_out] == [
        it for it in on_page if it not in left_out
    ]


def test_the_example_of_the_page_finishes_a_training_and_goes_into_checkpoints(
    world: World,
) -> None:
    example = PAGE.read_text().partition("```python\n")[2].partition("```")[0]
    names: dict[str, Any] = {}
    exec(example, names)
    stopping = names["StopAtTarget"](loss=100.0)
    data = some(16), some(5, "val")
    trainer = Trainer(
        Net(), *data, config_of(epochs=9), world=world, callbacks=[stopping]
    )
    trainer.fit()
    assert trainer.state.epoch == 3  # the next one
    again = names["StopAtTarget"](loss=100.0)
    again.load_state_dict(json.loads(json.dumps(stopping.state_dict())))
    assert again.num_good == 2
    assert again.finish_reason() == "the target was reached"


class Enough(Callback):
    """Finishes a training after an epoch; with a reason it has a state."""

    def __init__(self, epoch: int, reason: str = "") -> None:
        self.epoch, self.reason, self.found = epoch, reason, ""

    def on_validation_end(self, trainer: Any, epoch: Any) -> None:
        if epoch.epoch >= self.epoch:
            trainer.should_stop, self.found = True, self.reason

    def finish_reason(self) -> str:
        return self.found

    def state_dict(self) -> dict[str, Any]:
        return {"found": self.found} if self.reason else {}

    def load_state_dict(self, state: Any) -> None:
        self.found = state["found"] if self.epoch < 3 else ""


def test_a_run_that_a_callback_has_finished_stays_finished(
    world: World, run_dir: Path
) -> None:
    def steps(name: str, callback: Callback, **options: Any) -> int:
        saves = mpitrain.Checkpointer(run_dir / name, **options)
        config = config_of(epochs=9, global_batch_size=16)
        trainer = Trainer(
            Net(),
            some(16),
            some(5, "val"),
            config,
            world=world,
            callbacks=[callback, saves],
        )
        trainer.fit()
        return trainer.state.step

    assert [steps("a", Enough(2, "enough")) for _ in range(3)] == [2, 2, 2]
    assert steps("new", Enough(4), resume=str(run_dir / "a")) == 4
    # One that gave a reason, and has none any more, trains on.
    assert steps("a", Enough(5, "enough")) == 5
    # Without a reason each job has its own end, such as a budget.
    assert [steps("b", Enough(1)) for _ in range(3)] == [1, 2, 3]


def test_the_file_of_the_page_has_each_step_once_after_a_resume(
    world: World, run_dir: Path
) -> None:
    example = PAGE.read_text().rpartition("```python\n")[2].partition("```")[0]
    names: dict[str, Any] = {}
    exec(example, names)

    class Fails(Callback):
        """Fails after steps that no checkpoint has."""

        def on_step_end(self, trainer: Trainer) -> None:
            if trainer.state.step == 7:
                trainer.sync_metrics()
                raise ArithmeticError("enough")

    opened = []

    def train(name: str, *more: Callback) -> str:
        run = run_dir / name
        file = run_dir / f"{name}.csv"
        saves = mpitrain.Checkpointer(run, every_epochs=None, every_steps=4)
        settings = config_of(epochs=2, global_batch_size=8)
        opened.append(names["StepsCSV"](str(file)))
        callbacks = [opened[-1], *more, saves]
        data = some(40), some(5, "val")
        trainer = Trainer(Net(), *data, settings, world=world, callbacks=callbacks)
        trainer.fit()
        return file.read_text() if world.is_rank_zero else ""  # it has closed it

    whole = train("whole")
    with pytest.raises(ArithmeticError):
        train("cut", Fails())
    if world.is_rank_zero:
        opened[-1].file.close()  # as the end of its process does
        rows = (run_dir / "cut.csv").read_text().splitlines()
        assert rows == whole.splitlines()[:7]  # three more than the checkpoint
    assert train("cut") == whole
    numbers = [int(row.partition(",")[0]) for row in whole.splitlines()]
    assert numbers == [*range(1, 11)] * world.is_rank_zero


def test_a_stop_ends_the_training_at_the_same_step_on_every_rank(world: World) -> None:
    class Stops(Callback):
        stopped = ""

        def on_step_end(self, trainer: Trainer) -> None:
            if trainer.state.step == 3:
                raise StopRequested("enough")

        def on_stop(self, trainer: Trainer, reason: str) -> None:
            self.stopped = reason

    stops = Stops()
    trainer, history = trainer_of(world, Trainer, stops)
    with pytest.raises(Stopped, match="stopped at step 3: enough") as caught:
        trainer.fit()
    assert caught.value.exit_status == 75
    assert stops.stopped == "enough"
    assert not history.epochs


@pytest.mark.parametrize("seconds", [0.0, 0.02, 3600.0])
def test_throughputs_cover_each_step_once(world: World, seconds: float) -> None:
    trainer, history = trainer_of(world)
    trainer.throughput_seconds = seconds
    trainer.fit()
    assert steps_of(history) == list(range(1, NUM_STEPS + 1))
    assert sum(it.num_samples for it in history.throughputs) == EPOCHS * NUM_SAMPLES
    assert all(it.seconds >= seconds for it in history.throughputs[:-1])
    if seconds == 3600.0:
        assert len(history.throughputs) == 1
    if seconds == 0.0:
        ends = [epoch.step for epoch in history.epochs]
        assert {it.step for it in history.throughputs} >= set(ends)


def test_a_throughput_does_not_count_twice_that_ranks_are_late_by_turns(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Late(Callback):
        def on_step_end(self, trainer: Trainer) -> None:
            if trainer.state.step % world.world_size == world.rank:
                time.sleep(0.05)

    monkeypatch.setattr(PendingSteps, "is_sync_due", property(lambda _: True))
    trainer, history = trainer_of(world, Trainer, Late())
    trainer.throughput_seconds = 0.15
    began = time.perf_counter()
    trainer.fit()
    whole = time.perf_counter() - began
    assert all(it.seconds >= 0.15 for it in history.throughputs[:-1])
    assert sum(it.seconds for it in history.throughputs) < 1.5 * whole  # 2, if twice
    assert trainer.state.step == NUM_STEPS


def test_a_training_that_fails_has_reported_its_steps(world: World) -> None:
    class Failing(Trainer):
        def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
            found = super().loss(outputs, targets)
            if self.state.step == 2 and torch.is_grad_enabled():
                return found * float("nan")
            return found

    trainer, history = trainer_of(world, Failing)
    with pytest.raises(NonFiniteError):
        trainer.fit()
    assert [it.step for it in history.steps][:2] == [1, 2]
    assert steps_of(history)[:2] == [1, 2]


def test_the_time_between_epochs_is_no_time_of_steps(world: World) -> None:
    class Syncs(Callback):
        def on_epoch_end(self, trainer: Trainer, epoch: Any) -> None:
            trainer.sync_metrics()  # as a checkpoint does
            assert trainer.state.steps_seconds == 0.0

    trainer, history = trainer_of(world, Trainer, Syncs())
    trainer.fit()
    assert all(epoch.steps_seconds > 0.0 for epoch in history.epochs)


def test_steps_are_in_times_before_another_rank_is_waited_for(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def hang(*_: Any) -> None:
        raise InterruptedError  # and the job is ended

    with tempfile.TemporaryDirectory() as folder:
        trainer, _ = trainer_of(world, Trainer, RankTimes(Path(folder)))
        trainer.throughput_seconds = 0.0
        monkeypatch.setattr(PendingSteps, "take_throughput", hang)
        with contextlib.suppress(InterruptedError):
            trainer.fit()
        (path,) = Path(folder).glob("times/*")
        _, *lines, _ = map(json.loads, path.read_text().splitlines())
    assert sum(line[2] for line in lines) == 1


class HeadSlower(Callback):
    """Sets learning rates of its own; the head's weights are a group of their own."""

    def __init__(self, rates: tuple[float, float]) -> None:
        self.rates = rates

    def on_stage_start(self, trainer: Trainer) -> None:
        optimizer = trainer.engine.optimizer.optimizer
        *body, weight, bias = optimizer.param_groups[0]["params"]
        optimizer.param_groups[0]["params"] = body
        optimizer.add_param_group({"params": [weight, bias]})

    def on_batch_start(self, trainer: Trainer, batch: Any) -> None:
        groups = trainer.engine.optimizer.optimizer.param_groups
        for group, rate in zip(groups, self.rates, strict=True):
            group["lr"] = rate


@pytest.mark.parametrize("rates", [(0.02, 0.02), (0.02, 0.0)])
def test_the_learning_rate_of_a_step_is_the_optimizers(
    world: World, rates: tuple[float, float]
) -> None:
    trainer, history = trainer_of(world, Trainer, HeadSlower(rates))
    trainer.fit()
    assert {it.lr for it in history.steps} == {0.02}
    expected = rates if len(set(rates)) > 1 else ()
    assert {it.lr_groups for it in history.steps} == {expected}
    head = Net().double().head.weight
    assert torch.equal(trainer.model.head.weight.cpu(), head) == (rates[1] == 0.0)
