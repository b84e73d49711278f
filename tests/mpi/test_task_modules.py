"""Modules that are attributes of a task: equal on all ranks, and no part in silence."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from reference_training import NUM_SAMPLES, Net, config_of, some
from torch import Tensor, nn

from mpitrain.errors import DataError, UsageError
from mpitrain.mpi.collectives import world_comm
from mpitrain.mpi.world import World
from mpitrain.tasks.task import Task
from mpitrain.train.trainer import Trainer

pytestmark = pytest.mark.mpi


class Distilling(Task):
    """Trains towards the outputs of teachers, whose numbers differ between ranks."""

    def __init__(self, model: nn.Module, world: World) -> None:
        super().__init__()
        torch.manual_seed(world.rank)
        self.teacher = nn.Linear(64, 10, dtype=torch.float16).requires_grad_(False)
        self.more = [nn.Linear(64, 10)]
        self.head = model.head  # type: ignore[attr-defined]
        self.norm: nn.Module = nn.Identity()

    def training_step(self, model: Any, batch: Any) -> Tensor:
        inputs = batch.inputs.flatten(1)
        wanted = self.teacher(inputs.half()).double()
        wanted = self.norm(wanted + self.more[0](inputs.float()).double())
        return (model(batch.inputs) - wanted.detach()).square().mean(1)

    def validation_step(self, model: Any, batch: Any) -> dict[str, Tensor]:
        return {"loss": self.training_step(model, batch)}


def fit(task: Task, model: nn.Module, world: World, **settings: Any) -> Trainer:
    data, config = some(NUM_SAMPLES), config_of(epochs=1, **settings)
    trainer = Trainer(model, data, None, config, world=world, task=task)
    trainer.fit()
    return trainer


def test_they_are_rank_zeros_and_keep_their_dtype(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    model = Net()
    task = Distilling(model, world)
    fit(task, model, world)
    mine = [task.teacher.weight.tolist(), task.more[0].weight.tolist()]
    of_ranks = world_comm().allgather(mine)
    assert of_ranks == of_ranks[:1] * world.world_size
    assert task.teacher.weight.dtype == torch.float16
    assert task.teacher.weight.device.type == torch.device(world.device).type
    warnings = [it.getMessage() for it in caplog.records if "has weights" in it.msg]
    assert len(warnings) == world.is_rank_zero  # not of a part of the model
    for text in warnings:
        assert "the task's more[0] has weights that the model does not have" in text
        assert "neither trained nor saved: weight, bias" in text


@pytest.mark.parametrize("bitwise", [False, True])
def test_one_whose_buffers_move_is_refused(world: World, bitwise: bool) -> None:
    model = Net()
    task = Distilling(model, world)
    task.norm = nn.BatchNorm1d(10, affine=False, dtype=torch.float64)
    if world.world_size == 1 and not bitwise:
        fit(task, model, world)
        return
    with pytest.raises(UsageError, match="buffers of the task's norm change in a step"):
        fit(task, model, world, bitwise=bitwise)


def test_ranks_with_other_modules_are_refused(world: World) -> None:
    if world.world_size == 1:
        return
    model = Net()
    task = Distilling(model, world)
    if not world.is_rank_zero:
        vars(task)["critic"] = nn.Linear(1, 1)
    with pytest.raises(DataError, match=r"the task's modules differs .*critic"):
        fit(task, model, world)


def test_a_lazy_one_is_refused(world: World) -> None:
    model = Net()
    task = Distilling(model, world)
    task.norm = nn.LazyLinear(3)
    with pytest.raises(UsageError, match="the task's norm has lazy modules; expected"):
        fit(task, model, world)


class Accuracy(nn.Module):
    """A metric object that is a module, with a weight that no rank is to compare."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(rank + 1))
        self.num = 0

    def update(self, outputs: Any, targets: Any) -> None:
        self.num += len(targets)

    def compute(self) -> int:
        return self.num

    def reset(self) -> None:
        self.num = 0


def test_metric_objects_are_left_alone(world: World) -> None:
    model = Net()
    task = Distilling(model, world)
    vars(task)["accuracy"] = Accuracy(world.rank)
    fit(task, model, world)
