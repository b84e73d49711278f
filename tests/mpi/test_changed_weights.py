"""Weights that a callback freezes, unfreezes, replaces or adds within a stage."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from reference_training import NUM_SAMPLES, Net, config_of, some
from torch import nn
from torch.nn.utils.prune import l1_unstructured

from mpitrain.errors import DataError, UsageError
from mpitrain.mpi.world import World
from mpitrain.train.callbacks import Callback
from mpitrain.train.metrics import EpochMetrics
from mpitrain.train.trainer import Trainer

pytestmark = pytest.mark.mpi

STRATEGIES: dict[str, dict[str, Any]] = {
    "auto": {},
    "fsdp": {"strategy": "fsdp"},
    "bitwise": {"bitwise": True},
    "bitwise fsdp": {"bitwise": True, "strategy": "fsdp"},
    "zero": {"shard_optimizer": True},
}


def frozen() -> Net:
    """A net whose second block and head are trained."""
    model = Net()
    model.blocks[0].requires_grad_(False)
    return model


def unfreeze(model: nn.Module, trainer: Trainer) -> None:
    model.blocks[0].requires_grad_(True)  # type: ignore[union-attr,operator]


def freeze(model: nn.Module, trainer: Trainer) -> None:
    model.blocks[1].requires_grad_(False)  # type: ignore[union-attr,operator]


def unfreeze_with_a_group(model: nn.Module, trainer: Trainer) -> None:
    unfreeze(model, trainer)
    weights = list(model.blocks[0].parameters())  # type: ignore[union-attr]
    trainer.engine.optimizer.optimizer.add_param_group({"params": weights})


def add_a_strange_group(model: nn.Module, trainer: Trainer) -> None:
    weights = [nn.Parameter(torch.zeros(3))]
    trainer.engine.optimizer.optimizer.add_param_group({"params": weights})


def replace(model: nn.Module, trainer: Trainer) -> None:
    new = nn.Parameter(torch.zeros(10, dtype=torch.float64))
    model.head.bias = new  # type: ignore[union-attr]


def replace_the_head(model: nn.Module, trainer: Trainer) -> None:
    model.head = nn.Linear(64, 3)  # also of another type and shape


def add(model: nn.Module, trainer: Trainer) -> None:
    model.extra = nn.Linear(2, 2)


CHANGES: dict[Callable[[nn.Module, Trainer], None], str] = {
    unfreeze: r"now trained: blocks\.0\.0\.weight, blocks\.0\.0\.bias\.",
    unfreeze_with_a_group: r"now trained: blocks\.0\.0\.weight, blocks\.0\.0\.bias\.",
    freeze: r"now frozen: blocks\.1\.0\.weight, blocks\.1\.0\.bias\.",
    add_a_strange_group: r"in the optimizer: a weight that is not in the model\.",
    replace: r"replaced: head\.bias\.",
    replace_the_head: r"replaced: head\.weight, head\.bias\.",
    add: r"now trained: extra\.weight, extra\.bias\.",
}


class Changes(Callback):
    """Changes weights at one hook."""

    def __init__(
        self, change: Callable[[nn.Module, Trainer], None], hook: str = "on_epoch_end"
    ) -> None:
        self.change, self.hook = change, hook
        self.is_done = False

    def _call(self, trainer: Trainer, hook: str) -> None:
        if hook == self.hook and not self.is_done:
            self.is_done = True
            self.change(trainer.model, trainer)

    def on_stage_start(self, trainer: Trainer) -> None:
        self._call(trainer, "on_stage_start")

    def on_step_end(self, trainer: Trainer) -> None:
        self._call(trainer, "on_step_end")

    def on_epoch_end(self, trainer: Trainer, epoch: EpochMetrics) -> None:
        self._call(trainer, "on_epoch_end")


def fit(world: World, callback: Callback, model: nn.Module, **settings: Any) -> Trainer:
    trainer = Trainer(
        model,
        some(NUM_SAMPLES),
        some(29, "val"),
        config_of(**settings),
        world=world,
        callbacks=[callback],
    )
    trainer.fit()
    return trainer


PAIRS = [
    *((change, "auto") for change in CHANGES),
    *((change, strategy) for strategy in STRATEGIES for change in (unfreeze, replace)),
]


@pytest.mark.parametrize(("change", "strategy"), dict.fromkeys(PAIRS))
def test_weights_that_change_within_a_stage_are_an_error(
    world: World, change: Callable[[nn.Module, Trainer], None], strategy: str
) -> None:
    with pytest.raises(UsageError, match=CHANGES[change]):
        fit(world, Changes(change), frozen(), **STRATEGIES[strategy])


def test_weights_are_not_unfrozen_before_the_first_step_or_between_stages(
    world: World,
) -> None:
    """Their gradients would not be reduced; the next stage would freeze them again."""
    for callback in (Changes(unfreeze, "on_stage_start"), Changes(unfreeze)):
        with pytest.raises(UsageError, match=CHANGES[unfreeze]):
            fit(world, callback, frozen(), probe_epochs=1, epochs=1)


@pytest.mark.parametrize("strategy", ["auto", "fsdp", "bitwise"])
def test_weights_may_be_frozen_before_the_first_step(
    world: World, strategy: str
) -> None:
    """By a callback, or by the model's train()."""

    class Freezes(Net):
        def train(self, mode: bool = True) -> Net:
            super().train(mode)
            self.blocks[1].requires_grad_(False)
            return self

    states = []
    for callback, model in (
        (Changes(freeze, "on_stage_start"), Net()),
        (Callback(), Freezes()),
    ):
        before = model.blocks[1][0].weight.detach().double().clone()
        trainer = fit(world, callback, model, **STRATEGIES[strategy])
        states.append(trainer.state_dict())
        if world.is_rank_zero:
            assert torch.equal(states[-1]["blocks.1.0.weight"], before)
            assert not torch.equal(
                states[-1]["head.weight"], states[0]["head.weight"] * 0
            )
    if world.is_rank_zero:
        for name, value in states[0].items():
            torch.testing.assert_close(states[1][name], value)


def test_a_callback_may_prune(world: World) -> None:
    """The weight has another name then, and is the same object."""

    def prune(model: nn.Module, trainer: Trainer) -> None:
        l1_unstructured(model.head, "weight", 0.5)

    model = Net()
    fit(world, Changes(prune), model)
    assert (model.head.weight == 0).sum() >= model.head.weight.numel() // 2
    assert model.head.weight_orig.requires_grad


def test_models_that_ranks_have_frozen_differently_are_refused(world: World) -> None:
    if world.world_size == 1:
        return
    with pytest.raises(DataError, match="the model differs between ranks"):
        fit(world, Callback(), Net() if world.rank else frozen())
