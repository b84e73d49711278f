"""Steps whose result the host does not wait for, as with fused optimizers on a GPU.

A strategy decides it, by returning the gradient norm as a tensor: so the same code runs
here, on the CPU.
"""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from reference_training import BATCH_SIZE, NUM_SAMPLES, History, config_of, some
from test_nonfinite import Normed, spoilt
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from mpitrain.data.sharding import epoch_order
from mpitrain.errors import NonFiniteError
from mpitrain.mpi.world import World
from mpitrain.train.callbacks import Callback
from mpitrain.train.metrics import BACKWARD
from mpitrain.train.strategy.ddp import DDPStrategy
from mpitrain.train.trainer import Trainer

pytestmark = pytest.mark.mpi

OPTIMIZERS: list[dict[str, Any]] = [
    {"optimizer": "sgd"},
    {"optimizer": "sgd", "momentum": 0.0},
    {"optimizer": "adamw", "lr": 0.01},
]


class Immediate(DDPStrategy):
    """The host knows the norm before the update, by the same arithmetic."""

    def grad_norm(self, gradients: list[Any]) -> float | Tensor:
        return float(nn.utils.get_total_norm(gradients))


class Deferred(DDPStrategy):
    """The norm stays on the device."""

    def grad_norm(self, gradients: list[Any]) -> float | Tensor:
        return nn.utils.get_total_norm(gradients)

    def sum_of_weights(self, weights: Any) -> float | Tensor:
        total = torch.stack(list(weights)).sum()
        if self.world.world_size > 1:
            dist.all_reduce(total)
        return total


class Kept(History):
    """Keeps how many steps there were at each gathering of metrics."""

    def __init__(self) -> None:
        super().__init__()
        self.intervals: list[int] = []

    def on_metrics(self, trainer: Any, steps: Any) -> None:
        super().on_metrics(trainer, steps)
        self.intervals.append(len(steps))


def trainer_of(
    world: World, strategy: Any, *, bad: int | None = None, **settings: Any
) -> tuple[Trainer, Kept]:
    torch.manual_seed(7)
    trainer = Trainer(
        Normed(),
        some(NUM_SAMPLES) if bad is None else spoilt(NUM_SAMPLES, bad),
        some(29, "val"),
        config_of(**settings),
        world=world,
        strategy=strategy,
    )
    history = Kept()
    trainer.callbacks.append(history)
    return trainer, history


def rows_of(history: History) -> list[tuple[Any, ...]]:
    rows = [(it.step, it.loss, it.lr, it.grad_norm) for it in history.steps]
    ends = [
        (it.train_loss, it.train_samples, it.skipped_steps, it.values["loss"])
        for it in history.epochs
    ]
    return rows + ends


def same(one: Any, other: Any) -> bool:
    return all(
        np.array_equal(np.array(it), np.array(that), equal_nan=True)
        for it, that in zip(one, other, strict=True)
    )


@pytest.mark.parametrize("settings", OPTIMIZERS)
@pytest.mark.parametrize("more", [{}, {"clip_grad_norm": 0.3, "ema_decay": 0.9}])
@pytest.mark.parametrize("bad", [None, 5])
def test_a_norm_on_the_device_changes_no_bit(
    world: World, settings: dict[str, Any], more: dict[str, Any], bad: int | None
) -> None:
    found = []
    for strategy in (Immediate, Deferred):
        trainer, history = trainer_of(
            world, strategy, bad=bad, on_nonfinite="skip", **settings, **more
        )
        trainer.fit()
        state = trainer.engine.full_state_dict()
        averages = trainer.engine.optimizer.ema_values
        moments = trainer.engine.optimizer.optimizer.state_dict()["state"]
        found.append((rows_of(history), {**state, **averages}, moments))
    (rows, state, moments), (other_rows, other_state, other_moments) = found
    assert same(rows, other_rows)
    assert state.keys() == other_state.keys()
    for name, value in state.items():
        assert torch.equal(value, other_state[name]), name
    for number, values in moments.items():
        for name, value in values.items():
            assert torch.equal(value, other_moments[number][name]), name
    skipped = [row[2] for row in rows[-2:]]
    assert skipped == ([0, 0] if bad is None else [1, 1])


