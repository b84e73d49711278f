"""The trainings of `examples/trainings` beside one plain PyTorch process."""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
import importlib
import math
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from launcher import slow
from reference_training import History
from torch import Tensor, nn
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import Subset, TensorDataset, default_collate

from mpitrain import Batch, Checkpointer, Stopped, StopRequested, Trainer, UsageError
from mpitrain.data.randomness import seeded
from mpitrain.data.samples import to_dtype
from mpitrain.data.sharding import epoch_order
from mpitrain.errors import DataError
from mpitrain.mpi.world import World
from mpitrain.train.callbacks import Callback
from mpitrain.train.metric_objects import numbers_of
from mpitrain.train.model import spread_inputs
from mpitrain.train.strategy.bitwise import seed_micro_batch

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module"),
    pytest.mark.filterwarnings("ignore:No positive samples"),
]

STOPS_AT = 4  # in the second of three epochs or of two

CONSTANT: dict[str, Any] = {"schedule": "constant", "warmup_epochs": 0}
IN_STEPS: dict[str, Any] = {"max_steps": 5, "validate_every_steps": 2}
TRAININGS: dict[str, dict[str, Any]] = {
    "segmentation": CONSTANT,
    "surrogate": CONSTANT,
    "graphs": CONSTANT,
    "imbalance": CONSTANT,
    "imbalance:build_multilabel": CONSTANT,
    "detection": CONSTANT | {"global_batch_size": 4},
    "text_classification": {"warmup_steps": 3},
    "language_model": IN_STEPS | {"warmup_steps": 2},
    "finetuning": {"bitwise": False},
    "gan": CONSTANT,
    "contrastive": CONSTANT,
    "stream": IN_STEPS | CONSTANT,
}
"""What is set in each: short ones, with the schedule of the example if it has one."""

REFUSED: dict[tuple[str, str], str] = {
    ("contrastive", "micro_batch_size"): "all_gather needs the whole global batch",
    ("contrastive", "bitwise"): "all_gather does not go with --bitwise",
    ("detection", "micro_batch_size"): (
        "of a batch of 2 rows is .* expected one for each row|at most 2 ranks"
    ),
}


def built(name: str, world: World | None, folder: Path, **settings: Any) -> Trainer:
    module_name, _, function = name.partition(":")
    module = importlib.import_module(f"examples.trainings.{module_name}")
    more: dict[str, Any] = {"precision": "fp64", "epochs": 2, **TRAININGS[name]}
    where = {"folder": str(folder)} if module_name == "surrogate" else {}
    if module_name != "stream":  # its batches have a number of tokens
        more.setdefault("global_batch_size", 8)
    config = dataclasses.replace(module.DEFAULTS, **more | settings)
    build = getattr(module, function or "build")
    trainer: Trainer = build(config, world, **where)
    size = more.get("global_batch_size")
    if size is not None:  # the last of three steps has two samples
        trainer.train_data = first(trainer.train_data, 2 * size + 2)
    trainer.val_data = first(trainer.val_data, 13)
    trainer.callbacks = []
    return trainer


def first(data: Any, num: int) -> Any:
    if isinstance(data, TensorDataset):
        return TensorDataset(*data[:num])
    return Subset(data, range(num))


# --- one process ----------------------------------------------------------------------


class Expected(NamedTuple):
    losses: list[float]  # of steps
    means: dict[str, float]  # of the last validation
    numbers: dict[str, float]  # of metric objects, likewise
    weights: list[Tensor]


@functools.cache
def by_hand(name: str) -> Expected:
    """A training by the example's step, and torch alone."""
    with tempfile.TemporaryDirectory() as folder:
        plain = Plain(name, built(name, None, Path(folder)))
        losses = plain.train()
        return Expected(losses, *plain.validate(), plain.weights())


