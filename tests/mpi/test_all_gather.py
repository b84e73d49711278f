"""Losses that compare the samples of a global batch."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from reference_training import History
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from mpitrain import DataError, TrainConfig, Trainer, UsageError, World
from mpitrain.data.sharding import epoch_order

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module"),
]

SAMPLES, BATCH_SIZE, EPOCHS, VAL = 23, 7, 2, 75  # steps of 7 and of 2 samples


def views(num: int, seed: int) -> TensorDataset:
    """Two views of each sample, and its class."""
    generator = torch.Generator().manual_seed(seed)
    both = torch.randn(num, 2, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(both, torch.arange(num) % 3)


class Encoder(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))

    def forward(self, both: Tensor) -> Tensor:
        return F.normalize(self.net(both), dim=-1)


def nt_xent(z: Tensor) -> Tensor:
    """The loss of each sample: its views among all other ones."""
    num = len(z)
    flat = z.transpose(0, 1).reshape(2 * num, -1)
    scores = flat @ flat.T / 0.2
    scores = scores.masked_fill(torch.eye(2 * num, dtype=torch.bool), -torch.inf)
    pairs = torch.arange(2 * num).roll(num)
    return F.cross_entropy(scores, pairs, reduction="none").view(2, num).mean(0)


def by_hand() -> tuple[list[float], list[float], list[Tensor]]:
    model, train, (val, _) = (
        Encoder().double(),
        views(SAMPLES, 1),
        views(VAL, 2).tensors,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    steps, validations = [], []
    for epoch in range(1, EPOCHS + 1):
        order = epoch_order(SAMPLES, 1, epoch)
        for start in range(0, SAMPLES, BATCH_SIZE):
            chosen = torch.from_numpy(order[start : start + BATCH_SIZE])
            loss = nt_xent(model(train.tensors[0][chosen])).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            steps.append(loss.item())
        with torch.no_grad():  # in batches of four: half of the step's seven
            parts = [nt_xent(model(part)).sum().item() for part in val.split(4)]
        validations.append(sum(parts) / VAL)
    return steps, validations, list(model.state_dict().values())


def trainer_of(world: World, loss: Any, **settings: Any) -> tuple[Trainer, History]:
    plain: dict[str, Any] = {
        "precision": "fp64", "epochs": EPOCHS, "global_batch_size": BATCH_SIZE,
        "lr": 0.1, "schedule": "constant", "warmup_epochs": 0, "momentum": 0.0,
        "weight_decay": 0.0, "clip_grad_norm": None,
    }  # fmt: skip
    history, found = History(), []
    trainer = Trainer(
        Encoder(),
        views(SAMPLES, 1),
        views(VAL, 2),
        TrainConfig(**plain | settings),
        world=world,
        loss=lambda z, y: loss(found[0], z, y),
        callbacks=[history],
    )
    found.append(trainer)
    return trainer, history


def contrastive(trainer: Trainer, z: Tensor, labels: Tensor) -> Tensor:
    rows, mine = trainer.all_gather(z)
    everywhere, _ = trainer.all_gather(labels)  # has no gradient
    assert len(everywhere) == len(rows)
    assert torch.equal(everywhere[mine], labels[: mine.stop - mine.start])
    return nt_xent(rows)[mine]


@pytest.mark.parametrize("strategy", ["auto", "fsdp"])
def test_a_contrastive_loss_is_that_of_one_process(strategy: str, world: World) -> None:
    if world.world_size == 1 and strategy == "fsdp":
        strategy = "auto"
    trainer, history = trainer_of(world, contrastive, strategy=strategy)
    trainer.fit()
    steps, validations, weights = by_hand()
    losses = [epoch.values["loss"] for epoch in history.epochs]
    assert [step.loss for step in history.steps] == pytest.approx(steps, rel=1e-9)
    assert losses == pytest.approx(validations, rel=1e-9)
    state = trainer.state_dict()
    if world.is_rank_zero:
        for found, expected in zip(state.values(), weights, strict=True):
            assert torch.allclose(found, expected, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"micro_batch_size": 2}, "found micro_batch_size 2 of 7"),
        # A micro-batch for each of 8 ranks.
        (
            {"bitwise": True, "global_batch_size": 8, "micro_batch_size": 1},
            "go with --bitwise",
        ),
    ],
)
def test_what_cannot_be_exact_is_refused(
    settings: dict[str, Any], message: str, world: World
) -> None:
    trainer, _ = trainer_of(world, contrastive, **settings)
    with pytest.raises(UsageError, match=message):
        trainer.fit()


def test_rows_that_differ_between_ranks_are_an_error_on_all(world: World) -> None:
    def loss(trainer: Trainer, z: Tensor, labels: Tensor) -> Tensor:
        rows, _ = trainer.all_gather(z[..., : 1 + trainer.task.world.rank])
        return rows.sum((1, 2))

    def scalar(trainer: Trainer, z: Tensor, labels: Tensor) -> Tensor:
        return trainer.all_gather(z.sum())[0]

    if world.world_size > 1:
        with pytest.raises(DataError, match=r"on rank 0, float64 .* on rank 1"):
            trainer_of(world, loss)[0].fit()
    with pytest.raises(DataError, match=r"all_gather got float64 \(\) in a batch of"):
        trainer_of(world, scalar)[0].fit()


def test_the_batches_of_a_sampler_are_in_one_pass(world: World) -> None:
    sizes = {"global_batch_size": 4, "micro_batch_size": 4}
    trainer, _ = trainer_of(world, contrastive, **sizes)
    batches = [list(range(12)), list(range(12, 23))]
    trainer = Trainer(
        Encoder(),
        views(SAMPLES, 1),
        None,
        trainer.config,
        world=world,
        loss=lambda z, y: contrastive(trainer, z, y),
        batch_sampler=lambda seed, epoch: batches,
    )
    with pytest.raises(UsageError, match="found micro_batch_size 4 of 12"):
        trainer.fit()
