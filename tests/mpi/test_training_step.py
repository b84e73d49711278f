"""One step and one evaluation are exact, on however many ranks."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from mpitrain.data.sharding import epoch_order, shard_of
from mpitrain.data.sources import InMemory, digits
from mpitrain.models import build_model
from mpitrain.train.config import TrainConfig
from mpitrain.train.evaluate import evaluate
from mpitrain.train.loop import accumulate_gradient, replicate
from mpitrain.train.plan import Plan
from mpitrain.world import World

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
    samples = epoch_order(len(data), seed=1, epoch=1)[:num_samples]
    plan = Plan(
        num_samples=len(data),
        world_size=world.world_size,
        config=TrainConfig(precision="fp64", micro_batch_size=micro_batch_size),
    )

    model = net()
    sums = accumulate_gradient(replicate(model, world), data, samples, world, plan)

    alone = net()
    inputs, labels = data.batch(samples)
    loss = F.cross_entropy(alone(inputs.double()), labels)
    loss.backward()
    for one, other in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad, rtol=1e-10, atol=1e-12)

    torch.distributed.all_reduce(sums)
    assert sums[1].item() == num_samples
    assert (sums[0] / sums[1]).item() == pytest.approx(loss.item(), rel=1e-12)


def test_every_sample_has_one_rank(comm: MPI.Intracomm, world: World) -> None:
    order = epoch_order(29, seed=7, epoch=2)
    shards = comm.allgather(shard_of(order, world.rank, world.world_size))
    np.testing.assert_array_equal(np.concatenate(shards), order)
    assert max(map(len, shards)) - min(map(len, shards)) <= 1


def test_evaluation_equals_that_of_one_process(world: World) -> None:
    samples = digits().val
    assert isinstance(samples, InMemory)
    found = evaluate(net(), samples, world, torch.float64, print)
    with torch.no_grad():
        scores = net()(samples.inputs.double())
    assert found.num_samples == 360
    assert found.loss == pytest.approx(
        F.cross_entropy(scores, samples.labels).item(), rel=1e-12
    )
    correct = (scores.argmax(1) == samples.labels).sum().item()
    assert found.accuracy == correct / 360


def test_weights_start_equal_on_all_ranks(comm: MPI.Intracomm) -> None:
    sums = comm.allgather(sum(p.sum().item() for p in net().parameters()))
    assert len(set(sums)) == 1
