"""Parts of the ranks as worlds of their own: they train as if there were no others."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from trainings import by_hand, same, trained

import mpitrain
from mpitrain.launch.subworld import SubWorlds, in_node_order
from mpitrain.mpi.collectives import world_comm
from mpitrain.mpi.shared_arrays import communicator
from mpitrain.mpi.world import World

pytestmark = pytest.mark.mpi

SECONDS = 60.0


@pytest.fixture
def parts(job: mpitrain.Job) -> Any:
    with SubWorlds(job._guard, job.world, SECONDS) as made:
        yield made


def test_any_part_trains_as_all_ranks_do(parts: SubWorlds, world: World) -> None:
    expected = by_hand()

    def train(part: World) -> int:
        for strategy in ("auto", "fsdp"):
            same(trained(part, strategy=strategy), expected)
        return part.rank

    for _ in range(2):  # again, in the same job
        for num_ranks in range(1, world.world_size + 1):
            order = in_node_order(world)[:num_ranks]
            place = order.index(world.rank) if world.rank in order else None
            assert parts.run(num_ranks, train, "train") == place


def test_a_part_sees_itself_alone(parts: SubWorlds, world: World) -> None:
    def look(part: World) -> World:
        assert dist.get_world_size() == world_comm().size == part.world_size
        assert dist.get_rank() == world_comm().rank == part.rank
        assert communicator(part).allgather(part.rank) == list(range(part.world_size))
        ones = torch.ones(3)
        dist.all_reduce(ones)
        assert ones.tolist() == [part.world_size] * 3
        group = dist.new_group([0])  # of some of these ranks
        if part.rank == 0:
            assert dist.get_world_size(group) == 1
        return part

    for num_ranks in range(1, world.world_size + 1):
        part = parts.run(num_ranks, look, "look")
        if part is not None:
            assert part.nodes[part.node_rank].ranks[part.local_rank] == part.rank
            assert part.device == world.device
            assert part.num_threads == world.num_threads


def test_all_ranks_stand_again_afterwards(job: mpitrain.Job, world: World) -> None:
    with SubWorlds(job._guard, world, SECONDS) as parts:
        parts.run(1, lambda part: part, "look")
        assert not dist.is_initialized()
    assert dist.get_world_size() == world_comm().size == world.world_size
    ones = torch.ones(1)
    dist.all_reduce(ones)
    assert ones.item() == world.world_size
    same(trained(world), by_hand())


def test_who_is_not_in_it_sleeps(parts: SubWorlds, world: World) -> None:
    def work(_: World) -> None:
        end = time.monotonic() + 1.0
        while time.monotonic() < end:
            pass

    began, cpu_began = time.perf_counter(), time.process_time()
    parts.run(1, work, "spin")
    seconds, cpu_seconds = time.perf_counter() - began, time.process_time() - cpu_began
    assert seconds > 0.9
    if world.rank != in_node_order(world)[0]:
        assert cpu_seconds < 0.4 * seconds
