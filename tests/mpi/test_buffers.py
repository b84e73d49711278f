"""Buffers that a module assigns anew: broadcast, averaged, restored as others are."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from reference_training import NUM_SAMPLES, Net, config_of, some, trained
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from mpitrain.config import TrainConfig
from mpitrain.errors import UsageError
from mpitrain.mpi.collectives import world_comm
from mpitrain.mpi.world import World
from mpitrain.train.callbacks import Callback
from mpitrain.train.checks import warn_of_converted
from mpitrain.train.trainer import Trainer

pytestmark = pytest.mark.mpi


class Assigning(Net):
    """Has a running mean of its inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(64, dtype=torch.float64))

    def forward(self, images: Tensor) -> Tensor:
        if self.training:
            mean = images.detach().flatten(1).double().mean(0)
            self.mean = 0.5 * self.mean + 0.5 * mean
        return super().forward(images)


class Compare(Callback):
    """Compares the buffer of all ranks before each step's first pass."""

    def on_batch_start(self, trainer: Any, batch: Any) -> None:
        means = world_comm().allgather(trainer.model.mean.tolist())
        assert means == means[:1] * len(means)


def test_all_ranks_begin_a_step_with_the_same_buffers(world: World) -> None:
    trainer = Trainer(
        *(Assigning(), some(NUM_SAMPLES), some(29, "val"), config_of()), world=world
    )
    trainer.callbacks.append(Compare())
    trainer.fit()
    assert trainer.model.mean.count_nonzero() > 30


def test_the_average_follows_the_buffer(world: World) -> None:
    model = Assigning()
    _, averages = trained(world, model=model, ema_decay=0.5)
    if world.is_rank_zero:
        assert averages["mean"].count_nonzero() > 30
        assert not torch.equal(averages["mean"], model.mean)


def test_a_step_that_is_skipped_leaves_no_nan_in_a_buffer(world: World) -> None:
    images, labels = (tensor.clone() for tensor in some(NUM_SAMPLES).tensors)
    images[3] = torch.nan
    losses, state = trained(
        world,
        model=Assigning(),
        data=TensorDataset(images, labels),
        on_nonfinite="skip",
    )
    if world.is_rank_zero:
        assert state["mean"].isfinite().all()
    assert sum(loss != loss for loss in losses) <= 2  # one step of each epoch


class Centered(nn.Module):
    """A loss with a running mean, and with weights of classes that do not change."""

    def __init__(self, *, moves: bool, assigns: bool) -> None:
        super().__init__()
        self.register_buffer("center", torch.zeros(10))
        self.register_buffer("weights", torch.full((10,), torch.nan))
        self.moves, self.assigns = moves, assigns

    def forward(self, outputs: Tensor, targets: Tensor) -> Tensor:
        if self.moves:
            moved = self.center.lerp(outputs.detach().mean(0), 0.5)
            self.center = moved if self.assigns else self.center.copy_(moved)
        losses = F.cross_entropy(outputs - self.center, targets, reduction="none")
        assert isinstance(losses, Tensor)
        return losses


@pytest.mark.parametrize("bitwise", [False, True])
@pytest.mark.parametrize("assigns", [False, True])
def test_a_loss_whose_buffers_move_is_refused(
    world: World, bitwise: bool, assigns: bool, caplog: pytest.LogCaptureFixture
) -> None:
    def fit(*, moves: bool) -> None:
        data, config = some(NUM_SAMPLES), config_of(epochs=1, bitwise=bitwise)
        loss = Centered(moves=moves, assigns=assigns)
        Trainer(Net(), data, data, config, world=world, loss=loss).fit()

    fit(moves=False)
    if world.world_size > 1 or bitwise:
        words = "buffers of the loss change in a step: center; expected them in the mod"
        with pytest.raises(UsageError, match=words):
            fit(moves=True)
    else:
        fit(moves=True)
        assert "they are in no checkpoint" in caplog.text


class Setting(Net):
    """Has a buffer that the first pass sets, and one that grows."""

    def __init__(self, *, is_persistent: bool) -> None:
        super().__init__()
        self.register_buffer("center", None, persistent=is_persistent)
        empty = torch.zeros(0, dtype=torch.float64)
        self.blocks[0].register_buffer("seen", empty, persistent=is_persistent)

    def forward(self, images: Tensor) -> Tensor:
        mean = images.detach().flatten(1).mean(0)
        if self.center is None:
            self.center = mean
        self.blocks[0].seen = torch.cat([self.blocks[0].seen, mean[:1]])
        return super().forward(images - self.center.view(images.shape[1:]))


@pytest.mark.parametrize(
    "settings", [{}, {"bitwise": True}, {"strategy": "fsdp"}], ids=str
)
def test_a_buffer_that_the_first_step_sets_or_grows_is_refused(
    world: World, settings: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    trained(world, model=Setting(is_persistent=False), **settings)
    assert "since the stage began" not in caplog.text
    model = Setting(is_persistent=True)
    if world.world_size > 1 or "bitwise" in settings:
        words = "since the stage began: blocks.0.seen, center; expected tensors of"
        with pytest.raises(UsageError, match=words):
            trained(world, model=model, **settings)
    else:
        trained(world, model=model, **settings)
        assert caplog.text.count("since the stage began") == 1


def test_weights_and_buffers_whose_dtype_changes_are_named(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10)).to(torch.bfloat16)
    model.register_buffer("time", torch.tensor([1e9 + 1], dtype=torch.float64))
    trained(world, model=model, epochs=1, precision="fp32")
    words = "bfloat16 and are trained as float32, frozen ones too: 1.weight, 1.bias. "
    for of_kind in (f"{words}precision='bf16'", "float64 and", "too: time. precision"):
        assert (of_kind in caplog.text) == world.is_rank_zero
    caplog.clear()
    trained(world, model=nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), epochs=1)
    assert "trained as float32" not in caplog.text


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_who_computes_in_16_bits_is_not_told_to(
    caplog: pytest.LogCaptureFixture, precision: Any
) -> None:
    model = nn.Linear(2, 2, dtype=torch.bfloat16)
    warn_of_converted(model, TrainConfig(precision=precision))
    (said,) = caplog.messages
    assert said.endswith("too: weight, bias") == (precision == "bf16")
