"""With ``bitwise`` a training has the bits of one process, written out."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from reference_training import (
    BATCH_SIZE,
    EPOCHS,
    NUM_SAMPLES,
    Net,
    config_of,
    some,
    trained,
)
from torch import Tensor, nn

from mpitrain.data.sharding import MicroBatchAssignment, epoch_order
from mpitrain.errors import UsageError
from mpitrain.mpi.world import World
from mpitrain.train.callbacks import Callback
from mpitrain.train.optimizer import build_optimizer
from mpitrain.train.strategy.bitwise import BitwiseDDPStrategy, seed_micro_batch
from mpitrain.train.strategy.pairwise import FlatGradients, nodes_of
from mpitrain.train.trainer import Trainer

pytestmark = pytest.mark.mpi

MICRO_BATCH_SIZE = 2
SETTINGS: dict[str, Any] = {
    "precision": "fp32",
    "bitwise": True,
    "micro_batch_size": MICRO_BATCH_SIZE,
    "schedule": "constant",
    "warmup_epochs": 0,
    "balance": "off",
}


class Dropping(Net):
    """Draws random numbers, counts its calls, and has weights without a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(2, 2)
        self.norm = nn.BatchNorm1d(64)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("anew", torch.zeros(()))

    def forward(self, images: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            self.anew = self.anew + 1  # another tensor
        rows = F.dropout(self.norm(images.flatten(1)), 0.3, self.training)
        return self.head(self.blocks(rows))


def tree(values: list[list[Tensor]]) -> list[Tensor]:
    """Add in the order of a binary tree: pairs first, what is left over last."""
    if len(values) == 1:
        return values[0]
    half = 1 << (len(values) - 1).bit_length() - 1
    left, right = tree(values[:half]), tree(values[half:])
    return [one + other for one, other in zip(left, right, strict=True)]


def by_micro_batches(
    model: nn.Module, clip: float | None = None
) -> tuple[list[float], Any]:
    """The training of `reference_training.by_hand`, as ``bitwise`` adds it up."""
    inputs, targets = some(NUM_SAMPLES).tensors
    used = [w for name, w in model.named_parameters() if "unused" not in name]
    optimizer = torch.optim.SGD(
        used, lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-4
    )
    has_norm = any(isinstance(it, nn.BatchNorm1d) for it in model.modules())
    losses = []
    for epoch in range(1, EPOCHS + 1):
        order = epoch_order(NUM_SAMPLES, 1, epoch)
        for step, start in enumerate(range(0, NUM_SAMPLES, BATCH_SIZE)):
            rows = order[start : start + BATCH_SIZE]
            parts, totals = [], []
            before = {name: it.clone() for name, it in model.named_buffers()}
            first = before
            for number, at in enumerate(range(0, len(rows), MICRO_BATCH_SIZE)):
                chosen = torch.from_numpy(rows[at : at + MICRO_BATCH_SIZE])
                num = len(chosen)
                if has_norm and num == 1:  # batch norm needs two rows
                    chosen = chosen.repeat(2)
                for name, it in model.named_buffers():
                    it.copy_(before[name])
                seed_micro_batch(1, epoch, step, number)
                each = F.cross_entropy(
                    model(inputs[chosen].float()), targets[chosen], reduction="none"
                )
                total = each[:num].sum()
                model.zero_grad()
                (total * (1 / len(rows))).backward()
                parts.append([weight.grad.clone() for weight in used])
                totals.append(total.item())
                if not number:
                    first = {name: it.clone() for name, it in model.named_buffers()}
            for name, it in model.named_buffers():
                it.copy_(first[name])
            for weight, gradient in zip(used, tree(parts), strict=True):
                weight.grad = gradient
            if clip is not None:
                norm = math.hypot(*(float(weight.grad.norm()) for weight in used))
                if norm > clip:
                    for weight in used:
                        weight.grad *= clip / norm
            optimizer.step()
            losses.append(math.fsum(totals) / len(rows))
    return losses, model.state_dict()


@pytest.mark.parametrize("strategy", ["auto", "fsdp"])
def test_a_training_has_the_bits_of_one_process(world: World, strategy: str) -> None:
    """Without weights that FSDP does not know to be unused."""
    losses, state = trained(world, model=Net(), strategy=strategy, **SETTINGS)
    expected, weights = by_micro_batches(Net())
    assert losses[: len(expected)] == expected
    if world.is_rank_zero:
        for name, weight in weights.items():
            assert torch.equal(state[name], weight), name


@pytest.mark.parametrize("clip", [None, 0.5])
def test_dropout_buffers_and_unused_weights_have_the_bits_of_one_process(
    world: World, clip: float | None
) -> None:
    found = Dropping()
    losses, state = trained(world, model=found, clip_grad_norm=clip, **SETTINGS)
    expected, weights = by_micro_batches(Dropping(), clip)
    assert losses[: len(expected)] == expected
    if world.is_rank_zero:
        assert int(state["calls"]) == EPOCHS * math.ceil(NUM_SAMPLES / BATCH_SIZE)
        assert state["anew"] == state["calls"]
        for name, weight in weights.items():
            assert torch.equal(state[name], weight), name


def test_another_numbering_of_micro_batches_changes_no_bit(world: World) -> None:
    class Renumber(Callback):
        """Hands out the micro-batches otherwise after each step."""

        def on_step_end(self, trainer: Any) -> None:
            engine, step = trainer.engine, trainer.state.step
            speeds = tuple(
                1.0 + (rank * step) % 3 for rank in range(engine.world.world_size)
            )
            assignment = MicroBatchAssignment(
                world_size=engine.world.world_size, speeds=speeds
            )
            engine.strategy.assignment = assignment

    class Noise(Callback):
        def on_batch_start(self, trainer: Any, batch: Any) -> None:
            batch.inputs += torch.rand_like(batch.inputs)

    losses = {}
    for callbacks in ((Noise(),), (Noise(), Renumber())):
        trainer = Trainer(
            Dropping(),
            some(NUM_SAMPLES),
            some(29, "val"),
            config(),
            world=world,
            callbacks=callbacks,
        )
        found = trainer.fit()
        losses[len(callbacks)] = found.loss, trainer.engine.full_state_dict()
        assert trainer.state.num_samples == 0  # of the next epoch
        assert trainer.state.step == EPOCHS * math.ceil(NUM_SAMPLES / BATCH_SIZE)
    assert losses[1][0] == losses[2][0]
    if world.is_rank_zero:
        for name, weight in losses[1][1].items():
            assert torch.equal(losses[2][1][name], weight), name


def config() -> Any:
    return config_of(**SETTINGS)


def test_a_probe_and_then_all_has_the_same_bits_with_fsdp(world: World) -> None:
    settings = {**SETTINGS, "probe_epochs": 1, "epochs": 1}
    found = [trained(world, strategy=it, **settings) for it in ("auto", "fsdp")]
    assert found[0][0] == found[1][0]
    if world.is_rank_zero:
        for name, weight in found[0][1].items():
            assert torch.equal(found[1][1][name], weight), name


def test_evaluation_has_the_same_bits_as_on_one_rank(world: World) -> None:
    class Drawing(Net):
        """Draws random numbers in evaluation, too."""

        def forward(self, images: Tensor) -> Tensor:
            return super().forward(images * torch.rand_like(images))

    data = some(NUM_SAMPLES), some(61, "val")
    trainer = Trainer(Drawing(), *data, config(), world=world, callbacks=())
    trainer.fit()
    found = trainer.evaluate()
    model = trainer.engine.model.eval()
    inputs, targets = some(61, "val").tensors
    sums = []
    for number, at in enumerate(range(0, 61, MICRO_BATCH_SIZE)):
        rows = slice(at, at + MICRO_BATCH_SIZE)
        seed_micro_batch(1, 0, 0, number)
        with torch.no_grad():
            outputs = model(inputs[rows].float())
            each = F.cross_entropy(outputs, targets[rows], reduction="none")
        sums.append(each.double().sum().item())
    assert found.loss == math.fsum(sums) / 61


def test_each_rank_needs_a_micro_batch(world: World) -> None:
    if world.world_size > 2:
        words = "into 2 micro-batches of 2, found . ranks(?s:.*)at most 2 ranks"
        with pytest.raises(UsageError, match=words):
            trained(world, **SETTINGS, global_batch_size=4)


def test_data_of_unknown_size_are_refused(world: World) -> None:
    from test_trainer_data import Streamed

    with pytest.raises(UsageError, match="needs the samples of a step beforehand"):
        trained(world, data=Streamed(NUM_SAMPLES), **SETTINGS)
    data = some(NUM_SAMPLES), some(29, "val")
    trainer = Trainer(Net(), *data, config(), world=world, callbacks=())
    trainer.fit()
    with pytest.raises(UsageError, match="needs the samples of a step beforehand"):
        trainer.test(Streamed(29))


@pytest.mark.parametrize("is_bitwise", [False, True])
def test_a_model_without_weights_to_train_is_refused(
    world: World, is_bitwise: bool
) -> None:
    model = Net().requires_grad_(requires_grad=False)
    with pytest.raises(UsageError, match="no weight that requires a gradient"):
        trained(world, model=model, **{**SETTINGS, "bitwise": is_bitwise})


class Turns(Net):
    """Has blocks that take turns, and a cache of another size on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.register_buffer("cache", torch.zeros(1), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        if self.training:
            self.calls += 1
            self.cache = torch.zeros(2 + dist.get_rank())
        return self.head(self.blocks[self.calls // 9 % 2](images.flatten(1)))


def test_a_weight_may_have_its_first_gradient_late(world: World) -> None:
    """Of SGD that is fused all weights had to have one in the first step."""
    for more in ({}, {"bitwise": False}, {"bitwise": False, "shard_optimizer": True}):
        losses, _ = trained(world, model=Turns(), **{**SETTINGS, **more})
        assert all(map(math.isfinite, losses))


def test_a_weight_that_takes_turns_is_refused_with_fsdp(world: World) -> None:
    if world.world_size == 1:
        trained(world, model=Turns(), strategy="fsdp", **SETTINGS)
        return
    with pytest.raises(UsageError, match="in some micro-batches only"):
        trained(world, model=Turns(), strategy="fsdp", **SETTINGS)


def test_a_later_training_has_its_threads_again(world: World) -> None:
    torch.set_num_threads(2)
    try:
        trained(world, **SETTINGS)
        assert torch.get_num_threads() == 1
        trained(world, deterministic=True)
        assert torch.get_num_threads() == 2
        assert torch.are_deterministic_algorithms_enabled()
        trained(world)
        assert not torch.are_deterministic_algorithms_enabled()
    finally:
        torch.set_num_threads(world.num_threads)


class Sparse(Net):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(17, 64, sparse=True)

    def forward(self, images: Tensor) -> Tensor:
        rows = self.table((images.flatten(1).sum(1) % 17).long())
        return self.head(rows)


class Synced(Net):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.SyncBatchNorm(64)


@pytest.mark.parametrize(
    ("model", "words"), [(Sparse, "found a sparse one"), (Synced, "nn.SyncBatchNorm")]
)
def test_a_model_whose_bits_depend_on_ranks_is_refused(
    world: World, model: type[Net], words: str
) -> None:
    with pytest.raises(UsageError, match=words):
        trained(world, model=model(), **{**SETTINGS, "weight_decay": 0.0})


def test_gradients_from_flat_memory_are_as_autograd_makes_them() -> None:
    """Else their norm is added in another order."""
    conv = nn.Conv2d(3, 8, 7).to(memory_format=torch.channels_last)
    weights = [*conv.parameters(), nn.Parameter(torch.ones(3, dtype=torch.complex64))]
    unused = nn.Parameter(torch.ones(5))
    conv(torch.rand(2, 3, 9, 9)).square().sum().backward()
    weights[-1].grad = torch.rand(3, dtype=torch.complex64)
    flat = FlatGradients([*weights, unused])
    memory = torch.full((flat.length,), torch.nan)
    flat.pack([*(weight.grad for weight in weights), None], memory)
    *found, nothing = flat.unpack(memory)
    assert nothing is None
    for mine, weight in zip(found, weights, strict=True):
        assert mine is not None
        assert weight.grad is not None
        assert torch.equal(mine, weight.grad)
        assert mine.stride() == weight.grad.stride()
        assert mine.data_ptr() % 16 == 0
        assert mine.norm() == weight.grad.norm()


@pytest.mark.parametrize("settings", [{}, {"momentum": 0.0}, {"weight_decay": 0.0}])
def test_sgd_of_whole_vectors_is_fused_and_has_the_bits_of_the_other(
    world: World, settings: dict[str, float]
) -> None:
    config = config_of(**{**SETTINGS, **settings})
    found = []
    for is_fused in (True, False):
        generator = torch.Generator().manual_seed(1)
        weights = [
            nn.Parameter(torch.randn(size, generator=generator))
            for size in (64, 640, 65, 77, 4096, 1000)
        ]
        strategy = BitwiseDDPStrategy(config, world)
        strategy.wrap(nn.ParameterList(weights))
        optimizer = build_optimizer(strategy, config, lr=0.0123)
        assert [group["fused"] for group in optimizer.param_groups] == [True, None]
        for group in optimizer.param_groups:
            group["fused"] = group["fused"] if is_fused else None
        for _ in range(5):
            for weight in weights:
                weight.grad = torch.randn(len(weight), generator=generator)
            optimizer.step()
        found.append(torch.cat(weights))
    assert torch.equal(*found)


@pytest.mark.parametrize("numbers", [range(8), range(3, 9), range(5, 5), range(1, 2)])
def test_the_nodes_of_a_range_cover_it(numbers: range) -> None:
    found = [
        number
        for level, position in nodes_of(numbers)
        for number in range(position << level, (position + 1) << level)
    ]
    assert found == [*numbers]
