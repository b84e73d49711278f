"""Batches of any kind, and losses and metrics with weights."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from reference_training import History
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset, TensorDataset

from mpitrain import DataError, Task, TrainConfig, Trainer, UsageError, World
from mpitrain.data.sharding import epoch_order

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module"),  # logits are a view
]

VOCABULARY, IGNORED = 11, -100


class Texts(Dataset[dict[str, Tensor]]):
    """Sequences of several lengths; the first labels of each are ignored."""

    def __init__(self, num: int, seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.texts = []
        for _ in range(num):
            length = int(torch.randint(2, 9, (), generator=generator))
            ids = torch.randint(1, VOCABULARY, (length,), generator=generator)
            ignored = int(torch.randint(0, length + 1, (), generator=generator))
            labels = ids.clone()
            labels[:ignored] = IGNORED
            self.texts.append({"input_ids": ids, "labels": labels})

    def __len__(self) -> int:
        return len(self.texts)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return self.texts[index]


class Stream(IterableDataset[dict[str, Tensor]]):
    def __init__(self, texts: Texts) -> None:
        self.texts = texts

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        return iter(self.texts.texts)


def pad(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    longest = max(len(sample["input_ids"]) for sample in samples)
    return {
        name: torch.stack(
            [F.pad(it[name], (0, longest - len(it[name])), value=of) for it in samples]
        )
        for name, of in (("input_ids", 0), ("labels", IGNORED))
    }


class LanguageModel(nn.Module):
    """Called with the fields of a batch by name, as those of Transformers are."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(VOCABULARY, 8)
        self.hidden = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.head = nn.Linear(8, VOCABULARY)

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> Any:
        del labels
        return {"logits": self.head(self.hidden(self.embedding(input_ids)))}


def token_losses(outputs: Any, batch: Any) -> tuple[Tensor, Tensor]:
    labels = batch["labels"]
    losses = F.cross_entropy(
        outputs["logits"].transpose(1, 2), labels, reduction="none"
    )
    return losses, labels != IGNORED


def several_losses(outputs: Any, batch: Any) -> dict[str, Any]:
    length = outputs["logits"].square().mean((1, 2))
    values, weights = token_losses(outputs, batch)
    return {"loss": (values, weights), "length": length}


SAMPLES, BATCH_SIZE, EPOCHS = 37, 8, 2
TRAIN, VAL = Texts(SAMPLES), Texts(13, seed=1)


def config_of(**settings: Any) -> TrainConfig:
    plain: dict[str, Any] = {
        "precision": "fp64",
        "epochs": EPOCHS,
        "global_batch_size": BATCH_SIZE,
        "optimizer": "adam",
        "lr": 0.05,
        "schedule": "constant",
        "warmup_epochs": 0,
        "weight_decay": 0.0,
        "clip_grad_norm": 0.3,
    }
    return TrainConfig(**plain | settings)


def by_hand(order: Any = None) -> tuple[list[float], list[float], list[Tensor]]:
    """Losses of the steps, and of the validations; the weights at the end."""
    model = LanguageModel().double()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.05)
    steps, validations = [], []

    def loss_of(batch: dict[str, Tensor]) -> Tensor:
        logits = model(batch["input_ids"])["logits"].transpose(1, 2)
        return F.cross_entropy(logits, batch["labels"], ignore_index=IGNORED)

    for epoch in range(1, EPOCHS + 1):
        numbers = order or epoch_order(SAMPLES, 1, epoch).tolist()
        for start in range(0, SAMPLES, BATCH_SIZE):
            chosen = [TRAIN[i] for i in numbers[start : start + BATCH_SIZE]]
            loss = loss_of(pad(chosen))
            optimizer.zero_grad()
            loss.backward()
            gradients = [it.grad for it in model.parameters() if it.grad is not None]
            norm = float(nn.utils.get_total_norm(gradients))
            for gradient in gradients:  # torch divides by the norm + 1e-6
                gradient.mul_(min(1.0, 0.3 / norm))
            optimizer.step()
            steps.append(loss.item())
        with torch.no_grad():
            validations.append(loss_of(pad(VAL.texts)).item())
    return steps, validations, list(model.state_dict().values())