class Plain:
    """One process that trains what a trainer has been given."""

    def __init__(self, name: str, trainer: Trainer) -> None:
        self.name, self.trainer, self.config = name, trainer, trainer.config
        self.task, self.model = trainer.task, trainer.model.double()
        self.task.config = trainer.config
        # A process that is alone has the rows of all.
        vars(trainer)["all_gather"] = lambda rows: (rows, slice(0, len(rows)))
        self.averaged = copy.deepcopy(self.model)
        steps = [(e, it) for e in range(1, 4) for it in enumerate(self.steps_of(e))]
        in_epochs = [step for step in steps if step[0] <= self.config.epochs]
        most = self.config.max_steps
        self.steps = in_epochs if most is None else steps[:most]
        made = self.task.configure_optimizers(self.model) or self.configured()
        self.optimizers = made if isinstance(made, dict) else {"": made}
        schedulers = self.task.configure_schedulers(made, len(self.steps))
        factor = schedule_of(self.config, len(self.steps))
        self.schedulers = (
            [schedulers]
            if schedulers
            else [LambdaLR(it, factor) for it in self.optimizers.values()]
        )

    def configured(self) -> torch.optim.Optimizer:
        kind = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}
        weights, decay = list(self.model.parameters()), self.config.weight_decay
        groups = [
            {"params": [it for it in weights if it.ndim >= 2], "weight_decay": decay},
            {
                "params": [it for it in weights if it.ndim < 2],
                "weight_decay": decay if self.config.bias_decay else 0.0,
            },
        ]
        return kind[self.config.optimizer](groups, lr=self.config.lr)

    def steps_of(self, epoch: int) -> list[list[int]]:
        data, seed = self.trainer.train_data, self.config.seed
        if self.name == "stream":
            from examples.trainings.stream import batches_of

            return batches_of(data, seed, epoch)
        order = epoch_order(len(data), seed, epoch).tolist()
        size = self.config.global_batch_size
        return [order[i : i + size] for i in range(0, len(order), size)]

    def call(self, *args: Any, **kwargs: Any) -> Any:
        args, kwargs = spread_inputs(self.model, args, kwargs)
        return self.model(*args, **kwargs)

    def batch_of(self, data: Any, indices: list[int], epoch: int) -> Batch:
        samples = []
        for index in indices:
            with seeded(self.config.seed, epoch, index):
                samples.append(data[index])
        found = (self.task.collate_fn or default_collate)(samples)
        is_pair = isinstance(found, tuple | list) and len(found) == 2
        inputs, targets = found if is_pair else (found, found)
        inputs, targets = (to_dtype(it, torch.float64) for it in (inputs, targets))
        return Batch(inputs, targets, epoch_order(len(samples), 1, 1), len(samples))

    def train(self) -> list[float]:
        self.model.train()
        return [self.train_step(epoch, *step) for epoch, step in self.steps]

    def train_step(self, epoch: int, step: int, chosen: list[int]) -> float:
        total = 0.0
        size = self.config.micro_batch_size or len(chosen)  # the example's own
        micro_batches = [chosen[i : i + size] for i in range(0, len(chosen), size)]
        for name, optimizer in self.optimizers.items():
            optimizer.zero_grad()
            for number, part in enumerate(micro_batches):
                batch = self.batch_of(self.trainer.train_data, part, epoch)
                seed_micro_batch(self.config.seed, epoch, step, number)
                names = [name] if name else []
                found: Any = self.task.training_step(self.call, batch, *names)
                found = found["loss"] if isinstance(found, Mapping) else found
                value, weight = sums_of(found, len(part))
                loss = value / weight * len(part) / len(chosen)
                loss.backward()
                total += loss.item()
            self.clip(optimizer)
            optimizer.step()
        for scheduler in self.schedulers:
            scheduler.step()
        if (decay := self.config.ema_decay) is not None:
            pairs = zip(
                self.averaged.parameters(), self.model.parameters(), strict=True
            )
            for average, weight in pairs:
                average.data = decay * average.data + (1 - decay) * weight.data
        return total

    def clip(self, optimizer: Any) -> None:
        weights = [it for group in optimizer.param_groups for it in group["params"]]
        norm = nn.utils.get_total_norm([it.grad for it in weights])
        longest = self.config.clip_grad_norm
        if longest is not None and norm > longest:
            for weight in weights:
                weight.grad *= longest / norm

    @torch.no_grad()
    def validate(self) -> tuple[dict[str, float], dict[str, float]]:
        if self.config.ema_decay is not None:
            self.model.load_state_dict(self.averaged.state_dict())
        self.model.eval()
        sums: dict[str, list[tuple[float, float]]] = {}
        indices = list(range(len(self.trainer.val_data)))
        size = self.config.global_batch_size // 2  # of batches of a validation
        for start in range(0, len(indices), size):
            part = indices[start : start + size]
            batch = self.batch_of(self.trainer.val_data, part, 0)
            for name, values in self.task.validation_step(self.call, batch).items():
                value, weight = sums_of(values, len(part))
                sums.setdefault(name, []).append((float(value), float(weight)))
        means = {}
        for name, pairs in sums.items():
            value, weight = map(sum, zip(*pairs, strict=True))
            means[name] = value / weight
        numbers: dict[str, float] = {}
        for name, metric in self.task.metric_objects.items():
            numbers |= numbers_of(name, metric.compute())
        return means | dict(self.task.derived_metrics(means)), numbers

    def weights(self) -> list[Tensor]:
        return list(self.model.state_dict().values())


def sums_of(values: Any, num: int) -> tuple[Tensor, Any]:
    """The sum and the weight of a mean over samples, or by weights."""
    if isinstance(values, tuple):
        return (values[0] * values[1]).sum(), values[1].sum()
    return values.mean() * num, num


def schedule_of(config: Any, total_steps: int) -> Callable[[int], float]:
    """The factor of the rate by the number of steps done."""
    warmup = config.warmup_steps or 0

    def factor(done: int) -> float:
        if done < warmup:
            return (done + 1) / warmup
        part = (done - warmup) / (total_steps - warmup)
        falls = {"linear": 1 - part, "cosine": (1 + math.cos(math.pi * part)) / 2}
        return falls.get(config.schedule, 1.0)

    return factor


