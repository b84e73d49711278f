"""A custom task and strategy, as docs/reference/tasks-and-strategies.md shows them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from mpitrain import Task, TrainConfig, Trainer, UsageError, World

PAGE = Path(__file__).parents[2] / "docs/reference/tasks-and-strategies.md"


def classes_of_the_page() -> dict[str, Any]:
    names: dict[str, Any] = {}
    for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        exec(code, names)
    return names


def numbers(num: int) -> TensorDataset:
    generator = torch.Generator().manual_seed(num)
    inputs = torch.randn(num, 6, generator=generator)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True))


def trained(world: World, **kinds: Any) -> tuple[dict[str, float], list[torch.Tensor]]:
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
    config = TrainConfig(
        precision="fp64", epochs=2, global_batch_size=12, micro_batch_size=3
    )
    trainer = Trainer(
        model, numbers(31), numbers(7), config, world=world, callbacks=(), **kinds
    )
    found = trainer.fit()
    return dict(found.values), list(trainer.state_dict().values())


def test_a_task_and_a_strategy_stand_in_one_file_each(world: World) -> None:
    page = classes_of_the_page()
    values, weights = trained(
        world, task=page["Regression"](), strategy=page["AllReduce"]
    )
    expected, others = trained(
        world,
        loss=lambda outputs, targets: (outputs - targets).square(),
        metrics=lambda outputs, targets: {"mae": (outputs - targets).abs()},
    )
    assert values == pytest.approx(expected, rel=1e-9)
    assert values.keys() == {"loss", "mae"}
    for mine, other in zip(weights, others, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-9, atol=1e-12)


def test_a_task_without_a_loss_says_what_it_lacks(world: World) -> None:
    class Bare(Task):
        pass

    with pytest.raises(UsageError, match="Bare has neither loss"):
        trained(world, task=Bare())


def test_arguments_of_the_default_task_do_not_go_with_another(world: World) -> None:
    with pytest.raises(UsageError, match="num_classes are ImageClassification's"):
        trained(world, task=Task(), num_classes=3)