def trained(
    world: World,
    train: Any = TRAIN,
    *,
    loss: Any = token_losses,
    collate_fn: Any = pad,
    model: nn.Module | None = None,
    settings: dict[str, Any] | None = None,
    **kinds: Any,
) -> tuple[History, list[Tensor]]:
    history = History()
    trainer = Trainer(
        model or LanguageModel(),
        train,
        kinds.pop("val_data", VAL),
        config_of(**settings or {}),
        world=world,
        collate_fn=collate_fn,
        loss=loss,
        callbacks=[history],
        **kinds,
    )
    trainer.fit()
    return history, list(trainer.state_dict().values())


def same_as_by_hand(
    world: World, found: tuple[History, list[Tensor]], order: Any = None
) -> None:
    history, weights = found
    steps, validations, expected = by_hand(order)
    assert [step.loss for step in history.steps] == pytest.approx(steps, rel=1e-9)
    losses = [epoch.values["loss"] for epoch in history.epochs]
    assert losses == pytest.approx(validations, rel=1e-9)
    if world.rank == 0:
        for mine, other in zip(weights, expected, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-8, atol=1e-11)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"micro_batch_size": 1},
        {"micro_batch_size": 3, "num_workers": 1},
        {"strategy": "fsdp", "micro_batch_size": 2},
        {"bitwise": True},
        {"bitwise": True, "strategy": "fsdp"},
    ],
    ids=str,
)
def test_tokens_weigh_the_same_on_all_ranks_and_in_all_micro_batches(
    world: World, settings: dict[str, Any]
) -> None:
    same_as_by_hand(world, trained(world, settings=settings))


def test_weights_may_be_negative(world: World) -> None:
    def loss(outputs: Any, batch: Any) -> Any:
        values, weights = token_losses(outputs, batch)
        return values, -1.0 * weights

    same_as_by_hand(world, trained(world, loss=loss))


def test_the_loss_of_an_epoch_is_the_mean_of_its_tokens(world: World) -> None:
    history, _ = trained(world)
    weights = []
    for epoch in range(1, EPOCHS + 1):
        order = epoch_order(SAMPLES, 1, epoch)
        for start in range(0, SAMPLES, BATCH_SIZE):
            batch = pad([TRAIN[i] for i in order[start : start + BATCH_SIZE]])
            weights.append(int((batch["labels"] != IGNORED).sum()))
    num = len(weights) // EPOCHS
    for i, epoch in enumerate(history.epochs):
        part = slice(i * num, (i + 1) * num)
        total = sum(
            step.loss * weight
            for step, weight in zip(history.steps[part], weights[part], strict=True)
        )
        mean = total / sum(weights[part])
        assert epoch.train_loss == pytest.approx(mean, rel=1e-9)


def test_a_stream_has_batches_of_any_kind(world: World) -> None:
    found = trained(world, Stream(TRAIN))
    same_as_by_hand(world, found, order=list(range(SAMPLES)))


@pytest.mark.parametrize("settings", [{}, {"micro_batch_size": 2}, {"bitwise": True}])
def test_other_losses_are_recorded_by_name(
    world: World, settings: dict[str, Any]
) -> None:
    history, weights = trained(world, loss=several_losses, settings=settings)
    same_as_by_hand(world, (history, weights))
    model = LanguageModel().double()
    first = [TRAIN[i] for i in epoch_order(SAMPLES, 1, 1)[:BATCH_SIZE]]
    lengths = [
        model(sample["input_ids"][None])["logits"].square().mean() for sample in first
    ]
    if not settings:  # padding is a part of it, and there is less in a micro-batch
        return
    if settings.get("micro_batch_size") == 1:
        expected = float(torch.stack(lengths).mean())
        assert history.steps[0].losses["length"] == pytest.approx(expected)
    assert history.steps[0].losses.keys() == {"length"}
    for epoch in history.epochs:
        assert epoch.train_losses.keys() == {"length"}
        assert epoch.values.keys() == {"loss", "length"}


@dataclasses.dataclass(frozen=True)
class Fields:
    ids: Tensor
    more: dict[str, Tensor]


