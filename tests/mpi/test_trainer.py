"""The trainer against a training written out by hand on one process, at any size."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from reference_training import Net, by_hand, config_of, same, some, trained
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from mpitrain.errors import UsageError
from mpitrain.mpi.world import World
from mpitrain.tasks.image_classification import mixing
from mpitrain.train.callbacks import Callback
from mpitrain.train.trainer import Trainer

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"micro_batch_size": 3},
        {"strategy": "fsdp"},
        {"strategy": "fsdp", "micro_batch_size": 2},
        {"strategy": "fsdp", "activation_checkpointing": True},
        {"activation_checkpointing": True},
        {"shard_optimizer": True},
        {"channels_last": "always"},
        {"deterministic": False, "num_workers": 1},
    ],
    ids=str,
)
def test_a_training_is_that_of_one_process(world: World, settings: Any) -> None:
    same(trained(world, **settings), by_hand())


def test_weights_shared_within_nodes_alone_train_the_same(world: World) -> None:
    half = world.world_size // 2
    if world.world_size % 2 and half:
        with pytest.raises(UsageError, match="as many ranks on every node"):
            trained(on_nodes(world, half), strategy="fsdp", hybrid_sharding=True)
        return
    found = trained(on_nodes(world, half), strategy="fsdp", hybrid_sharding=True)
    same(found, by_hand())


def on_nodes(world: World, first: int) -> World:
    """The same ranks as if they were on two nodes, `first` of them on node 0."""
    everyone = range(world.world_size)
    nodes = tuple(
        replace(world.nodes[0], hostname=f"h{number}", ranks=tuple(ranks))
        for number, ranks in enumerate((everyone[:first], everyone[first:]))
        if ranks
    )
    node_rank = next(i for i, node in enumerate(nodes) if world.rank in node.ranks)
    return replace(
        world,
        nodes=nodes,
        node_rank=node_rank,
        local_rank=nodes[node_rank].ranks.index(world.rank),
        local_world_size=len(nodes[node_rank].ranks),
    )


def test_settings_that_a_trainer_ignores_are_named_once(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    trained(world, epochs=1)
    assert "ignores" not in caplog.text
    trained(world, epochs=1, name="x", log=("csv",), profile=3, keep_checkpoints=1)
    said = "Trainer ignores keep_checkpoints, log, name, profile of its TrainConfig"
    assert caplog.text.count(said) == int(world.is_rank_zero)
    config = config_of(epochs=1, log=("csv",))
    data = some(32)
    Trainer(Net(), data, data, config, world=world, callbacks=[]).fit()
    said = "Trainer ignores log of its TrainConfig"
    assert caplog.text.count(said) == int(world.is_rank_zero)


@pytest.mark.parametrize("strategy", ["auto", "fsdp"])
@pytest.mark.parametrize("micro", [None, 5])
def test_in_float32_the_first_20_steps_agree(
    world: World, strategy: str, micro: int | None
) -> None:
    settings: dict[str, Any] = {"data": some(320), "epochs": 1, "warmup_epochs": 0.5}
    exact, _ = trained(world, **settings)
    found, _ = trained(
        world, precision="fp32", strategy=strategy, micro_batch_size=micro, **settings
    )
    assert len(exact) == 20 + 1
    assert found[:20] == pytest.approx(exact[:20], rel=1e-4)


def test_label_smoothing_and_clipping_are_torchs(world: World) -> None:
    hand = by_hand(smoothing=0.1, longest=0.5)
    for strategy in ("auto", "fsdp"):
        found = trained(
            world, label_smoothing=0.1, clip_grad_norm=0.5, strategy=strategy
        )
        assert found[0] == pytest.approx(hand[0], rel=1e-7)  # torch adds 1e-6 to a norm


@pytest.mark.parametrize(
    "flags", [{"mixup": 0.4}, {"cutmix": 1.0}, {"mixup": 1.0, "cutmix": 1.0}]
)
@pytest.mark.parametrize("micro", [None, 3])
def test_samples_are_mixed_with_the_one_before_them_in_the_step(
    world: World, flags: dict[str, float], micro: int | None
) -> None:
    config = config_of(**flags)

    def prepare(x: Tensor, y: Tensor, epoch: int, step: int) -> Any:
        mix = mixing.draw_mix(config, epoch, step, x)
        assert mix is not None
        mixed = mix.apply(torch.cat([x[-1:], x]))
        before = y.roll(1)

        def loss(model: nn.Module) -> Tensor:
            outputs = model(mixed)
            own, other = (F.cross_entropy(outputs, it) for it in (y, before))
            return mix.weight * own + (1 - mix.weight) * other

        return loss

    same(trained(world, micro_batch_size=micro, **flags), by_hand(prepare))


@pytest.mark.parametrize("strategy", ["auto", "fsdp"])
def test_the_average_of_the_weights_is_what_is_judged_and_saved(
    world: World, strategy: str
) -> None:
    averages: list[nn.Module] = []

    def after_step(model: nn.Module) -> None:
        if not averages:
            averages.append(Net().double())
        with torch.no_grad():
            for average, weight in zip(
                averages[0].parameters(), model.parameters(), strict=True
            ):
                average.lerp_(weight, 1 - 0.9)

    losses, _ = by_hand(after_step=after_step)
    found, state = trained(world, ema_decay=0.9, strategy=strategy)
    assert found[: 2 * 5] == pytest.approx(losses[: 2 * 5], rel=1e-9)
    x, y = some(29, "val").tensors
    with torch.no_grad():
        expected = F.cross_entropy(averages[0](x.double()), y).item()
    assert found[-1] == pytest.approx(expected, rel=1e-9)
    if world.rank == 0:
        for name, value in averages[0].state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("strategy", ["auto", "fsdp"])
def test_a_hook_of_a_validation_finds_the_average_too(
    world: World, strategy: str
) -> None:
    class Asks(Callback):
        def __init__(self) -> None:
            self.states: list[Any] = []

        def on_validation_batch_end(self, trainer: Trainer) -> None:
            self.states.append(trainer.state_dict())
            trainer.evaluate()

        def on_validation_end(self, trainer: Trainer, epoch: Any) -> None:
            self.states.append(trainer.state_dict())

    asks = Asks()
    trainer = Trainer(
        Net(),
        some(40),
        some(13, "val"),
        config_of(ema_decay=0.9, epochs=1, strategy=strategy),
        world=world,
        callbacks=[asks],
    )
    found = trainer.fit()
    assert trainer.evaluate().loss == found.loss
    if world.is_rank_zero:
        *others, expected = asks.states
        for name, value in expected.items():
            assert all(torch.equal(it[name], value) for it in others), name


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("strategy", ["auto", "fsdp"])
def test_sixteen_bits_learn_as_well(
    world: World, precision: str, strategy: str
) -> None:
    found, state = trained(
        world, precision=precision, strategy=strategy, data=some(500), epochs=6
    )
    exact, _ = trained(world, data=some(500), epochs=6)
    assert found[-1] == pytest.approx(exact[-1], abs=0.1)
    if world.rank == 0:
        assert {value.dtype for value in state.values()} == {torch.float32}


def test_batch_norm_takes_a_share_of_one_sample(world: World) -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10), nn.BatchNorm1d(10))
    found, _ = trained(
        world,
        model=model,
        global_batch_size=world.world_size,
        data=some(3 * world.world_size + 1),
    )
    assert np.isfinite(found).all()


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"strategy": "dp"}, "--strategy dp"),
        (
            {"strategy": "auto", "sync_batchnorm": True},
            "--sync-batchnorm: torch has it for GPUs alone",
        ),
        ({"strategy": "fsdp", "cpu_offload": True}, "in host memory already"),
    ],
)
def test_what_cannot_be_done_here_is_refused(
    world: World, settings: dict[str, Any], words: str
) -> None:
    if world.device != "cpu":
        pytest.skip("a GPU can")
    if settings["strategy"] == "dp" and world.world_size > 1:
        words = "--strategy dp is for one process, found"
    with pytest.raises(UsageError, match=words):
        trained(world, **settings)


def test_the_state_is_there_when_the_ranks_have_ended(world: World) -> None:
    """As a notebook asks for it: with an average, and of the model as it was judged."""
    trainer = Trainer(
        Net(), some(20), some(20), config_of(ema_decay=0.5, epochs=1), world=world
    )
    result = trainer.fit()
    model = Net().double()
    state = trainer.state_dict()
    if world.rank == 0:
        model.load_state_dict(state)
        x, y = some(20).tensors
        loss = F.cross_entropy(model(x.double()), y).item()
        assert result.loss == pytest.approx(loss, rel=1e-9)


def test_a_loss_and_metrics_of_ones_own(world: World) -> None:
    """Regression: targets are numbers, and a loss of pixels is averaged per sample."""
    torch.manual_seed(0)
    inputs, targets = torch.randn(30, 4), torch.randn(30, 2)
    model = nn.Linear(4, 2)
    alone = copy.deepcopy(model).double()

    class Regression(Trainer):
        def loss(self, outputs: Any, targets: Any) -> Tensor:
            return F.mse_loss(outputs, targets, reduction="none")

        def metrics(self, outputs: Any, targets: Any) -> dict[str, Tensor]:
            return {"off_by": (outputs - targets).abs()}

    data = TensorDataset(inputs, targets)
    trainer = Regression(model, data, data, config_of(epochs=1), world=world)
    result = trainer.fit()
    assert set(result.values) == {"loss", "off_by"}
    with torch.no_grad():
        outputs = model(inputs.to(world.device).double())
        expected = F.mse_loss(outputs.cpu(), targets.double())
    assert result.loss == pytest.approx(expected.item(), rel=1e-9)
    assert not torch.equal(alone.weight, model.weight.cpu())