# --- beside it ------------------------------------------------------------------------


def same(
    trainer: Trainer, history: History, name: str, done: int = 0, rel: float = 1e-9
) -> None:
    """Compare what a training did after some steps with that of one process."""
    expected = by_hand(name)
    losses = [step.loss for step in history.steps]
    assert losses == pytest.approx(expected.losses[done:], rel=rel)
    values = history.epochs[-1].values
    for key, value in expected.means.items():
        assert values[key] == pytest.approx(value, rel=rel), key
    for key, value in expected.numbers.items():  # in one process summed in float32
        assert values[key] == pytest.approx(value, rel=max(rel, 1e-6)), key
    weights = list(trainer.state_dict().values())
    if torch.distributed.get_rank() == 0 and rel < 1e-6:
        for mine, other in zip(weights, expected.weights, strict=True):
            torch.testing.assert_close(mine, other, rtol=100 * rel, atol=0.1 * rel)


MICRO, FSDP = {"micro_batch_size": 2}, {"strategy": "fsdp"}


def cases() -> list[Any]:
    """All with all; slow: micro-batches where --bitwise is not refused, which has some,
    and shards where the optimizer is none of the example's own.
    """
    kept = [(name, MICRO) for name, setting in REFUSED if setting in MICRO]
    kept += [(name, FSDP) for name in ("finetuning", "gan", "contrastive", "stream")]
    return [(name, {}) for name in TRAININGS] + [
        (name, it) if (name, it) in kept else slow(name, it)
        for name in TRAININGS
        for it in (MICRO, FSDP)
    ]


@pytest.mark.parametrize(("name", "settings"), cases(), ids=str)
def test_a_training_is_that_of_one_process(
    world: World, tmp_path: Path, name: str, settings: dict[str, Any]
) -> None:
    history = History()
    trainer = built(name, world, tmp_path, **settings)
    trainer.callbacks = [history]
    refused = [message for it in settings if (message := REFUSED.get((name, it)))]
    # Torch's Muon does not take a matrix of fewer rows than ranks, as the head has.
    if name == "finetuning" and "strategy" in settings and world.world_size > 3:
        refused.append("(?s)Muon does not take .*--strategy ddp")
    if refused:
        with pytest.raises((UsageError, DataError), match=refused[0]):
            trainer.fit()
        return
    trainer.fit()
    # Muon computes in bfloat16, with fsdp in another order.
    is_rounded = name == "finetuning" and "strategy" in settings
    same(trainer, history, name, rel=1e-2 if is_rounded else 1e-9)


class StopsAt(Callback):
    def on_step_end(self, trainer: Trainer) -> None:
        if trainer.state.step == STOPS_AT:
            raise StopRequested("a test")


WITH_OWN_STATE = "finetuning", "gan", "stream", "language_model"
"""Optimizers and batches of their own, averages, epochs that are cut into steps."""


@pytest.mark.parametrize(
    "name", [it if it in WITH_OWN_STATE else slow(it) for it in TRAININGS]
)
def test_a_training_resumes_on_another_number_of_ranks(
    world: World, run_dir: Path, tmp_path: Path, parts: Any, name: str
) -> None:
    def train(part: World, done: int, *more: Callback) -> None:
        history = History()
        trainer = built(name, part, tmp_path)
        trainer.callbacks = [history, *more, Checkpointer(run_dir)]
        if more:
            with pytest.raises(Stopped):
                trainer.fit()
            losses = [step.loss for step in history.steps]
            expected = by_hand(name).losses[:STOPS_AT]
            assert losses == pytest.approx(expected, rel=1e-9)
        else:
            trainer.fit()
            assert trainer.resumed_from
            same(trainer, history, name, done)

    fewer = max(1, world.world_size - 1)
    parts(fewer, lambda part: train(part, 0, StopsAt()))
    parts(world.world_size, lambda part: train(part, STOPS_AT))


@pytest.mark.parametrize("name", TRAININGS)
def test_a_training_has_the_same_bits_on_any_number_of_ranks(
    world: World, tmp_path: Path, parts: Any, name: str
) -> None:
    def digest_on(part: World) -> str:
        history = History()
        trainer = built(name, part, tmp_path, bitwise=True)
        trainer.callbacks = [history]
        if message := REFUSED.get((name, "bitwise")):
            with pytest.raises(UsageError, match=message):
                trainer.fit()
            return ""
        trainer.fit()
        same(trainer, history, name)
        digest = hashlib.sha256(str(history.epochs[-1].values).encode())
        for weight in trainer.state_dict().values():
            digest.update(weight.numpy().tobytes())
        return digest.hexdigest()

    alone, together = parts(1, digest_on), parts(world.world_size, digest_on)
    if world.is_rank_zero:
        assert alone == together
