"""Models and trainers of one's own, and what they may expect."""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from reference_training import (
    BATCH_SIZE,
    NUM_SAMPLES,
    History,
    Net,
    config_of,
    some,
    trained,
)
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from mpitrain.data.loader import Batch
from mpitrain.errors import DataError, UsageError
from mpitrain.mpi.collectives import world_comm
from mpitrain.mpi.world import World
from mpitrain.tasks.image_classification.labels import accuracy
from mpitrain.train.trainer import Trainer

pytestmark = pytest.mark.mpi


class Normed(Net):
    """With batch norm between body and head."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(64)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.norm(self.blocks(images.flatten(1))))


@pytest.mark.parametrize(
    "settings", [{}, {"strategy": "fsdp"}, {"probe_epochs": 1, "epochs": 1}]
)
def test_the_first_weights_are_rank_zeros(world: World, settings: Any) -> None:
    """Also those that a probe computes features with."""
    expected, _ = trained(world, **settings)
    model = Net()
    if world.rank:
        with torch.no_grad():
            for weight in model.parameters():
                weight.normal_()
    losses, _ = trained(world, model=model, **settings)
    assert losses == pytest.approx(expected, rel=1e-12)


def test_models_that_differ_are_refused(world: World) -> None:
    if world.world_size == 1:
        return
    model = Net()
    if world.rank == world.world_size - 1:
        model.head = nn.Linear(64, 11)
    with pytest.raises(DataError, match="the model differs between ranks"):
        trained(world, model=model)


def test_after_a_probe_all_weights_may_learn_again(world: World) -> None:
    model = Net()
    trained(world, model=model, probe_epochs=1, epochs=0)
    before = model.blocks[0][0].weight.detach().clone()
    trained(world, model=model)
    assert not torch.equal(model.blocks[0][0].weight, before)


def test_a_model_that_is_sharded_is_not_trained_again(world: World) -> None:
    model = Net()
    trained(world, model=model, strategy="fsdp")
    with pytest.raises(UsageError, match="sharded already"):
        trained(world, model=model, strategy="fsdp")


def test_activations_are_checkpointed_once_in_two_trainings(world: World) -> None:
    settings: dict[str, Any] = {"activation_checkpointing": True, "epochs": 1}
    model = Net()
    trained(world, model=model, **settings)
    trained(world, model=model, **settings)
    forward = model.blocks[0].forward
    assert not hasattr(forward.args[0], "func")


class Seeing(nn.Module):
    """Weights of four dimensions, whose order in memory may be another."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(4)
        self.see = nn.Conv2d(1, 6, 3, stride=2)
        self.head = nn.Linear(6 * 9, 10)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.see(images).flatten(1))


def test_the_order_of_channels_in_memory_changes_nothing(world: World) -> None:
    expected, _ = trained(world, model=Seeing())
    found, _ = trained(world, model=Seeing(), channels_last="always")
    assert found == pytest.approx(expected, rel=1e-9)


class Turned(Net):
    """Has a buffer of complex numbers, as rotary embeddings and Fourier layers do."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("turn", torch.tensor([1j, 1.0], dtype=torch.complex64))

    def forward(self, images: Tensor) -> Tensor:
        turned = (images.flatten(1)[:, :1] * self.turn[0]).imag
        return super().forward(images) + turned


def test_complex_numbers_keep_their_imaginary_part(world: World) -> None:
    model = Turned()
    trained(world, model=model, epochs=1)
    assert model.turn.dtype == torch.complex128
    assert model.turn[0].imag.item() == 1.0


class Words(nn.Module):
    """Takes numbers of words."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.EmbeddingBag(20, 8)
        self.head = nn.Linear(8, 10)

    def forward(self, words: Tensor) -> Tensor:
        return self.head(self.embedding(words))


def test_features_are_what_the_backbone_returns(world: World) -> None:
    """Not cut to whole numbers, where the inputs are such."""
    generator = torch.Generator().manual_seed(5)
    words = torch.randint(0, 20, (40, 6), generator=generator)
    data = TensorDataset(words, torch.arange(40) % 10)

    class OneByOne:
        def __len__(self) -> int:
            return 40

        def __getitem__(self, index: int) -> Any:
            return data[index]

    losses = []
    for train in (data, OneByOne()):  # of which no features are kept
        history = History()
        config = config_of(probe_epochs=2, epochs=0)
        trainer = Trainer(Words(), train, data, config, world=world)
        trainer.callbacks.append(history)
        trainer.fit()
        losses.append(history.losses)
    assert losses[0] == pytest.approx(losses[1], rel=1e-9)


