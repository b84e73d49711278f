"""Models that were built on torch's device meta: weights are made block by block."""

from __future__ import annotations

import functools
import logging
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from reference_training import Stops, config_of, some
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard

import mpitrain
from mpitrain.checkpoint.tensors import split_state
from mpitrain.data.randomness import random_state
from mpitrain.mpi.collectives import world_comm
from mpitrain.mpi.world import World
from mpitrain.train.meta_device import WeightMaker

pytestmark = pytest.mark.mpi


class Scaled(nn.Module):
    """Has a buffer, which it makes with its weight."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(8))
        self.register_buffer("scale", torch.empty(8), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.weight)
        self.scale.fill_(2.0)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * self.scale


class FromNumpy(nn.Linear):
    """Draws its weights of NumPy."""

    def reset_parameters(self) -> None:
        with torch.no_grad():
            self.weight.copy_(torch.from_numpy(np.random.normal(size=(3, 3))))


class Net(nn.Module):
    """Has attention, tied weights, a frozen one, and one that is marked."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8, bias=False)
        self.blocks = nn.Sequential(
            *(
                nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
                for _ in range(2)
            )
        )
        self.scaled = Scaled()
        self.last = nn.Linear(8, 8)
        self.last.weight = self.first.weight
        self.head = nn.Linear(8, 10)
        self.scaled.weight.requires_grad_(False)
        self.head.weight.is_marked = True  # type: ignore[assignment]

    def forward(self, images: Tensor) -> Tensor:
        found = self.blocks(self.first(images.reshape(-1, 8, 8)))
        return self.head(self.last(self.scaled(found)).mean(1))


def net(device: str) -> nn.Module:
    torch.manual_seed(3)
    with torch.device(device):
        return Net()


class Begin(mpitrain.Callback):
    """Keeps the weights that a training begins with."""

    def __init__(self, function: Callable[[Any], Any] | None = None) -> None:
        self.function, self.state = function, {}
        self.states: list[dict[str, Tensor]] = []

    def setup(self, trainer: mpitrain.Trainer) -> None:
        if self.function:
            self.function(trainer)

    def on_fit_start(self, trainer: mpitrain.Trainer) -> None:
        self.is_marked = getattr(trainer.model.head.weight, "is_marked", False)

    def on_stage_start(self, trainer: mpitrain.Trainer) -> None:
        self.state = trainer.state_dict()
        self.states.append(self.state)


def train(
    world: World,
    model: nn.Module,
    *callbacks: mpitrain.Callback,
    function: Callable[[Any], Any] | None = None,
    loss: Any = None,
    **settings: Any,
) -> tuple[Begin, dict[str, Tensor]]:
    begin = Begin(function)
    trainer = mpitrain.Trainer(
        model,
        some(40),
        None,
        config_of(**settings),
        world=world,
        loss=loss,
        callbacks=[begin, *callbacks],
    )
    trainer.fit()
    return begin, trainer.state_dict()


