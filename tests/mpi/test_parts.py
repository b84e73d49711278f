"""Parts of the ranks as worlds of their own: they train as if there were no others."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from trainings import by_hand, same, trained

import mpitrain
from mpitrain.launch.parts import Parts, in_node_order
from mpitrain.launch.shared import all_ranks
from mpitrain.topology import working_ranks
from mpitrain.world import World

pytestmark = pytest.mark.mpi

SECONDS = 60.0


@pytest.fixture
def parts(job: mpitrain.Job) -> Any:
    with Parts(job._guard, job.world, SECONDS) as made:
        yield made


def test_any_part_trains_as_all_ranks_do(parts: Parts, world: World) -> None:
    expected = by_hand()

    def train(part: World) -> int:
        for strategy in ("auto", "fsdp"):
            same(trained(part, strategy=strategy), expected)
        return part.rank

    for _ in range(2):  # again, in the same job
        for num_ranks in range(1, world.world_size + 1):
            order = in_node_order(world)[:num_ranks]
            place = order.index(world.rank) if world.rank in order else None
            assert parts.work(num_ranks, train, "train") == place


def test_a_part_sees_itself_alone(parts: Parts, world: World) -> None:
    def look(part: World) -> World:
        assert dist.get_world_size() == working_ranks().size == part.world_size
        assert dist.get_rank() == working_ranks().rank == part.rank
        assert all_ranks(part).tell_all(part.rank) == list(range(part.world_size))
        ones = torch.ones(3)
        dist.all_reduce(ones)
        assert ones.tolist() == [part.world_size] * 3
        group = dist.new_group([0])  # of some of these ranks
        if part.rank == 0:
            assert dist.get_world_size(group) == 1
        return part

    for num_ranks in range(1, world.world_size + 1):
        part = parts.work(num_ranks, look, "look")
        if part is not None:
            assert part.nodes[part.node_rank].ranks[part.local_rank] == part.rank
            assert part.device == world.device
            assert part.num_threads == world.num_threads


def test_all_ranks_stand_again_afterwards(job: mpitrain.Job, world: World) -> None:
    with Parts(job._guard, world, SECONDS) as parts:
        parts.work(1, lambda part: part, "look")
        assert not dist.is_initialized()
    assert dist.get_world_size() == working_ranks().size == world.world_size
    ones = torch.ones(1)
    dist.all_reduce(ones)
    assert ones.item() == world.world_size
    same(trained(world), by_hand())


def test_who_is_not_in_it_sleeps(parts: Parts, world: World) -> None:
    def work(_: World) -> None:
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            pass

    parts.work(1, work, "spin")
    if world.rank == in_node_order(world)[0]:
        assert parts.asleep_seconds == 0.0
    else:
        assert parts.asleep_seconds > 0.9
        assert parts.asleep_cpu_seconds < 0.4 * parts.asleep_seconds