def test_a_step_of_ones_own_is_given_the_inputs(world: World) -> None:
    """Also in a probe, where features would be kept; gradients of two passes meet."""
    seen = set()

    class Twice(Trainer):
        def compute_loss(self, batch: Batch) -> Tensor:
            seen.add(tuple(batch.inputs.shape[1:]))
            first = self.loss(self.forward(batch.inputs), batch.targets)
            return first + self.loss(self.forward(-batch.inputs), batch.targets)

    weights = []
    for micro in (None, 2):
        model = Net()
        config = config_of(probe_epochs=1, epochs=1, micro_batch_size=micro)
        data = some(NUM_SAMPLES)
        Twice(model, data, some(29, "val"), config, world=world).fit()
        weights.append(model.head.weight.detach())
    assert seen == {tuple(some(1)[0][0].shape)}
    torch.testing.assert_close(*weights, rtol=1e-9, atol=1e-12)
    told = [torch.empty_like(weights[0]) for _ in range(world.world_size)]
    torch.distributed.all_gather(told, weights[0])
    assert all(torch.equal(it, told[0]) for it in told)


def test_a_step_of_ones_own_mixes_by_ours_or_is_refused(world: World) -> None:
    class Ours(Trainer):
        def compute_loss(self, batch: Batch) -> Tensor:
            return super().compute_loss(batch)

    class Own(Trainer):
        def compute_loss(self, batch: Batch) -> Tensor:
            return self.loss(self.forward(batch.inputs), batch.targets)

    config = config_of(epochs=1, mixup=0.4)
    weights = []
    for kind in (Trainer, Ours):
        model = Net()
        kind(model, some(NUM_SAMPLES), some(29, "val"), config, world=world).fit()
        weights.append(model.head.weight.detach())
    torch.testing.assert_close(*weights, rtol=0, atol=0)
    with pytest.raises(UsageError, match=r"--mixup is done in Trainer\.compute_loss"):
        Own(Net(), some(NUM_SAMPLES), some(29, "val"), config, world=world).fit()


def test_what_is_evaluated_at_once_is_bounded_too(world: World) -> None:
    rows = []

    class Counting(Net):
        def forward(self, images: Tensor) -> Tensor:
            rows.append(len(images))
            return super().forward(images)

    trained(world, model=Counting(), micro_batch_size=3, probe_epochs=1, epochs=1)
    assert max(rows) <= 3


def test_what_is_evaluated_is_the_model_that_is_saved(world: World) -> None:
    val = some(29, "val")
    trainer = Trainer(Normed(), some(NUM_SAMPLES), val, config_of(), world=world)
    found, state = trainer.fit(), trainer.state_dict()
    if world.is_rank_zero:
        model = Normed().double()
        model.load_state_dict(state)
        with torch.no_grad():
            scores = model.eval()(val.tensors[0].double())
        loss = F.cross_entropy(scores, val.tensors[1]).item()
        assert found.loss == pytest.approx(loss, rel=1e-9)
        correct = (scores.argmax(1) == val.tensors[1]).sum().item()
        assert found.accuracy == correct / 29


def test_the_average_has_the_statistics_that_belong_to_it(world: World) -> None:
    """With a decay of 0 it is the model itself."""
    _, plain = trained(world, model=Normed())
    _, averaged = trained(world, model=Normed(), ema_decay=0.0)
    _, slow = trained(world, model=Normed(), ema_decay=0.999)
    if world.rank == 0:
        for name, value in plain.items():
            torch.testing.assert_close(averaged[name], value)
        assert slow["norm.running_mean"].abs().max() < 0.1 * (
            plain["norm.running_mean"].abs().max()
        )


@pytest.mark.parametrize("strategy", ["auto", "fsdp"])
def test_batch_norm_learns_in_sixteen_bits(world: World, strategy: str) -> None:
    losses, state = trained(world, model=Normed(), precision="bf16", strategy=strategy)
    exact, _ = trained(world, model=Normed(), precision="fp32", strategy=strategy)
    assert losses == pytest.approx(exact, rel=0.1)
    if world.rank == 0:
        assert state["norm.running_var"].dtype == torch.float32


