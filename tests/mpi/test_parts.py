"""Parts of the ranks as worlds of their own: they train as if there were no others."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from reference_training import by_hand, same, trained
from sub_worlds import in_node_order, numbers

import mpitrain
from mpitrain.launch.subworld import sub_world
from mpitrain.mpi.collectives import barrier, world_comm
from mpitrain.mpi.shared_arrays import communicator
from mpitrain.mpi.world import World

pytestmark = pytest.mark.mpi


def test_any_part_trains_as_all_ranks_do(parts: Any, world: World) -> None:
    expected = by_hand()

    def train(part: World) -> int:
        for strategy in ("auto", "fsdp"):
            same(trained(part, strategy=strategy), expected)
        return part.rank

    for _ in range(2):  # again, in the same job
        for num_ranks in range(1, world.world_size + 1):
            order = in_node_order(world)[:num_ranks]
            place = order.index(world.rank) if world.rank in order else None
            assert parts(num_ranks, train) == place


def test_a_part_sees_itself_alone(parts: Any, world: World) -> None:
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
        part = parts(num_ranks, look)
        if part is not None:
            assert part.nodes[part.node_rank].ranks[part.local_rank] == part.rank
            assert part.device == world.device
            assert part.num_threads == world.num_threads


@pytest.mark.parametrize("how", ["all_reduce", "barrier"])
@pytest.mark.parametrize("transport", ["on_node", "mpi_alone"])
def test_a_wait_for_a_rank_that_does_not_come_can_be_cancelled(
    job: mpitrain.Job, world: World, how: str, transport: str, request: Any
) -> None:
    """Then the others go on, with another group."""
    if transport == "mpi_alone":
        request.getfixturevalue("mpi_alone")
    parts = request.getfixturevalue("parts")
    until = time.monotonic() + 0.5

    def check() -> None:
        if time.monotonic() > until:
            raise InterruptedError("cancelled")

    def meet() -> None:
        with job.mpi.cancel_waits_by(check):
            if how == "barrier":
                barrier(world_comm())
            else:
                dist.all_reduce(torch.ones(3))

    size = world.world_size
    if size > 1:
        with contextlib.suppress(InterruptedError):
            ranks, number = in_node_order(world), next(numbers)
            with sub_world(job, world, ranks, number, 60.0) as part:
                if part.rank < part.world_size - 1:
                    with pytest.raises(InterruptedError):
                        meet()
                raise InterruptedError  # as of a trial that failed
    assert parts(size, lambda part: part.rank) is not None


def test_all_ranks_stand_again_afterwards(world: World) -> None:
    assert dist.get_world_size() == world_comm().size == world.world_size
    ones = torch.ones(1)
    dist.all_reduce(ones)
    assert ones.item() == world.world_size
    same(trained(world), by_hand())
