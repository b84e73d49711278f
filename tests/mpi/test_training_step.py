"""One step and one evaluation are exact, on however many ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from mpitrain.config import TrainConfig
from mpitrain.data.sharding import RankShard, epoch_order
from mpitrain.models.build import build_model
from mpitrain.mpi.world import World
from mpitrain.tasks.image_classification.datasets.named import InMemory, digits
from mpitrain.train.trainer import Trainer

if TYPE_CHECKING:
    from mpi4py import MPI

pytestmark = pytest.mark.mpi


def net() -> torch.nn.Module:
    return build_model(
        "convnet", num_classes=10, in_channels=1, image_size=8, seed=3
    ).double()


@pytest.mark.parametrize("num_samples", [64, 29, 7, 1])
@pytest.mark.parametrize("micro_batch_size", [None, 3, 1])
def test_the_gradient_is_that_of_one_process(
    world: World, num_samples: int, micro_batch_size: int | None
) -> None:
    data = digits().train
    assert isinstance(data, InMemory)
    samples = epoch_order(len(data), seed=1, epoch=1)[:num_samples]
    model = net()
    trainer = Trainer(
        model,
        data,
        digits().val,
        TrainConfig(precision="fp64", micro_batch_size=micro_batch_size),
        world=world,
    )
    engine = trainer.set_up()
    engine.start_stage(engine.plan.stages[0])
    rank_shard = RankShard(
        rank=world.rank,
        world_size=world.world_size,
        global_batch_size=trainer.config.global_batch_size,
        micro_batch_size=trainer.config.micro_batch_size,
        order=samples,
    )
    (step,) = engine.data.train_loader.steps(rank_shard, epoch=1)
    assert step.num_samples == num_samples
    trainer.train_step(step)
    trainer.sync_metrics()
    state = trainer.state

    alone = net()
    inputs, labels, *_ = data.batch(samples)
    loss = F.cross_entropy(alone(inputs.double()), labels)
    loss.backward()
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-10, atol=1e-12)

    assert state.num_samples == num_samples
    assert state.loss_sum / num_samples == pytest.approx(loss.item(), rel=1e-12)


def test_every_sample_has_one_rank(comm: MPI.Intracomm, world: World) -> None:
    order = epoch_order(29, seed=7, epoch=2)
    rank_shard = RankShard(
        rank=world.rank,
        world_size=world.world_size,
        global_batch_size=len(order),
        order=order,
    )
    shards = comm.allgather(np.concatenate(list(rank_shard)))
    np.testing.assert_array_equal(np.concatenate(shards), order)
    assert max(map(len, shards)) - min(map(len, shards)) <= 1


def test_evaluation_equals_that_of_one_process(world: World) -> None:
    samples = digits().val
    assert isinstance(samples, InMemory)
    trainer = Trainer(
        net(), digits().train, samples, TrainConfig(precision="fp64"), world=world
    )
    engine = trainer.set_up()
    engine.start_stage(engine.plan.stages[0])
    found = trainer.evaluate()
    with torch.no_grad():
        scores = net()(samples.inputs.double())
    assert found.num_samples == 360
    assert found.loss == pytest.approx(
        F.cross_entropy(scores, samples.targets).item(), rel=1e-12
    )
    correct = (scores.argmax(1) == samples.targets).sum().item()
    assert found.accuracy == correct / 360


def test_weights_start_equal_on_all_ranks(comm: MPI.Intracomm) -> None:
    sums = comm.allgather(sum(p.sum().item() for p in net().parameters()))
    assert len(set(sums)) == 1
