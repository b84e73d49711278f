"""Sparse, complex, lazy and tied weights, reentrant checkpoints, objects as outputs."""

from __future__ import annotations

import contextlib
import tempfile
import types
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from reference_training import History, Net, config_of, some, trained
from test_wrapped_models import StopsOnce
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset

from mpitrain.checkpoint.checkpointer import Checkpointer
from mpitrain.errors import DataError, Stopped, UsageError
from mpitrain.mpi.world import World
from mpitrain.train.callbacks import Callback
from mpitrain.train.trainer import Trainer

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.filterwarnings("ignore:Sparse invariant checks:UserWarning"),
]


class Words(nn.Module):
    """Whose embedding has sparse gradients, or dense ones."""

    def __init__(self, *, sparse: bool) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.EmbeddingBag(50, 8, sparse=sparse, mode="sum")
        self.head = nn.Linear(8, 10)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.embedding(words))


def fit_words(
    world: World, *callbacks: Callback, sparse: bool, **settings: Any
) -> tuple[list[float], Trainer]:
    generator = torch.Generator().manual_seed(5)
    words = torch.randint(0, 50, (75, 6), generator=generator)
    data = TensorDataset(words, words[:, 0] % 10)
    history = History()
    trainer = Trainer(
        Words(sparse=sparse),
        data,
        data,
        config_of(**{"weight_decay": 0.0} | settings),
        world=world,
        callbacks=[history, *callbacks],
    )
    with contextlib.suppress(Stopped):
        trainer.fit()
    return history.losses, trainer


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"momentum": 0.0, "micro_batch_size": 3},
        {"optimizer": "adagrad", "clip_grad_norm": 0.1},
        {"shard_optimizer": True},
    ],
)
def test_sparse_gradients_train_as_dense_ones_do(
    world: World, settings: dict[str, Any]
) -> None:
    expected, _ = fit_words(world, sparse=False, **settings)
    found, _ = fit_words(world, sparse=True, **settings)
    assert found == pytest.approx(expected, rel=1e-9)


def test_padding_of_a_rank_without_samples_moves_no_row(world: World) -> None:
    """SparseAdam steps the rows that a gradient has, also where they are zeros."""
    words = torch.arange(60).reshape(10, 6) % 50
    labels = words[:, 0] % 10

    def optimizers(model: Any) -> list[Any]:
        return [
            torch.optim.SparseAdam(model.embedding.parameters(), lr=0.1),
            torch.optim.Adam(model.head.parameters(), lr=0.1),
        ]

    expected = Words(sparse=True).double()
    by_hand = optimizers(expected)
    steps = [[0, 1], [3], [4], [5, 3]]  # of sample 0 are the rows of padding
    for numbers in steps:
        expected.zero_grad()
        F.cross_entropy(expected(words[numbers]), labels[numbers]).backward()
        for it in by_hand:
            it.step()
    found = Words(sparse=True)
    Trainer(
        found,
        TensorDataset(words, labels),
        None,
        config_of(epochs=1, schedule="constant", warmup_epochs=0),
        world=world,
        optimizer=optimizers,
        batch_sampler=lambda seed, epoch: steps,
    ).fit()
    for name, value in expected.state_dict().items():
        torch.testing.assert_close(found.state_dict()[name], value)


@pytest.mark.parametrize("is_bitwise", [False, True])
def test_sparse_gradients_are_refused_with_fsdp(world: World, is_bitwise: bool) -> None:
    with pytest.raises(UsageError, match="embedding has sparse=True, and --strategy f"):
        fit_words(world, sparse=True, strategy="fsdp", bitwise=is_bitwise)


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad"])
def test_weight_decay_of_sparse_gradients_is_refused(
    world: World, optimizer: str
) -> None:
    with pytest.raises(UsageError, match=r"embedding\.weight is sparse.* --weight-dec"):
        fit_words(world, sparse=True, optimizer=optimizer, weight_decay=5e-4)


def test_a_sparse_momentum_comes_back_from_a_checkpoint(
    world: World, comm: Any
) -> None:
    _, whole = fit_words(world, sparse=True)
    with contextlib.ExitStack() as stack:
        folder = comm.bcast(stack.enter_context(tempfile.TemporaryDirectory()))
        for _ in range(2):
            run = Path(folder) / "run"
            callbacks = StopsOnce(4), Checkpointer(run)
            _, resumed = fit_words(world, *callbacks, sparse=True)
        comm.Barrier()
    assert resumed.resumed_from
    assert resumed.state.step == whole.state.step
    for name, value in whole.model.state_dict().items():
        assert torch.equal(resumed.model.state_dict()[name], value)


class Tied(Net):
    """Two blocks share a weight, another is the embedding of a third."""

    def __init__(self) -> None:
        super().__init__()
        blocks: Any = self.blocks
        blocks.append(nn.Sequential(nn.Linear(64, 64), nn.Tanh()))
        blocks[1][0].weight = blocks[0][0].weight
        self.first = nn.Linear(64, 64)
        self.first.weight = blocks[2][0].weight

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(self.first(images.flatten(1)))


def test_blocks_that_share_a_weight_train_the_same_with_fsdp(world: World) -> None:
    expected, state = trained(world, model=Tied())
    losses, found = trained(world, model=Tied(), strategy="fsdp")
    assert losses == pytest.approx(expected, rel=1e-9)
    if world.is_rank_zero:
        for name, value in state.items():
            torch.testing.assert_close(found[name], value)


