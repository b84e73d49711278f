"""The trainings of `examples/trainings` beside one plain PyTorch process."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
import torch
from reference_training import History
from torch import Tensor

from mpitrain import Batch, Trainer, World
from mpitrain.data.randomness import seeded
from mpitrain.data.sharding import epoch_order
from mpitrain.train.model import spread_inputs

pytestmark = [
    pytest.mark.mpi,
    pytest.mark.filterwarnings("ignore:FSDP2-wrapped module"),
    pytest.mark.filterwarnings("ignore:No positive samples"),
]

PLAIN = {"schedule": "constant", "warmup_epochs": 0, "precision": "fp64", "epochs": 2}
OPTIMIZERS = {"adam": torch.optim.Adam, "adamw": torch.optim.AdamW}


def built(name: str, world: World | None, tmp_path: Path, **settings: Any) -> Trainer:
    module_name, _, function = name.partition(":")
    module = importlib.import_module(f"examples.trainings.{module_name}")
    more = {"folder": str(tmp_path)} if module_name == "surrogate" else {}
    build: Any = getattr(module, function or "build")
    trainer: Trainer = build(world, **more, **PLAIN | settings)
    trainer.callbacks = []
    return trainer


def by_hand(trainer: Trainer) -> tuple[list[float], float, list[Tensor]]:
    """Losses of the steps, the last of the validation, and weights: of one process."""
    config, model = trainer.config, trainer.model.double()
    task = trainer.task
    task.config = config
    options = {"lr": config.lr, "weight_decay": config.weight_decay}
    optimizer = OPTIMIZERS[config.optimizer](model.parameters(), **options)
    collate = task.collate_fn or torch.utils.data.default_collate

    def call(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = spread_inputs(model, args, kwargs)
        return model(*args, **kwargs)

    def batch_of(data: Any, indices: list[int], epoch: int) -> Batch:
        samples = []
        for index in indices:
            with seeded(config.seed, epoch, index):
                samples.append(data[index])
        found = collate(samples)
        is_pair = isinstance(found, tuple | list) and len(found) == 2
        inputs, targets = found if is_pair else (found, found)
        return Batch(double(inputs), double(targets), epoch_order(1, 1, 1), 1)

    def mean_of(losses: Any) -> Tensor:
        losses = losses["loss"] if isinstance(losses, dict) else losses
        if isinstance(losses, tuple):
            return (losses[0] * losses[1]).sum() / losses[1].sum()
        return losses.mean()

    steps = []
    for epoch in range(1, config.epochs + 1):
        order = epoch_order(len(trainer.train_data), config.seed, epoch).tolist()
        for start in range(0, len(order), config.global_batch_size):
            chosen = order[start : start + config.global_batch_size]
            batch = batch_of(trainer.train_data, chosen, epoch)
            loss = mean_of(task.training_step(call, batch))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            steps.append(loss.item())
    with torch.no_grad():
        whole = batch_of(trainer.val_data, list(range(len(trainer.val_data))), 0)
        validation = mean_of(task.training_step(call, whole)).item()
    return steps, validation, list(model.state_dict().values())


def double(tree: Any) -> Any:
    from mpitrain.data.samples import to_dtype

    return to_dtype(tree, torch.float64)


@pytest.mark.parametrize(
    "settings",
    [{}, {"micro_batch_size": 2}, {"strategy": "fsdp"}, {"bitwise": True}],
    ids=str,
)
@pytest.mark.parametrize(
    "name",
    ["segmentation", "surrogate", "graphs", "imbalance", "imbalance:build_multilabel"],
)
def test_a_training_is_that_of_one_process(
    world: World, tmp_path: Path, name: str, settings: dict[str, Any]
) -> None:
    history = History()
    trainer = built(name, world, tmp_path, **settings)
    trainer.callbacks = [history]
    trainer.fit()
    weights = list(trainer.state_dict().values())
    steps, validation, expected = by_hand(built(name, None, tmp_path))
    assert [step.loss for step in history.steps] == pytest.approx(steps, rel=1e-9)
    found = history.epochs[-1].values["loss"]
    assert found == pytest.approx(validation, rel=1e-9)
    if world.rank == 0:
        for mine, other in zip(weights, expected, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-7, atol=1e-10)