class Moved:
    """A batch with a method of its own, as graphs have."""

    def __init__(self, fields: dict[str, Tensor]) -> None:
        self.fields, self.devices = fields, []

    def to(self, device: Any) -> Moved:
        moved = Moved({name: it.to(device) for name, it in self.fields.items()})
        moved.devices = [*self.devices, str(device)]
        return moved


class OfTask(Task):
    """The language model, written as a task."""

    def training_step(self, model: Any, batch: Any) -> Any:
        return token_losses(model(*self.read(batch)), self.labels(batch))

    def validation_step(self, model: Any, batch: Any) -> Any:
        loss = token_losses(model(*self.read(batch)), self.labels(batch))
        return {"loss": loss} if len(batch) else {}

    def read(self, batch: Any) -> tuple[Tensor]:
        inputs = batch.inputs
        return (
            inputs.ids if isinstance(inputs, Fields) else inputs.fields["input_ids"],
        )

    def labels(self, batch: Any) -> Any:
        inputs = batch.inputs
        return inputs.more if isinstance(inputs, Fields) else inputs.fields


def as_dataclass(samples: Any) -> Fields:
    batch = pad(samples)
    return Fields(batch["input_ids"], batch)


def as_object(samples: Any) -> Moved:
    return Moved(pad(samples))


@pytest.mark.parametrize("kind", [as_dataclass, as_object])
def test_a_batch_may_be_any_object(world: World, kind: Any) -> None:
    found = trained(world, loss=None, collate_fn=kind, task=OfTask())
    same_as_by_hand(world, found)


class NoLoss(OfTask):
    def validation_step(self, model: Any, batch: Any) -> Any:
        outputs = model(*self.read(batch))
        if not len(batch):
            return {}
        labels = self.labels(batch)["labels"]
        is_right = (outputs["logits"].argmax(-1) == labels).double()
        return {"right": (is_right, labels != IGNORED)}


def test_a_validation_needs_no_loss(world: World) -> None:
    history, _ = trained(world, loss=None, collate_fn=as_object, task=NoLoss())
    num = sum(int((text["labels"] != IGNORED).sum()) for text in VAL.texts)
    for epoch in history.epochs:
        assert epoch.values.keys() == {"right"}
        assert epoch.values["right"] * num == pytest.approx(
            round(epoch.values["right"] * num), abs=1e-6
        )


class TwoArguments(LanguageModel):
    def forward(self, ids: Tensor, mask: Tensor) -> Any:  # type: ignore[override]
        return super().forward(ids * mask)


def test_a_model_of_other_arguments_is_explained(world: World) -> None:
    with pytest.raises(DataError, match=r"forward\(ids, mask\) was called with dict"):
        trained(world, model=TwoArguments())


class OtherKeys(LanguageModel):
    def forward(self, input_ids: Tensor, mask: Tensor | None = None) -> Any:  # type: ignore[override]
        return super().forward(input_ids)


class AnyKeys(LanguageModel):
    def forward(self, input_ids: Tensor, **others: Any) -> Any:  # type: ignore[override]
        assert "labels" in others
        return super().forward(input_ids)


def test_a_key_that_forward_does_not_take_is_named(world: World) -> None:
    with pytest.raises(TypeError) as caught:
        trained(world, model=OtherKeys())
    assert "forward does not take labels of the batch" in str(caught.value.__notes__)
    same_as_by_hand(world, trained(world, model=AnyKeys()))


def test_samples_that_torch_cannot_collate_are_named(world: World) -> None:
    texts = [  # no two as long: each rank has several
        {name: torch.ones(1 + i).long() for name in ("input_ids", "labels")}
        for i in range(40)
    ]
    with pytest.raises(DataError, match=r"samples of one batch differ.*collate_fn"):
        trained(world, texts, collate_fn=None, settings={"global_batch_size": 40})
    with pytest.raises(DataError, match=r"cannot collate samples such as Moved"):
        trained(world, [Moved({})] * 20, collate_fn=None)


