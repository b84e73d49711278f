"""Samplers of the user's: the same steps at any number of ranks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from reference_training import BATCH_SIZE, NUM_SAMPLES, History, Net, config_of, some
from torch import Tensor
from torch.utils import data as torchs

from mpitrain import Checkpointer, DataError, EarlyStopping, Trainer, UsageError, World
from mpitrain.data.loader import Batch
from mpitrain.data.randomness import seeded
from mpitrain.data.sampling import Sampling
from mpitrain.errors import Stopped
from mpitrain.mpi.collectives import world_comm
from mpitrain.train.callbacks import Callback, StopRequested
from mpitrain.train.metrics import EpochMetrics

pytestmark = pytest.mark.mpi

EPOCHS = 2
VAL = some(29, "val")
WEIGHTS = torch.linspace(0.1, 1.0, NUM_SAMPLES, dtype=torch.float64)


def weighted(seed: int, epoch: int) -> Any:
    """More samples than there are, some of them twice."""
    random = np.random.default_rng([seed, epoch])
    weights = WEIGHTS.numpy() / WEIGHTS.numpy().sum()
    return random.choice(NUM_SAMPLES, 90, p=weights)


def curriculum(seed: int, epoch: int) -> list[int]:
    """The first samples only, more in each epoch."""
    order = np.random.default_rng([seed, epoch]).permutation(30 * epoch)
    return list(map(int, order))


def of_torch(seed: int, epoch: int) -> Any:
    """What torch's sampler is to give, drawn in the same state."""
    with seeded(seed, epoch, -2):
        return list(torchs.WeightedRandomSampler(WEIGHTS.tolist(), 40))


def budget(seed: int, epoch: int) -> list[list[int]]:
    """Batches of several sizes, one sample at least."""
    random = np.random.default_rng([seed, epoch])
    order, batches = list(map(int, random.permutation(NUM_SAMPLES))), []
    while order:
        size = int(random.integers(1, 14))
        batches.append(order[:size])
        order = order[size:]
    return batches


def cut(order: Any) -> list[Any]:
    return [order[i : i + BATCH_SIZE] for i in range(0, len(order), BATCH_SIZE)]


def by_hand(batches_of: Any) -> tuple[list[float], list[float], list[Tensor]]:
    """One plain process; losses of steps, of validations, and weights."""
    model = Net().double()
    inputs, targets = some(NUM_SAMPLES).tensors
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-4
    )
    losses, validations = [], []
    for epoch in range(1, EPOCHS + 1):
        for batch in batches_of(1, epoch):
            chosen = torch.as_tensor(np.asarray(batch))
            loss = F.cross_entropy(model(inputs[chosen].double()), targets[chosen])
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        with torch.no_grad():
            x, y = VAL.tensors
            validations.append(F.cross_entropy(model(x.double()), y).item())
    return losses, validations, list(model.state_dict().values())


def trainer_of(
    world: World, *callbacks: Callback, data: Any = None, **more: Any
) -> tuple[Trainer, History]:
    history = History()
    samplers = {it: more.pop(it) for it in ("sampler", "batch_sampler") if it in more}
    settings = {"epochs": EPOCHS, "schedule": "constant", "warmup_epochs": 0, **more}
    trainer = Trainer(
        Net(),
        some(NUM_SAMPLES) if data is None else data,
        VAL,
        config_of(**settings),
        world=world,
        callbacks=[history, *callbacks],
        **samplers,
    )
    return trainer, history


def same(trainer: Trainer, history: History, expected: Any) -> None:
    losses, validations, weights = expected
    assert [it.loss for it in history.steps] == pytest.approx(losses, rel=1e-9)
    found = [it.values["loss"] for it in history.epochs]
    assert found == pytest.approx(validations, rel=1e-9)
    state = list(trainer.state_dict().values())
    if trainer.engine.world.is_rank_zero:
        for mine, other in zip(state, weights, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-12)