class Heads(nn.Module):
    """Two heads of one shape; a sample takes one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 1), nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        first, out = x[:, 0] > 0, x.new_zeros(len(x), 1)
        for head, rows in ((self.a, first), (self.b, ~first)):
            if rows.any():
                out = out.index_add(0, rows.nonzero()[:, 0], head(x[rows]))
        return out


@pytest.mark.parametrize("strategy", ["ddp", "fsdp"])
def test_gradients_of_unlike_weights_are_not_added_up(
    world: World, strategy: str
) -> None:
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(3))
    data = TensorDataset(x, x.sum(1, keepdim=True))
    config = config_of(
        strategy=strategy, micro_batch_size=1, global_batch_size=world.world_size
    )
    is_refused = strategy == "fsdp" and world.world_size > 1
    told = r"--strategy fsdp: in this step [ab]\.weight has a gradient on rank \d"
    with (
        pytest.raises(UsageError, match=told)
        if is_refused
        else (contextlib.nullcontext())
    ):
        Trainer(
            Heads(),
            data,
            None,
            config,
            loss=lambda out, target: (out - target).square(),
            world=world,
        ).fit()


def test_an_error_within_fsdp_is_the_one_that_is_raised(world: World) -> None:
    """Such as one of a model that FSDP does not take, after it has begun to shard."""
    model = Net()
    model.register_parameter("scale", nn.Parameter(torch.tensor(1.0)))
    with pytest.raises(ValueError, match="scalar"):
        trained(world, model=model, strategy="fsdp")


class Complex(Net):
    """With weights of complex numbers, an odd number of them."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = nn.Parameter(torch.randn(5, dtype=torch.complex64))
        self.one, self.two = (nn.Parameter(torch.zeros(10)) for _ in range(2))

    def forward(self, images: Tensor) -> Tensor:
        scores = super().forward(images) + self.one + self.two
        return torch.cat([scores[:, :5] * self.turn.abs(), scores[:, 5:]], dim=1)


def test_complex_weights_train_the_same_with_bitwise(world: World) -> None:
    expected, _ = trained(world, model=Complex())
    found, _ = trained(world, model=Complex(), bitwise=True)
    assert found == pytest.approx(expected, rel=1e-9)


class Lazy(Net):
    """Learns its number of inputs from a batch."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LazyBatchNorm1d()
        self.head = nn.LazyLinear(10)  # type: ignore[assignment]

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(images.flatten(1))))


@pytest.mark.parametrize("strategy", ["auto", "fsdp"])
def test_lazy_modules_are_initialized_on_all_ranks(world: World, strategy: str) -> None:
    model = Lazy()
    torch.manual_seed(world.rank)
    _, state = trained(world, model=model, strategy=strategy)
    assert model.training
    if world.is_rank_zero:
        assert state["head.weight"].shape == (10, 64)
        assert state["norm.num_batches_tracked"] == 10


def test_a_lazy_model_that_one_batch_does_not_initialize_is_refused(
    world: World,
) -> None:
    with pytest.raises(UsageError, match="call the model once with a batch"):
        trained(world, model=nn.Sequential(nn.LazyLinear(3), nn.Linear(4, 3)))


class Reentrant(Net):
    """Checkpoints its activations as torch did at first."""

    def forward(self, images: Tensor) -> Tensor:
        hidden = images.flatten(1).requires_grad_()
        return self.head(checkpoint(self.blocks, hidden, use_reentrant=True))


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_reentrant_checkpoints_have_a_flag_and_an_error_that_names_it(
    world: World,
) -> None:
    expected, _ = trained(world)
    found, _ = trained(world, model=Reentrant(), find_unused_parameters="never")
    assert found == pytest.approx(expected, rel=1e-9)
    if world.world_size > 1:
        with pytest.raises(RuntimeError, match="ready only once") as caught:
            trained(world, model=Reentrant())
        assert "--find-unused-parameters never" in caught.value.__notes__[0]


def fit_objects(world: World, model: nn.Module, **settings: Any) -> None:
    def loss(outputs: Any, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs.scores, targets, reduction="none")

    config = config_of(**settings)
    sets = some(75), some(29, "val")
    Trainer(model, *sets, config, world=world, loss=loss, callbacks=[]).fit()


class Objects(nn.Module):
    """Returns an object, which FSDP does not look into."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 10)
        self.scale = nn.Parameter(torch.ones(10))

    def forward(self, images: Tensor) -> Any:
        return types.SimpleNamespace(scores=self.head(images.flatten(1)) * self.scale)


class Detached(Net):
    """Whose outputs do not depend on its weights, for autograd."""

    def forward(self, images: Tensor) -> Any:
        scores = super().forward(images).detach().requires_grad_()
        return types.SimpleNamespace(scores=scores)


NO_GRADIENT: dict[str, tuple[type[nn.Module], dict[str, Any]]] = {
    "fsdp": (Objects, {"strategy": "fsdp"}),
    "bitwise fsdp": (Objects, {"strategy": "fsdp", "bitwise": True}),
    "micro-batches": (Objects, {"strategy": "fsdp", "micro_batch_size": 2}),
    "ddp": (Detached, {}),
    "bitwise": (Detached, {"bitwise": True}),
    "a rank without samples": (Detached, {"global_batch_size": 1}),
}


@pytest.mark.parametrize("name", NO_GRADIENT)
def test_a_step_without_a_gradient_is_an_error(world: World, name: str) -> None:
    kind, settings = NO_GRADIENT[name]
    model = kind()
    before = model.state_dict()["head.weight"].double().clone()
    with pytest.raises(DataError, match="no weight gets a gradient") as caught:
        fit_objects(world, model, **settings)
    assert caught.value.reporting_rank == 0
    if "fsdp" not in settings.values():
        assert torch.equal(model.state_dict()["head.weight"], before)


def test_objects_are_fine_as_outputs_without_fsdp(world: World) -> None:
    fit_objects(world, Objects(), find_unused_parameters="never", epochs=1)
    fit_objects(world, Objects(), global_batch_size=1, bitwise=True, epochs=1)