def test_pixels_of_ones_own_are_normalized_where_it_is_asked(world: World) -> None:
    seen = []

    class Looking(Net):
        def forward(self, images: Tensor) -> Tensor:
            seen.append(images.min().item())
            return super().forward(images)

    black = TensorDataset(
        torch.zeros(20, 1, 8, 8, dtype=torch.uint8), torch.zeros(20).long()
    )
    config = config_of(normalize="imagenet", epochs=1)
    Trainer(Looking(), black, black, config, world=world).fit()
    assert max(seen) < -1.9


class Noting(Net):
    """Notes what its inputs are."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[Any, ...]] = set()

    def forward(self, inputs: Tensor) -> Tensor:
        self.seen.add((inputs.dtype, inputs.flatten()[0].item()))
        floats = inputs.real if inputs.is_complex() else inputs
        return super().forward(floats.double())


def seen_by_the_model(
    world: World, inputs: Tensor, *, mean_std: Any = None, **settings: Any
) -> set[tuple[Any, ...]]:
    model, data = Noting(), TensorDataset(inputs, torch.zeros(len(inputs)).long())
    config = config_of(epochs=1, **settings)
    Trainer(model, data, data, config, world=world, mean_std=mean_std).fit()
    return model.seen


@pytest.mark.parametrize(
    ("shape", "value", "dtype"),
    [((20, 1, 8, 8), it, None) for it in (3, True, 2 + 1j, 3.5)]
    + [((20, 1, 8, 8), it, torch.uint8) for it in (3, True)]
    + [((20, 8, 8), 3, torch.uint8)],
)
def test_inputs_of_ones_own_are_taken_as_they_are(
    world: World, shape: tuple[int, ...], value: Any, dtype: Any
) -> None:
    inputs = torch.full(shape, value, dtype=dtype)
    expected = torch.float64 if inputs.dtype == torch.float32 else inputs.dtype
    assert seen_by_the_model(world, inputs) == {(expected, value)}


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"mean_std": ((0.5,), (0.25,))}, 2.0),
        ({"mean_std": ((0.0,), (1.0,))}, 1.0),
        ({"random_flip": True}, 1.0),
        ({"image_size": 8}, 1.0),
    ],
)
def test_bytes_are_images_where_it_is_asked(
    world: World, asked: dict[str, Any], expected: float
) -> None:
    white = torch.full((20, 1, 8, 8), 255, dtype=torch.uint8)
    ((dtype, found),) = seen_by_the_model(world, white, **asked)
    assert (dtype, found) == (torch.float64, pytest.approx(expected))


def test_floats_are_not_normalized_and_that_is_told(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    inputs = torch.full((20, 1, 8, 8), 0.5)
    seen = seen_by_the_model(world, inputs, mean_std=((0.5,), (0.25,)))
    assert seen == {(torch.float64, 0.5)}
    assert caplog.text.count("are not normalized: mean_std") == world.is_rank_zero


def test_a_model_of_floats_that_gets_bytes_says_what_to_do(world: World) -> None:
    inputs = torch.zeros(20, 1, 8, 8, dtype=torch.uint8)
    data = TensorDataset(inputs, torch.zeros(20).long())
    with pytest.raises(RuntimeError) as caught:
        Trainer(Net(), data, data, config_of(), world=world).fit()
    (note,) = caught.value.__notes__
    assert "called with uint8 (" in note
    assert ".float()" in note
    assert "--normalize imagenet" in note


def test_what_torch_does_not_shard_is_refused() -> None:
    with pytest.raises(UsageError, match="--channels-last always"):
        config_of(strategy="fsdp", channels_last="always")


class Odd(Net):
    """Returns what cross-entropy cannot take."""

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.make = make

    def forward(self, images: Tensor) -> Any:
        return self.make(super().forward(images))


class Two(Net):
    """Wants one more input."""

    def forward(self, images: Tensor, lengths: Tensor) -> Tensor:
        return super().forward(images) * lengths


def with_targets(make: Callable[[Tensor], Tensor]) -> TensorDataset:
    inputs, targets = some(NUM_SAMPLES).tensors
    return TensorDataset(inputs, make(targets))


MISFITS: dict[str, tuple[Any, Any, str]] = {
    "too few outputs": (
        Odd(lambda scores: scores[:, :7]),
        with_targets(lambda it: it % 2 + 7),
        r"sample \d+ of the training data has label [78], and the model has 7 outputs; "
        "expected labels from 0 to 6",
    ),
    "labels from -1": (
        Net(),
        with_targets(lambda it: it * 0 - 1),
        r"sample \d+ of the training data has label -1",
    ),
    "labels of floats": (
        Net(),
        with_targets(lambda it: it.float()),
        r"targets of the training data are float64 \(\d+,\), with outputs float64 "
        r"\(\d+, 10\); expected labels int64 \(\d+,\)",
    ),
    "labels in rows": (
        Net(),
        with_targets(lambda it: it[:, None]),
        r"are int64 \(\d+, 1\)",
    ),
    "several labels": (
        Net(),
        with_targets(lambda it: (torch.arange(10) <= it[:, None] + 1).float()),
        r"sample \d+ of the training data has targets float64 \(\d+, 10\) of sum "
        r"\d+ over the classes; .* pass loss= to mpitrain\.Trainer",
    ),
    "a regression": (
        Net(),
        with_targets(lambda it: it[:, None] * torch.linspace(-1, 2, 10)),
        r"over the classes; .* pass loss= to",
    ),
    "a regression of one number": (
        Odd(lambda scores: scores[:, :1]),
        with_targets(lambda it: it[:, None] + 1.5),
        r"over the classes; .* pass loss= to",
    ),
    "a regression of numbers": (
        Odd(lambda scores: scores[:, 0]),
        with_targets(lambda it: it / 10),
        r"returned float64 \(\d+,\); expected.* pass loss= to",
    ),
    "a tuple": (
        Odd(lambda scores: (scores, scores)),
        None,
        r"returned tuple of float64 \(\d+, 10\), float64 \(\d+, 10\); expected",
    ),
    "a dict": (Odd(lambda scores: {"logits": scores}), None, "dict of 'logits'"),
    "two inputs": (
        Two(),
        None,
        r"Two.forward\(images, lengths\) was called with float64 \(\d+, 1, 8, 8\): "
        r"missing a required argument: 'lengths'.* let samples be dicts",
    ),
}


@pytest.mark.parametrize("name", MISFITS)
def test_a_model_and_data_that_do_not_fit_are_told(world: World, name: str) -> None:
    model, data, words = MISFITS[name]
    with pytest.raises(DataError, match=words):
        trained(world, data=data, model=copy.deepcopy(model))


@pytest.mark.parametrize("settings", [{}, {"strategy": "fsdp"}, {"bitwise": True}])
def test_a_model_of_two_inputs_trains_with_samples_that_are_pairs_of_them(
    world: World, settings: Any
) -> None:
    class OfPairs(Two):
        def forward(self, inputs: Any) -> Tensor:  # type: ignore[override]
            images, lengths = inputs
            return super().forward(images, lengths)

    def paired(data: TensorDataset) -> Any:
        return [((image, torch.ones(1)), int(label)) for image, label in data]

    config = config_of(**settings)
    sets = paired(some(NUM_SAMPLES)), paired(some(29, "val"))
    found = Trainer(OfPairs(), *sets, config, world=world, callbacks=()).fit()
    plain = some(NUM_SAMPLES), some(29, "val")
    expected = Trainer(Net(), *plain, config, world=world, callbacks=()).fit()
    assert found.loss == pytest.approx(expected.loss, rel=1e-9)


@pytest.mark.parametrize("sharpness", [1.0, 0.7])
def test_probabilities_have_the_accuracy_of_their_labels(
    world: World, sharpness: float
) -> None:
    """One-hot and soft labels; 10 rows of 10 classes would be broadcast to labels."""

    def probable(data: TensorDataset) -> TensorDataset:
        images, labels = data.tensors
        rest = (1 - sharpness) / 10
        return TensorDataset(images, sharpness * torch.eye(10)[labels] + rest)

    val = some(10 * world.world_size, "val")
    sets = probable(some(NUM_SAMPLES)), probable(val)
    trainer = Trainer(Net(), *sets, config_of(epochs=20), world=world, callbacks=())
    found = trainer.fit()
    with torch.no_grad():
        right = trainer.model(val.tensors[0].double()).argmax(1) == val.tensors[1]
    assert found.accuracy == right.double().mean().item()
    assert right.double().mean() > 0.5


def test_an_accuracy_is_not_broadcast() -> None:
    with pytest.raises(DataError, match=r"are int64 \(10, 1\)"):
        accuracy(torch.eye(10), torch.ones(10, 1, dtype=torch.int64))


def test_outputs_of_any_kind_suit_a_loss_of_ones_own(world: World) -> None:
    config = config_of(epochs=1)
    model = Odd(lambda scores: (scores, scores))

    def loss(outputs: Any, targets: Tensor) -> Tensor:
        return F.cross_entropy(outputs[0], targets, reduction="none")

    train, val = some(NUM_SAMPLES), some(29, "val")
    trainer = Trainer(model, train, val, config, world=world, loss=loss)
    assert trainer.fit().num_samples == len(val)


def test_an_error_in_a_model_says_what_it_was_called_with(world: World) -> None:
    with pytest.raises(RuntimeError) as caught:
        trained(world, model=nn.Linear(3, 10))
    assert caught.value.__notes__[0].startswith("Linear was called with float64 (")


@pytest.mark.parametrize("length", [1, 3, 120])
def test_a_loss_of_another_length_is_refused(world: World, length: int) -> None:
    """Such as that of each token, flattened: it would be cut without a word."""
    trainer = Trainer(
        Net(),
        some(64),
        some(29, "val"),
        config_of(global_batch_size=32 * world.world_size),
        world=world,
        loss=lambda outputs, _: outputs.mean().expand(length),
    )
    with pytest.raises(DataError, match=rf"rows is float64 \({length},\)"):
        trainer.fit()


def test_configurations_that_differ_are_refused(world: World) -> None:
    if world.world_size == 1:
        return
    with pytest.raises(
        UsageError, match="TrainConfig differs between ranks: seed 1 on"
    ):
        trained(world, seed=1 + world.rank)


def test_metrics_of_other_names_are_refused(world: World) -> None:
    names = itertools.cycle("ba" if world.rank == 0 else "a")

    def metrics(outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {next(names): targets.double()}

    # A batch on each rank, or several on one.
    data = some(BATCH_SIZE // 2 * world.world_size if world.world_size > 1 else 300)
    trainer = Trainer(Net(), some(64), data, config_of(), world=world, metrics=metrics)
    with pytest.raises(DataError, match=r"metrics returned.*loss, b"):
        trainer.fit()


class EvaluatesWithin(History):
    """Evaluates after each step."""

    def on_step_end(self, trainer: Trainer) -> None:
        assert trainer.model.training
        trainer.evaluate()
        assert trainer.model.training


def test_an_evaluation_within_an_epoch_leaves_the_training_mode(world: World) -> None:
    trainer = Trainer(
        Net(), some(64), some(29, "val"), config_of(epochs=1), world=world
    )
    trainer.callbacks.append(EvaluatesWithin())
    trainer.fit()


class Counts(History):
    """Notes how many steps each call has."""

    def on_metrics(self, trainer: Trainer, steps: Any) -> None:
        assert steps
        assert len({step.epoch for step in steps}) == 1
        super().on_metrics(trainer, steps)


def test_metrics_come_with_steps(world: World) -> None:
    trainer = Trainer(
        Net(), some(64), some(29, "val"), config_of(epochs=2), world=world
    )
    trainer.callbacks.append(Counts())
    trainer.set_up()
    trainer.timer.end_step(is_step=False)  # as after a resume in a validation
    steps = trainer.engine.plan.steps_per_epoch
    assert steps is not None
    trainer.state.epoch_step = steps
    trainer.fit()


class Hooked(History):
    """Has a hook of Lightning's."""

    def on_train_epoch_end(self, trainer: Trainer) -> None:
        raise AssertionError