@pytest.mark.parametrize(
    ("returned", "expected"),
    [
        (lambda *it: (token_losses(*it)[0], torch.ones(3)), "two tensors of one shape"),
        (lambda *it: {"dice": token_losses(*it)}, "expected 'loss' among the names"),
        (lambda *it: (token_losses(*it)[0],), "two tensors of one shape"),
        (lambda *it: (token_losses(*it)[0].mean(),) * 2, "weights of the loss need a"),
    ],
)
def test_losses_of_another_form_are_named(
    world: World, returned: Any, expected: str
) -> None:
    with pytest.raises(DataError, match=expected):
        trained(world, loss=returned)


@pytest.mark.parametrize("name", ["samples", "lr", "gradient_norm"])
def test_a_loss_with_a_name_of_records_is_refused(world: World, name: str) -> None:
    def losses(*it: Any) -> Any:
        return {"loss": token_losses(*it), name: token_losses(*it)}

    with pytest.raises(UsageError, match=f"loss is named '{name}'") as caught:
        trained(world, loss=losses)
    assert caught.value.is_collective


@pytest.mark.parametrize("where", ["loss", "metric", "weighted"])
def test_outputs_that_are_broadcast_to_all_targets_are_named(
    world: World, where: str
) -> None:
    """`(N, 1) - (N,)` is `(N, N)`: each output with each target of a rank."""

    def pairs(outputs: Any, targets: Any) -> Any:
        return (outputs - targets).square()

    def losses(outputs: Any, targets: Any) -> Any:
        found = pairs(outputs, targets)
        if where == "metric":
            return found.mean(1)  # all pairs of a batch are meant
        return (found, torch.ones_like(found)) if where == "weighted" else found

    inputs = torch.randn(40, 3, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(inputs, inputs.sum(1))
    trainer = Trainer(
        nn.Linear(3, 1),
        data,
        data,
        config_of(global_batch_size=10),
        world=world,
        loss=losses,
        metrics={"far": pairs} if where == "metric" else None,
        callbacks=[],
    )
    name = "far" if where == "metric" else "loss"
    with pytest.raises(DataError, match=rf"the {name} pairs each output .*\[:, 0\]"):
        trainer.fit()


def test_a_validation_loss_that_is_broadcast_to_all_targets_is_named(
    world: World,
) -> None:
    class Mine(Task):
        def loss(self, outputs: Any, targets: Any) -> Any:
            return (outputs - targets).square()

        def training_step(self, model: Any, batch: Any) -> Any:
            return self.loss(model(batch.inputs)[:, 0], batch.targets)

    inputs = torch.randn(40, 3, generator=torch.Generator().manual_seed(1))
    data = TensorDataset(inputs, inputs.sum(1))
    config = config_of(global_batch_size=10)
    model = nn.Linear(3, 1)
    trainer = Trainer(model, data, data, config, world=world, task=Mine(), callbacks=[])
    with pytest.raises(DataError, match=r"the loss pairs each output with each target"):
        trainer.fit()


def test_ranks_with_other_losses_do_not_wait_for_each_other(world: World) -> None:
    def loss(outputs: Any, batch: Any) -> Any:
        values, weights = token_losses(outputs, batch)
        return (values, weights) if world.rank == 0 else values

    if world.world_size > 1:
        with pytest.raises(DataError, match="loss with weights on rank 0, loss on"):
            trained(world, loss=loss)


def test_a_loss_that_changes_its_form_is_an_error(world: World) -> None:
    calls = []

    def loss(outputs: Any, batch: Any) -> Any:
        calls.append(0)
        values, weights = token_losses(outputs, batch)
        return (values, weights) if len(calls) < 3 else values

    with pytest.raises(UsageError, match="changed: loss with weights before, now loss"):
        trained(world, loss=loss)


def test_a_step_without_any_weight_has_no_gradient(world: World) -> None:
    def nothing(outputs: Any, batch: Any) -> Any:
        values, weights = token_losses(outputs, batch)
        return values, weights * 0

    history, weights = trained(world, loss=nothing)
    expected = LanguageModel().double().state_dict().values()
    assert all(step.loss != step.loss for step in history.steps)  # nan: of nothing
    if world.rank == 0:
        for mine, other in zip(weights, expected, strict=True):
            torch.testing.assert_close(mine, other, rtol=0, atol=0)