class _NoSync(TorchDispatchMode):
    """Refuses what waits for a GPU: to read a number of a tensor.

    Not in the backward pass, where torch's own formulas for the CPU do.
    """

    def __init__(self, phases: list[int]) -> None:
        super().__init__()
        self.phases = phases

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        is_read = "_local_scalar_dense" in str(func)
        assert not is_read or self.phases[-1] == BACKWARD, "the host reads a number"
        return func(*args, **(kwargs or {}))


class WithoutSync(Trainer):
    """Its steps read no number, from the third on."""

    num_checked = 0

    def train_step(self, step: Any) -> None:
        if self.state.step < 2:
            super().train_step(step)
            return
        with _NoSync(self.timer.stack):
            super().train_step(step)
        self.num_checked += 1


def weighted(outputs: Tensor, targets: Tensor) -> tuple[Tensor, Tensor]:
    losses = nn.functional.cross_entropy(outputs, targets, reduction="none")
    return losses, 1.0 + (targets % 3).to(losses.dtype)


@pytest.mark.parametrize("settings", OPTIMIZERS)
@pytest.mark.parametrize("loss", [None, weighted])
@pytest.mark.parametrize("more", [{}, {"on_nonfinite": "skip", "ema_decay": 0.9}])
def test_a_step_reads_no_number_of_the_device(
    world: World, settings: dict[str, Any], loss: Any, more: dict[str, Any]
) -> None:
    trainer = WithoutSync(
        Normed(),
        some(NUM_SAMPLES),
        some(29, "val"),
        config_of(clip_grad_norm=0.5, micro_batch_size=8, **settings, **more),
        world=world,
        strategy=Deferred,
        loss=loss,
    )
    trainer.fit()
    assert trainer.num_checked == 8


class Rare(Callback):
    """Lets metrics be gathered rarely, as where steps are short."""

    def on_metrics(self, trainer: Any, steps: Any) -> None:
        trainer.pending._sync_every = 100


@pytest.mark.parametrize("place", [0, 1, 2, 4])
def test_a_bad_loss_stops_with_the_weights_before_it(world: World, place: int) -> None:
    bad = int(epoch_order(NUM_SAMPLES, 1, 2)[place * BATCH_SIZE + 2])
    found = []
    for strategy in (Immediate, Deferred):
        trainer, history = trainer_of(world, strategy, epochs=2, optimizer="adamw")
        trainer.callbacks.append(Rare())
        inputs = trainer.train_data.tensors[0]
        inputs_before = inputs.clone()

        class Spoil(Callback):
            """Spoils a sample after the first epoch."""

            def on_epoch_end(self, trainer: Any, epoch: Any) -> None:
                loader = trainer.engine.data.train_loader
                loader.samples.inputs[bad] = 99.0

        trainer.callbacks.append(Spoil())
        with pytest.raises(NonFiniteError) as caught:
            trainer.fit()
        assert torch.equal(inputs, inputs_before) or inputs[bad].max() == 99.0
        weights = dict(trainer.engine.strategy.named_weights())
        state = trainer.state
        found.append(
            (str(caught.value), weights, history, state.step, state.epoch_step)
        )
    (words, weights, history, *where), (said, others, history2, *there) = found
    assert f"in step {6 + place} (epoch 2) on rank " in words
    assert f" {bad}" in words
    assert said == words
    assert where == there
    assert same(rows_of(history), rows_of(history2))
    assert len(history2.steps) == 5 + place
    for name, weight in weights.items():
        assert torch.equal(weight, others[name]), name


def test_a_skipped_step_is_told_once(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING, logger="mpitrain"):
        trainer, _ = trainer_of(world, Deferred, bad=5, on_nonfinite="skip")
        trainer.fit()
    told = [it for it in caplog.messages if "is skipped: the loss is nan" in it]
    assert len(told) == (2 if world.is_rank_zero else 0)
    assert all(" 5" in it for it in told)