class Read(torchs.Dataset[Any]):
    """The samples, read one by one."""

    def __len__(self) -> int:
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Any:
        return tuple(it[index] for it in some(NUM_SAMPLES).tensors)


SETTINGS: list[dict[str, Any]] = [
    {},
    {"micro_batch_size": 3},
    {"data": Read(), "num_workers": 1},
    {"strategy": "fsdp", "micro_batch_size": 5},
    {"bitwise": True},
    {"bitwise": True, "strategy": "fsdp", "micro_batch_size": 2},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_batch_sampler_gives_the_samples_of_each_step(
    world: World, settings: dict[str, Any]
) -> None:
    trainer, history = trainer_of(world, batch_sampler=budget, **settings)
    trainer.fit()
    same(trainer, history, by_hand(budget))
    assert [it.train_samples for it in history.epochs] == [NUM_SAMPLES] * EPOCHS


class Costly:
    """The same batches, the last samples of the set much dearer than the others."""

    costs: Any = torch.arange(1, NUM_SAMPLES + 1) ** 3

    def __call__(self, seed: int, epoch: int) -> list[list[int]]:
        return budget(seed, epoch)


class SamplesSeen(Callback):
    def __init__(self) -> None:
        self.costs: list[float] = []

    def on_batch_start(self, trainer: Trainer, batch: Batch) -> None:
        self.costs.append(float(Costly.costs[batch.indices].sum()))


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_step_is_cut_by_the_costs_of_its_samples(
    world: World, settings: dict[str, Any]
) -> None:
    seen = SamplesSeen()
    trainer, history = trainer_of(world, seen, batch_sampler=Costly(), **settings)
    trainer.fit()
    same(trainer, history, by_hand(budget))
    if settings:
        return
    of_ranks = np.array(world_comm().allgather(seen.costs))
    batches = [part for epoch in (1, 2) for part in budget(1, epoch)]
    assert of_ranks.shape == (world.world_size, len(batches))
    for mine, batch in zip(of_ranks.T, batches, strict=True):
        costs = Costly.costs[batch].double().numpy()
        assert sum(mine) == costs.sum()
        assert max(mine) <= costs.sum() / world.world_size + costs.max()


@pytest.mark.parametrize(
    ("costs", "expected"),
    [
        ([1.0], r"are float64 \(1,\); expected a positive number for each"),
        (["a"] * NUM_SAMPLES, r"are <U1 "),
        ([1.0] * (NUM_SAMPLES - 1) + [0.0], f"are 0 for sample {NUM_SAMPLES - 1}"),
        ([1.0, float("nan")] + [1.0] * (NUM_SAMPLES - 2), "are nan for sample 1"),
    ],
)
def test_costs_that_are_none_are_named(world: World, costs: Any, expected: str) -> None:
    sampler = Costly()
    sampler.costs = costs
    with pytest.raises(DataError, match=expected):
        trainer_of(world, batch_sampler=sampler)[0].fit()


def test_costs_that_differ_between_ranks_are_an_error(world: World) -> None:
    sampler = Costly()
    sampler.costs = None if world.rank == 1 else Costly.costs
    if world.world_size == 1:
        return
    with pytest.raises(DataError, match="costs of the batch_sampler differs between"):
        trainer_of(world, batch_sampler=sampler)[0].fit()


@pytest.mark.parametrize("settings", SETTINGS[:1] + SETTINGS[2:], ids=str)
def test_a_sampler_gives_the_order_of_an_epoch(
    world: World, settings: dict[str, Any]
) -> None:
    trainer, history = trainer_of(world, sampler=weighted, **settings)
    trainer.fit()
    same(trainer, history, by_hand(lambda *it: cut(weighted(*it))))
    assert [it.train_samples for it in history.epochs] == [90] * EPOCHS
    assert trainer.engine.plan.total_steps == EPOCHS * 6


def test_a_generator_of_batches_may_draw(world: World) -> None:
    def drawn(seed: int, epoch: int) -> Iterator[list[int]]:
        for part in torch.randperm(NUM_SAMPLES).split(20):
            yield part.tolist()

    trainer, history = trainer_of(world, batch_sampler=drawn)
    trainer.fit()
    assert len(history.steps) == len(history.epochs) * -(-NUM_SAMPLES // 20)


def test_epochs_of_a_sampler_may_differ_in_length(world: World) -> None:
    trainer, history = trainer_of(world, sampler=curriculum)
    trainer.fit()
    same(trainer, history, by_hand(lambda *it: cut(curriculum(*it))))
    assert [it.train_samples for it in history.epochs] == [30, 60]


@pytest.mark.parametrize("has_generator", [False, True])
@pytest.mark.parametrize("in_batches", [False, True])
def test_samplers_of_torch_are_seeded_for_each_epoch(
    world: World, has_generator: bool, in_batches: bool
) -> None:
    generator = torch.Generator().manual_seed(world.rank) if has_generator else None
    sampler: Any = torchs.WeightedRandomSampler(
        WEIGHTS.tolist(), 40, generator=generator
    )
    given: dict[str, Any] = {"sampler": sampler}
    if in_batches:
        batches = torchs.BatchSampler(sampler, BATCH_SIZE, drop_last=False)
        given = {"batch_sampler": batches}
    trainer, history = trainer_of(world, **given)
    trainer.fit()
    same(trainer, history, by_hand(lambda *it: cut(of_torch(*it))))


def test_a_sampler_leaves_the_random_numbers_of_the_process_alone() -> None:
    before = torch.get_rng_state()
    Sampling(torchs.RandomSampler(range(5))).order(1, 1, 5)
    assert torch.equal(torch.get_rng_state(), before)


class StopsAt(Callback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, trainer: Trainer) -> None:
        if trainer.state.step == self.step:
            raise StopRequested("a test")


@pytest.mark.parametrize("kind", ["sampler", "batch_sampler"])
def test_a_sampled_epoch_is_resumed_where_it_was(
    world: World, run_dir: Path, parts: Any, kind: str
) -> None:
    """Begun on fewer ranks."""
    function = {"sampler": weighted, "batch_sampler": budget}[kind]
    expected = by_hand(
        budget if kind == "batch_sampler" else lambda *i: cut(weighted(*i))
    )

    def first(part: World) -> Any:
        trainer, history = trainer_of(
            part, Checkpointer(run_dir), StopsAt(8), **{kind: function}
        )
        with pytest.raises(Stopped):
            trainer.fit()
        return history.steps, history.epochs

    def last(part: World) -> None:
        for other in ({}, {kind: lambda *_: function(7, 7)}):
            trainer, _ = trainer_of(part, Checkpointer(run_dir), **other)
            with pytest.raises(UsageError, match="which had another order"):
                trainer.fit()
        trainer, again = trainer_of(part, Checkpointer(run_dir), **{kind: function})
        trainer.fit()
        again.steps = steps + again.steps
        again.epochs = epochs + again.epochs
        same(trainer, again, expected)

    found = parts(max(1, world.world_size - 1), first)
    steps, epochs = world_comm().bcast(found)
    parts(world.world_size, last)


class Validations(Callback):
    """Keeps their losses, of those within an epoch, too."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def on_validation_end(self, trainer: Trainer, epoch: EpochMetrics) -> None:
        self.losses.append(epoch.values["loss"])


def test_a_sampled_epoch_with_validations_in_it_stops_early_as_if_never_cut(
    world: World, run_dir: Path, parts: Any
) -> None:
    """Patience counts on, on another number of ranks; so do validations of an epoch."""
    settings: dict[str, Any] = {"sampler": weighted, "validate_every_steps": 2}

    def fitted(part: World, *callbacks: Callback) -> tuple[list[Any], list[Any], int]:
        # No loss is better by so much: it stops at the fifth validation, of step 10.
        patience = EarlyStopping("loss", patience=4, min_delta=100.0)
        checks = Validations()
        trainer, history = trainer_of(part, patience, checks, *callbacks, **settings)
        with suppress(Stopped):
            trainer.fit()
        return [it.loss for it in history.steps], checks.losses, trainer.state.step

    expected = parts(world.world_size, fitted)
    begun = parts(
        max(1, world.world_size - 1),
        lambda part: fitted(part, Checkpointer(run_dir), StopsAt(7)),
    )
    ended = parts(world.world_size, lambda part: fitted(part, Checkpointer(run_dir)))
    if world.is_rank_zero:
        assert expected[2] == ended[2] == 10
        assert begun[2] == 7
        for i in (0, 1):
            assert begun[i] + ended[i] == pytest.approx(expected[i], rel=1e-9)
        assert len(expected[1]) == 5


@pytest.mark.parametrize(
    ("sampler", "expected"),
    [
        (lambda *_: [0, NUM_SAMPLES], "has the number 75; expected 0 to 74"),
        (lambda *_: [0, -1], "has the number -1"),
        (lambda *_: [], "for epoch 1 is empty"),
        (lambda *_: torch.empty(0, dtype=torch.int64), "for epoch 1 is empty"),
        (lambda *_: [0.5], "is float64 .1,.; expected the numbers of samples"),
        (lambda *_: [True, False], "is bool .2,."),
        (lambda *_: [[1], [2, 3]], "those of each step in a list are for a batch_s"),
        (lambda *_: (i for i in range(3)), "is generator; expected"),
        (lambda *_: None, "is NoneType; expected"),
    ],
)
def test_what_is_no_order_is_named(world: World, sampler: Any, expected: str) -> None:
    with pytest.raises(DataError, match=expected):
        trainer_of(world, sampler=sampler)[0].fit()


@pytest.mark.parametrize(
    ("batch_sampler", "expected"),
    [
        (lambda *_: [[0], [1, 99]], "batch 1 of the batch_sampler .* the number 99"),
        (lambda *_: [[0], []], "batch 1 of the batch_sampler for epoch 1 is empty"),
        (lambda *_: [], "for epoch 1 is empty; expected a batch"),
        (lambda *_: [0, 1], "batch 0 of the batch_sampler for epoch 1 is int"),
    ],
)
def test_what_are_no_batches_is_named(
    world: World, batch_sampler: Any, expected: str
) -> None:
    with pytest.raises(DataError, match=expected):
        trainer_of(world, batch_sampler=batch_sampler)[0].fit()


def test_an_order_that_differs_between_ranks_or_calls_is_an_error(world: World) -> None:
    if world.world_size > 1:
        with pytest.raises(
            DataError, match=r"differs between ranks[\s\S]*seed and epoch al"
        ):
            trainer_of(world, sampler=lambda *_: [world.rank])[0].fit()
    random = np.random.default_rng(1)
    with pytest.raises(UsageError, match="another order when it was called again"):
        trainer_of(world, sampler=lambda *_: random.permutation(5))[0].fit()

    def fails_on_one(seed: int, epoch: int) -> list[int]:
        if world.rank == world.world_size - 1 and epoch == 2:
            raise ArithmeticError("a fault")
        return [0, 1]

    with pytest.raises(Exception, match="a fault"):
        trainer_of(world, sampler=fails_on_one)[0].fit()


def test_samplers_that_shard_and_data_without_numbers_are_refused(world: World) -> None:
    sharding = torchs.DistributedSampler(Read(), 2, 0)
    for given in (
        {"sampler": sharding},
        {"batch_sampler": torchs.BatchSampler(sharding, 4, drop_last=False)},
    ):
        with pytest.raises(UsageError, match="shards the data, as mpitrain does"):
            trainer_of(world, **given)
    with pytest.raises(UsageError, match="expected one of them"):
        trainer_of(world, sampler=weighted, batch_sampler=budget)
    with pytest.raises(UsageError, match="a function of seed and epoch"):
        trainer_of(world, sampler=3)

    class Stream(torchs.IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return iter(Read())

    with pytest.raises(UsageError, match="does not go with an iterable data set"):
        trainer_of(world, data=Stream(), sampler=weighted)[0].fit()
