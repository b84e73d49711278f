"""Steps as the unit of a training, and its end before the last of them."""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from reference_training import (
    BATCH_SIZE,
    NUM_SAMPLES,
    History,
    Net,
    Stops,
    config_of,
    some,
)
from torch import Tensor
from torch.utils.data import IterableDataset

import mpitrain.train.data
import mpitrain.train.evaluate
from mpitrain import Checkpointer, EarlyStopping, Recorder, Trainer, UsageError, World
from mpitrain.data.sharding import epoch_order
from mpitrain.errors import DataError, Stopped
from mpitrain.mpi.shared_arrays import communicator
from mpitrain.record.reading import Run
from mpitrain.record.run_dir import read_result
from mpitrain.tools.export import choose_checkpoint
from mpitrain.train.callbacks import Callback, StopRequested
from mpitrain.train.metrics import EpochMetrics

pytestmark = pytest.mark.mpi

STEPS, EVERY = 12, 3  # 2 epochs of 5 steps, and 2 steps of the third
VAL = some(29, "val")


class Validations(History):
    """Keeps the loss of each validation by step."""

    def __init__(self) -> None:
        super().__init__()
        self.validations: list[tuple[int, float]] = []

    def on_validation_end(self, trainer: Any, epoch: EpochMetrics) -> None:
        assert epoch.step == trainer.state.step
        self.validations.append((epoch.step, epoch.values["loss"]))