def assert_close(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in found.items():
        torch.testing.assert_close(
            value, expected[name], rtol=1e-9, atol=1e-12, msg=name
        )


@pytest.mark.parametrize("strategy", ["auto", "fsdp"])
@pytest.mark.parametrize("bitwise", [False, True])
def test_it_trains_as_a_model_on_the_cpu(
    world: World, strategy: str, *, bitwise: bool
) -> None:
    settings = {"strategy": strategy, "bitwise": bitwise}
    model = net("meta")
    begin, found = train(world, model, **settings)
    assert model.last.weight is model.first.weight  # type: ignore[union-attr]
    assert not model.scaled.weight.requires_grad  # type: ignore[union-attr]
    same = net("cpu")
    state = world_comm().bcast(begin.state)
    same.load_state_dict(state)
    _, expected = train(world, same, **settings)
    if world.is_rank_zero:
        assert_close(found, expected)


def test_the_first_weights_depend_on_seed_and_name_alone(world: World) -> None:
    states = [
        train(world, net("meta"), strategy=strategy)[0].state
        for strategy in ("auto", "fsdp")
    ]
    alone = net("meta")
    maker = WeightMaker(alone, "cpu", config_of().seed, lambda _: None)
    maker(alone.head)  # another order
    maker(alone)
    if world.is_rank_zero:
        for state in states:
            assert_close(state, dict(alone.double().state_dict()))
        other = net("meta")
        WeightMaker(other, "cpu", 5, lambda _: None)(other)
        assert not torch.equal(other.head.weight, alone.float().head.weight)  # type: ignore[arg-type, union-attr]
    attention = alone.blocks[0].self_attn  # type: ignore[index, union-attr]
    assert not attention.out_proj.bias.any()  # as its constructor leaves it
    assert float(alone.scaled.scale.mean()) == 2.0  # type: ignore[operator, union-attr]


def test_marks_of_weights_stay_with_ddp(world: World) -> None:
    assert train(world, net("meta"))[0].is_marked


def test_the_process_has_its_random_numbers_as_before(world: World) -> None:
    del world
    models = [net("meta"), net("meta")]
    for model in models:
        model.drawn = FromNumpy(3, 3, bias=False, device="meta")
    before = random_state()
    for model in models:
        WeightMaker(model, "cpu", 1, lambda _: None)(model)
    assert random_state() == before
    assert torch.equal(*(model.drawn.weight for model in models))


@pytest.mark.parametrize("strategy", ["auto", "fsdp"])
def test_weights_are_loaded_in_setup_and_a_checkpoint_after_them(
    world: World, strategy: str
) -> None:
    folder = Path(world_comm().bcast(tempfile.mkdtemp()))
    plain = net("cpu").double()
    if world.is_rank_zero:
        torch.save(plain.state_dict(), folder / "weights.pt")
    world_comm().barrier()

    def load(trainer: mpitrain.Trainer) -> None:
        line = mpitrain.load_weights(trainer.model, folder / "weights.pt")
        assert "tensors" in line

    run = functools.partial(train, world, function=load, strategy=strategy, epochs=2)
    with pytest.raises(mpitrain.Stopped):
        run(net("meta"), mpitrain.Checkpointer(folder / strategy), Stops(3))
    begin, found = run(net("meta"), mpitrain.Checkpointer(folder / strategy))
    if world.is_rank_zero:
        assert not torch.equal(
            begin.state["head.weight"], plain.state_dict()["head.weight"]
        )
    begin, expected = run(net("cpu"))
    if world.is_rank_zero:
        assert_close(begin.state, dict(plain.state_dict()))
        assert_close(found, expected)


@pytest.mark.parametrize("is_sharded", [False, True])
def test_a_nan_of_any_shard_is_said_by_rank_zero_alone(
    world: World, caplog: pytest.LogCaptureFixture, *, is_sharded: bool
) -> None:
    folder = Path(world_comm().bcast(tempfile.mkdtemp()))
    state = net("cpu").state_dict()
    state["head.weight"][-1, -1] = torch.nan  # of the last rank's shard
    if world.is_rank_zero:
        torch.save(state, folder / "weights.pt")
    world_comm().barrier()
    model = net("cpu")
    if is_sharded:
        fully_shard(model)
    with caplog.at_level(logging.WARNING, "mpitrain"):
        mpitrain.load_weights(model, folder / "weights.pt")
    assert len(caplog.messages) == world.is_rank_zero, caplog.messages
    assert all("head.weight has NaN" in it for it in caplog.messages)


@pytest.mark.parametrize("strategy", ["auto", "fsdp"])
def test_it_is_probed_first(world: World, strategy: str) -> None:
    settings = {"strategy": strategy, "probe_epochs": 1, "epochs": 1}
    begin, found = train(world, net("meta"), **settings)
    same = net("cpu")
    same.load_state_dict(world_comm().bcast(begin.states[0] if begin.states else None))
    _, expected = train(world, same, **settings)
    if world.is_rank_zero:
        assert len(begin.states) == 2
        assert_close(found, expected)


def test_with_fsdp_its_loss_may_be_a_part_of_it(world: World) -> None:
    """With ddp, which waits for the forward pass to use it, it is an error."""

    class WithLoss(Net):
        def __init__(self) -> None:
            super().__init__()
            self.loss = Scale()

    class Scale(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Linear(10, 10)

        def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
            return F.cross_entropy(self.scale(outputs), targets, reduction="none")

    def run(device: str, state: Any = None) -> tuple[Begin, dict[str, Tensor]]:
        with torch.device(device):
            model = WithLoss()
        if state is not None:
            model.load_state_dict(state)
        return train(world, model, strategy="fsdp", loss=model.loss)

    begin, found = run("meta")
    _, expected = run("cpu", world_comm().bcast(begin.state))
    if world.is_rank_zero:
        assert not torch.equal(
            found["loss.scale.weight"], begin.state["loss.scale.weight"]
        )
        assert_close(found, expected)


def test_a_module_that_cannot_make_its_numbers_is_named(world: World) -> None:
    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gain = nn.Parameter(torch.empty(8))

    for strategy in ("auto", "fsdp"):
        model = net("meta")
        with torch.device("meta"):
            model.scaled = Bare()
        with pytest.raises(mpitrain.UsageError, match=r"scaled, a Bare, has gain"):
            train(world, model, strategy=strategy)


def test_a_model_that_is_in_part_on_meta_is_refused(world: World) -> None:
    model = net("meta")
    model.head = nn.Linear(8, 10)
    with pytest.raises(mpitrain.UsageError, match=r"first.weight.*head.weight"):
        train(world, model)


def test_weights_do_not_vanish_on_meta(world: World) -> None:
    del world
    folder = Path(tempfile.mkdtemp())
    torch.save(net("cpu").state_dict(), folder / "weights.pt")
    with pytest.raises(mpitrain.DataError, match="on the device meta"):
        mpitrain.load_weights(net("meta"), folder / "weights.pt")
    with pytest.raises(mpitrain.UsageError, match=r"on the device meta, where \S+ has"):
        split_state(net("meta"))  # by which models are saved and restored