class Overrides(Trainer):
    """Has a metric of a name that is taken."""

    def metrics(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        return {"loss": targets.double()}


def test_names_that_mean_something_else_are_refused(world: World) -> None:
    sets = some(64), some(64, "val"), config_of()  # each of 8 ranks has a batch
    trainer = Trainer(Net(), *sets, world=world, callbacks=[Hooked()])
    with pytest.raises(UsageError, match=r"Hooked\.on_train_epoch_end is no hook"):
        trainer.fit()
    with pytest.raises(UsageError, match=r"found <class .*; expected objects of"):
        Trainer(Net(), *sets, world=world, callbacks=[Hooked]).fit()  # type: ignore[list-item]
    with pytest.raises(UsageError, match="metric is named 'loss'"):
        Overrides(Net(), *sets, world=world).fit()
    with pytest.raises(UsageError, match=r"a call of fit\(\) before"):
        Trainer(Net(), *sets, world=world).evaluate()


def test_labels_that_cross_entropy_ignores_are_refused(world: World) -> None:
    """They would count as samples, with loss zero and as wrong."""
    inputs, targets = some(64).tensors
    data = TensorDataset(inputs, torch.full_like(targets, -100))
    # Every rank has samples in the first step: else it would go on alone.
    with pytest.raises(DataError, match=r"sample \d+ of .*label -100"):
        trained(world, data=data, global_batch_size=64)
    if world.world_size > 1:  # else this rank alone has it
        return
    targets = targets.clone()
    targets[63] = -100  # not looked for in the first batch alone
    with pytest.raises(DataError, match=r"sample 63 of .*label -100"):
        trained(world, data=TensorDataset(inputs, targets))


@pytest.mark.parametrize("precision", ["bf16", "fp32"])
def test_a_custom_loss_gets_outputs_in_float32(world: World, precision: Any) -> None:
    seen = set()

    def loss(outputs: Tensor, targets: Tensor) -> Tensor:
        seen.add(outputs.dtype)
        return F.cross_entropy(outputs, targets, reduction="none")

    sets = some(64), some(29, "val"), config_of(precision=precision, epochs=1)
    Trainer(Net(), *sets, world=world, loss=loss).fit()
    assert seen == {torch.float32}


def test_modules_that_the_user_has_frozen_stay_in_evaluation_mode(world: World) -> None:
    model = Normed()
    model.norm.eval()
    before = model.norm.running_mean.clone()  # type: ignore[union-attr]
    trained(world, model=model)
    assert model.training
    assert not model.norm.training
    assert torch.equal(model.norm.running_mean, before.double())  # type: ignore[arg-type]


class Statistics(History):
    """Keeps the running variance, and the number of its updates, after each step."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[list[float], int]] = []

    def on_step_end(self, trainer: Trainer) -> None:
        norm = trainer.model.norm
        self.found.append((norm.running_var.tolist(), int(norm.num_batches_tracked)))


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"strategy": "fsdp"},
        {"activation_checkpointing": True},
        {"bitwise": True, "micro_batch_size": 4},
        {"micro_batch_size": 3},  # and one of a single sample in each step
    ],
    ids=str,
)
def test_a_single_sample_does_not_change_running_statistics(
    world: World, settings: Any
) -> None:
    """It is doubled, with variance 0; torch refuses it. The weights learn from it."""
    size = 4 * world.world_size
    statistics = Statistics()
    config = config_of(global_batch_size=size, **settings)
    model, data = Normed(), some(3 * size + 1)
    trainer = Trainer(model, data, some(29, "val"), config, world=world)
    trainer.callbacks = [statistics]
    trainer.fit()
    assert [it.train_samples for it in statistics.epochs] == [len(data)] * 2
    found = world_comm().bcast(statistics.found)  # rank zero's are evaluated and saved
    assert [num for _, num in found] == [1, 2, 3, 3, 4, 5, 6, 6]
    assert found[3] == found[2]
    assert found[7] == found[6] != found[3]


class Permuted(Net):
    """With a tensor that is no buffer, and what torch's normalizations keep so."""

    def __init__(self, kind: str, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(100, generator=generator)
        self.inner = nn.Module()
        self.inner.order = order.numpy() if kind == "array" else order
        if kind == "buffer":
            del self.inner.order
            self.inner.register_buffer("order", order)
        torch.manual_seed(seed)
        layer = nn.utils.weight_norm(nn.Linear(4, 4))
        self.normed = nn.Sequential(layer, nn.utils.spectral_norm(nn.Linear(4, 1)))

    def forward(self, images: Tensor) -> Tensor:
        return super().forward(images) + self.normed(images.flatten(1)[:, :4])


@pytest.mark.parametrize("kind", ["tensor", "array", "buffer"])
@pytest.mark.filterwarnings("ignore:.*weight_norm")
def test_a_tensor_that_is_no_buffer_is_the_same_on_all_ranks(
    world: World, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    trained(world, model=Permuted(kind, seed=1), epochs=1)
    other = Permuted(kind, seed=world.rank)
    if kind == "buffer" or world.world_size == 1:
        trained(world, model=other, epochs=1)
        return
    assert "inner.order" not in caplog.text
    words = r"inner.order of the model is neither .*register_buffer.*manual_seed"
    with pytest.raises(UsageError, match=words):
        trained(world, model=other, epochs=1, bitwise=True)
    trained(world, model=other, epochs=1)
    assert bool(re.search(words, caplog.text)) == world.is_rank_zero