class Endless(IterableDataset[tuple[Tensor, Tensor]]):
    """The samples in their order, again and again."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return itertools.cycle(zip(*some(NUM_SAMPLES).tensors, strict=True))


class Sharded(Endless):
    """Cut into shards by its own method."""

    def __init__(self, num_shards: int = 1, index: int = 0) -> None:
        self.num_shards, self.index = num_shards, index

    def shard(self, num_shards: int, index: int) -> Sharded:
        return Sharded(num_shards, index)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        return itertools.islice(super().__iter__(), self.index, None, self.num_shards)


def steps_of_epochs() -> Iterator[Any]:
    for epoch in itertools.count(1):
        order = epoch_order(NUM_SAMPLES, 1, epoch)
        yield from (order[i : i + BATCH_SIZE] for i in range(0, len(order), BATCH_SIZE))


def steps_of_stream() -> Iterator[Any]:
    for start in itertools.count(0, BATCH_SIZE):
        yield np.arange(start, start + BATCH_SIZE) % NUM_SAMPLES


def by_hand(
    steps: Callable[[], Iterator[Any]], at: set[int], warmup: int
) -> tuple[list[float], list[tuple[int, float]], list[Tensor]]:
    """Losses of all steps, validations by step, and weights, in one plain process."""
    model = Net().double()
    inputs, targets = some(NUM_SAMPLES).tensors
    optimizer = torch.optim.SGD(
        model.parameters(), lr=0.05, momentum=0.9, nesterov=True, weight_decay=5e-4
    )
    losses, validations = [], []
    for done, chosen in enumerate(itertools.islice(steps(), STEPS)):
        falling = np.pi * (done - warmup) / (STEPS - warmup)
        rate = (done + 1) / warmup if done < warmup else (1 + np.cos(falling)) / 2
        optimizer.param_groups[0]["lr"] = 0.05 * rate
        loss = F.cross_entropy(model(inputs[chosen].double()), targets[chosen])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if done + 1 in at:
            with torch.no_grad():
                x, y = VAL.tensors
                val_loss = F.cross_entropy(model(x.double()), y).item()
            validations.append((done + 1, val_loss))
    return losses, validations, list(model.state_dict().values())


def trainer_of(
    world: World, *callbacks: Callback, data: Any = None, **settings: Any
) -> tuple[Trainer, Validations]:
    seen = Validations()
    config = config_of(max_steps=STEPS, validate_every_steps=EVERY, **settings)
    data = some(NUM_SAMPLES) if data is None else data
    callbacks = (seen, *callbacks)
    return Trainer(Net(), data, VAL, config, world=world, callbacks=callbacks), seen


def same(trainer: Trainer, seen: Validations, expected: Any) -> None:
    losses, validations, weights = expected
    assert [it.loss for it in seen.steps] == pytest.approx(losses, rel=1e-9)
    assert [step for step, _ in seen.validations] == [step for step, _ in validations]
    for found, other in zip(seen.validations, validations, strict=True):
        assert found[1] == pytest.approx(other[1], rel=1e-9)
    state = list(trainer.state_dict().values())
    if trainer.engine.world.is_rank_zero:
        for mine, other in zip(state, weights, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"micro_batch_size": 3, "num_workers": 1},
        {"strategy": "fsdp"},
        {"bitwise": True},
        {"bitwise": True, "strategy": "fsdp"},
        {"epochs": 1},
    ],
    ids=str,
)
def test_a_training_has_max_steps_and_is_validated_within_epochs(
    world: World, settings: dict[str, Any]
) -> None:
    trainer, seen = trainer_of(world, **settings)
    found = trainer.fit()
    # The rate warms up in half of the steps, and falls to the last one.
    same(trainer, seen, by_hand(steps_of_epochs, {3, 5, 6, 9, 10, 12}, warmup=6))
    assert found.loss == seen.validations[-1][1]
    assert [(it.epoch, it.step) for it in seen.epochs] == [(1, 5), (2, 10), (3, 12)]
    assert [it.train_samples for it in seen.epochs] == [75, 75, 32]
    assert trainer.engine.plan.total_steps == STEPS


@pytest.mark.parametrize("data", [Endless(), Sharded()], ids=["whole", "shards"])
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_stream_may_have_no_end(world: World, data: Any, num_workers: int) -> None:
    trainer, seen = trainer_of(world, data=data, num_workers=num_workers)
    trainer.fit()
    assert [it.step for it in seen.steps] == list(range(1, STEPS + 1))
    assert [step for step, _ in seen.validations] == [3, 6, 9, 12]
    assert [it.train_samples for it in seen.epochs] == [STEPS * BATCH_SIZE]
    if isinstance(data, Sharded):
        return  # whose samples are in other steps on other numbers of ranks
    same(trainer, seen, by_hand(steps_of_stream, {3, 6, 9, 12}, warmup=1))


def test_a_stream_without_end_is_warned_of(
    world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mpitrain.train.data, "ENDLESS_STEPS", 4)

    class Stops(Callback):
        def on_step_end(self, trainer: Trainer) -> None:
            if trainer.state.step == 9:
                raise StopRequested("enough")

    trainer = Trainer(
        Net(), Endless(), VAL, config_of(), world=world, callbacks=[Stops()]
    )
    with pytest.raises(Stopped):
        trainer.fit()
    assert len(caplog.messages) == world.is_rank_zero
    assert all("needs max_steps" in it for it in caplog.messages)
    caplog.clear()
    trainer_of(world, data=Endless())[0].fit()
    assert not caplog.messages


def test_an_evaluation_that_may_have_no_end_is_warned_of_once(
    world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Long(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            return itertools.islice(Endless(), 1000)

    class Sized(Long):
        def __len__(self) -> int:
            return 1000

    monkeypatch.setattr(mpitrain.train.evaluate, "ENDLESS_BATCHES", 2)
    data, config = some(BATCH_SIZE), config_of(epochs=2)
    Trainer(Net(), data, Sized(), config, world=world).fit()
    assert not caplog.messages
    trainer = Trainer(Net(), data, Long(), config, world=world)
    trainer.fit()
    assert len(caplog.messages) == world.is_rank_zero
    assert all("an evaluation has had 2 batches" in it for it in caplog.messages)
    monkeypatch.setattr(mpitrain.train.evaluate, "ENDLESS_BATCHES", 1000)
    caplog.clear()
    trainer.predict(Long())
    assert not caplog.messages  # of all ranks together it has more
    monkeypatch.setattr(mpitrain.train.evaluate, "ENDLESS_BATCHES", 2)
    caplog.clear()
    trainer.predict(Long())
    assert len(caplog.messages) == world.is_rank_zero


def test_warmup_epochs_of_a_stream_are_refused(world: World) -> None:
    with pytest.raises(UsageError, match="an epoch has no number of steps"):
        trainer_of(world, data=Endless(), warmup_epochs=1)[0].fit()


class StopsAt(Callback):
    """Stops after a step, or in a validation after it, once."""

    def __init__(self, hook: str, step: int) -> None:
        self.step = step

        def stop(trainer: Trainer, *_: Any) -> None:
            if trainer.state.step == self.step:
                self.step = -1
                raise StopRequested("a test")

        setattr(type(self), hook, staticmethod(stop))


def stopping(hook: str, step: int) -> Callback:
    return type("Stops", (StopsAt,), {})(hook, step)


@pytest.mark.parametrize(
    ("hook", "steps"),
    [
        ("on_step_end", (1, 5, 6, 12)),
        ("on_validation_batch_end", (3, 5, 12)),
        ("on_validation_end", (3, 5, 12)),
        ("on_epoch_end", (5, 12)),
    ],
)
@pytest.mark.parametrize("kind", ["map", "stream"])
def test_a_training_of_steps_resumes_exactly(
    world: World, run_dir: Path, hook: str, steps: tuple[int, ...], kind: str
) -> None:
    data = some(NUM_SAMPLES) if kind == "map" else Endless()
    if kind == "stream":
        steps = tuple(step for step in steps if step % EVERY == 0)
        expected = by_hand(steps_of_stream, {3, 6, 9, 12}, warmup=1)
    else:
        expected = by_hand(steps_of_epochs, {3, 5, 6, 9, 10, 12}, warmup=6)
    for step in steps:
        folder = run_dir.with_name(f"{hook}-{step}")
        more: dict[str, Any] = {"every_epochs": None, "every_minutes": None}
        checkpointer = Checkpointer(folder, **more)
        trainer, seen = trainer_of(
            world, Recorder(folder), checkpointer, stopping(hook, step), data=data
        )
        with pytest.raises(Stopped):
            trainer.fit()
        trainer, again = trainer_of(
            world, Checkpointer(folder, **more), Recorder(folder), data=data
        )
        trainer.fit()
        again.steps = seen.steps + again.steps
        again.validations = seen.validations + again.validations
        same(trainer, again, expected)
        run = Run(folder) if world.is_rank_zero else None
        if run is not None:
            epochs = 1 if kind == "stream" else 3
            assert [it.epoch for it in run.metrics.epochs] == [*range(1, epochs + 1)]
            within = [it.step for it in run.metrics.validations]
            assert within == [3, 6, 9]
            assert run.status == "finished"


class GetsWorse(Callback):
    """Adds a metric that is best at the first validation, and keeps its weights."""

    weights: dict[str, Tensor] | None = None

    def on_validation_end(self, trainer: Any, epoch: EpochMetrics) -> None:
        trainer.state.metrics["f1"] = -float(epoch.step)
        if self.weights is None:
            state = trainer.state_dict()
            self.weights = {name: it.clone() for name, it in state.items()}


@pytest.mark.parametrize(
    "settings", [{}, {"strategy": "fsdp"}, {"ema_decay": 0.5}], ids=str
)
def test_early_stopping_finishes_and_stays_finished(
    world: World, run_dir: Path, settings: dict[str, Any]
) -> None:
    def fit() -> tuple[Trainer, Validations, Any]:
        stops = EarlyStopping("val_f1", patience=2)
        checkpointer = Checkpointer(run_dir, best_by="f1", load_best_at_end=True)
        callbacks = Recorder(run_dir), worse, stops, checkpointer
        trainer, seen = trainer_of(world, *callbacks, **settings)
        return trainer, seen, trainer.fit()

    def same_as_the_best(trainer: Trainer) -> None:
        assert trainer.evaluate().loss == pytest.approx(first_loss, rel=1e-12)
        state = trainer.state_dict()
        if world.is_rank_zero:
            assert read_result(run_dir)["status"] == "finished"
            assert worse.weights is not None
            for name, value in worse.weights.items():
                torch.testing.assert_close(state[name], value, rtol=0, atol=0)

    worse = GetsWorse()
    trainer, seen, found = fit()
    # At steps 3, 5, 6: the first is the best one, then two in a row are not better.
    assert [step for step, _ in seen.validations] == [3, 5, 6]
    assert [(it.epoch, it.step) for it in seen.epochs] == [(1, 5), (2, 6)]
    first_loss = seen.validations[0][1]
    assert found.loss == first_loss
    assert found.values["f1"] == -3
    same_as_the_best(trainer)
    if world.is_rank_zero:
        assert choose_checkpoint(run_dir, best=True).path.name == "step-00000003-val"
    trainer, seen, found = fit()
    assert not seen.steps
    assert not seen.validations
    assert found.loss == first_loss
    same_as_the_best(trainer)


def test_early_stopping_knows_what_is_better(world: World) -> None:
    class Falls(Callback):
        def on_validation_end(self, trainer: Any, epoch: EpochMetrics) -> None:
            trainer.state.metrics["f1"] = -float(trainer.state.step)
            trainer.state.metrics["error"] = -float(trainer.state.step)

    for metric, mode, last in (
        ("f1", None, 6),  # the second one is worse
        ("f1", "min", STEPS),
        ("error", None, STEPS),
        ("error", "max", 6),
    ):
        stops = EarlyStopping(metric, patience=2, mode=mode)  # type: ignore[arg-type]
        trainer, _ = trainer_of(world, Falls(), stops)
        trainer.fit()
        assert trainer.state.step == last
    with pytest.raises(UsageError, match="no such metric"):
        trainer_of(world, EarlyStopping("f2"))[0].fit()
    with pytest.raises(UsageError, match="EarlyStopping without val_data"):
        Trainer(
            Net(), VAL, None, config_of(), world=world, callbacks=[EarlyStopping()]
        ).fit()
    for wrong in ({"patience": 0}, {"mode": "least"}, {"mode": "min"}):
        with pytest.raises(UsageError, match="patience from 1"):
            EarlyStopping(None, **wrong)  # type: ignore[arg-type]


def test_each_fit_counts_its_own_validations(world: World) -> None:
    stops = EarlyStopping("loss", patience=2, min_delta=100.0)
    for _ in range(2):
        trainer, _seen = trainer_of(world, stops)
        trainer.fit()
        assert trainer.state.step == 6
    plain = json.loads(json.dumps(stops.state_dict()))
    stops.setup(trainer)
    stops.load_state_dict(plain)
    assert stops.state_dict() == plain


def test_a_callback_finishes_a_training_in_the_middle_of_an_epoch(world: World) -> None:
    class Ends(Callback):
        def on_step_end(self, trainer: Trainer) -> None:
            trainer.should_stop = trainer.state.step == 7

    trainer, seen = trainer_of(world, Ends())
    trainer.fit()
    assert [step for step, _ in seen.validations] == [3, 5, 6, 7]
    assert [(it.epoch, it.step) for it in seen.epochs] == [(1, 5), (2, 7)]


class Counted(IterableDataset[tuple[Tensor, Tensor]]):
    """Samples of which each is one number, cut into shards by its own method."""

    def __init__(self, num_shards: int = 1, index: int = 0) -> None:
        self.num_shards, self.index = num_shards, index

    def shard(self, num_shards: int, index: int) -> Counted:
        return Counted(num_shards, index)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for number in range(self.index, NUM_SAMPLES, self.num_shards):
            yield torch.full((64,), float(number)), torch.tensor(number % 10)


class Reads(Callback):
    """Keeps the samples that this rank trains on; stops in a validation."""

    def __init__(self, *, stops: bool) -> None:
        self.stops, self.numbers = stops, list[float]()

    def on_batch_start(self, trainer: Any, batch: Any) -> None:
        self.numbers += batch.inputs[: len(batch), 0].tolist()

    def on_validation_end(self, trainer: Any, epoch: EpochMetrics) -> None:
        if self.stops and not epoch.is_end:
            raise StopRequested("a test")


@pytest.mark.parametrize("settings", [{}, {"micro_batch_size": 3}], ids=str)
def test_a_stream_that_stops_in_a_validation_loses_no_sample(
    world: World, run_dir: Path, settings: dict[str, Any]
) -> None:
    """The next step has been read by then."""
    found = []
    for stops in (True, False):
        reads = Reads(stops=stops)
        config = config_of(validate_every_steps=2, epochs=1, **settings)
        callbacks = [reads, Checkpointer(run_dir)]
        trainer = Trainer(
            Net(), Counted(), VAL, config, world=world, callbacks=callbacks
        )
        try:
            trainer.fit()
        except Stopped:
            assert trainer.state.step == 2
        found += reads.numbers
    gathered = communicator(world).allgather(found)
    assert sorted(sum(gathered, [])) == list(map(float, range(NUM_SAMPLES)))  # noqa: RUF017


class Positioned(Counted):
    """Knows its place, as torchdata's and Hugging Face's data sets."""

    start, at, num_read = 0, 0, 0

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.start = state["at"]

    def shard(self, num_shards: int, index: int) -> Counted:
        return type(self)(num_shards, index)

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        self.at, self.start = self.start, 0
        for sample in itertools.islice(super().__iter__(), self.at, None):
            Positioned.num_read += 1
            self.at += 1
            yield sample


class Reader:
    def __init__(self, numbers: range) -> None:
        self.numbers, self.at = numbers, 0

    def __iter__(self) -> Reader:
        return self

    def __next__(self) -> tuple[Tensor, Tensor]:
        if self.at == len(self.numbers):
            raise StopIteration
        number = self.numbers[self.at]
        self.at += 1
        Positioned.num_read += 1
        return torch.full((64,), float(number)), torch.tensor(number % 10)

    def get_state(self) -> dict[str, Any]:
        return {"at": self.at}

    def set_state(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Whole(IterableDataset[tuple[Tensor, Tensor]]):
    """Not cut into shards; what reads it knows the place, as in Grain."""

    def __iter__(self) -> Any:
        return Reader(range(NUM_SAMPLES))


class WholeByItself(Positioned):
    """Not cut into shards."""

    @property
    def shard(self) -> Any:  # type: ignore[override]
        raise AttributeError


class Forgets(Positioned):
    """Has a state without its buffer, as a shuffled data set of Hugging Face."""

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        buffer: list[tuple[Tensor, Tensor]] = []
        for sample in super().__iter__():
            buffer.append(sample)
            if len(buffer) == 3:
                yield buffer.pop(0)
        yield from buffer


class ForgetsWhole(Forgets):
    """Not cut into shards."""

    @property
    def shard(self) -> Any:  # type: ignore[override]
        raise AttributeError


class OfTensors(Positioned):
    """Has a state that no checkpoint holds."""

    def state_dict(self) -> dict[str, Any]:
        return {"at": torch.tensor(self.at)}


def numbers_of(
    world: World, run_dir: Path, data: Any, step: int, **settings: Any
) -> tuple[list[float], list[float]]:
    """What all ranks train on until a step, and then, after a resume."""
    found = []
    for stops in ([Stops(step)], []):
        Positioned.num_read = 0
        reads = Reads(stops=False)
        config = config_of(epochs=2, validate_every_steps=2, **settings)
        callbacks = [reads, *stops, Checkpointer(run_dir)]
        trainer = Trainer(Net(), data(), VAL, config, world=world, callbacks=callbacks)
        with contextlib.suppress(Stopped):
            trainer.fit()
        gathered = communicator(world).allgather(reads.numbers)
        found.append([number for of_rank in gathered for number in of_rank])
    return found[0], found[1]


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("data", [Positioned, Whole, WholeByItself, OfTensors])
def test_a_stream_that_knows_its_place_is_not_read_again(
    world: World, run_dir: Path, data: Any, num_workers: int
) -> None:
    for step in (4, 9):
        folder = run_dir.with_name(f"{step}")
        first, second = numbers_of(world, folder, data, step, num_workers=num_workers)
        assert sorted(first + second) == sorted([*map(float, range(NUM_SAMPLES))] * 2)
        if num_workers == 0 and step == 9:
            num_read = communicator(world).allgather(Positioned.num_read)
            whole = data in (Whole, WholeByItself)
            most = 2 * BATCH_SIZE + 4 if data is not OfTensors else NUM_SAMPLES
            most -= 0 if whole else (world.world_size - 1) * most // world.world_size
            assert max(num_read) <= most + 4


class Grows(WholeByItself):
    """Has other samples in each job."""

    num_made = 0

    def __init__(self) -> None:
        super().__init__()
        Grows.num_made += 1
        self.job = Grows.num_made

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for image, label in super().__iter__():
            yield image + 1000 * self.job, label


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("data", [Forgets, ForgetsWhole])
def test_a_place_that_leads_to_other_samples_is_not_used(
    world: World, run_dir: Path, data: Any, num_workers: int
) -> None:
    first, second = numbers_of(world, run_dir, data, 4, num_workers=num_workers)
    assert sorted(first + second) == sorted([*map(float, range(NUM_SAMPLES))] * 2)


def test_a_stream_of_other_samples_is_an_error(world: World, run_dir: Path) -> None:
    with pytest.raises(DataError, match="Grows has other samples than before, from"):
        numbers_of(world, run_dir, Grows, 4)
