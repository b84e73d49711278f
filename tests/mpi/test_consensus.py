"""All ranks decide the same at the same step, though one alone knows why."""

from __future__ import annotations

import random
import time

import pytest
import torch
import torch.distributed as dist

from mpitrain.mpi.consensus import Consensus
from mpitrain.mpi.world import World


def test_what_one_rank_wants_all_hear_at_the_same_step(world: World) -> None:
    """At whatever pace: steps that are quick, slow, and of two kinds."""
    chance = random.Random(world.rank)
    consensus = Consensus(world, count=2, kinds=2)
    heard: list[tuple[int, list[int]]] = []
    calls: list[int] = []
    wants = world.world_size - 1
    for step in range(400):
        dist.all_reduce(torch.ones(1))  # as a step's gradients do
        time.sleep(chance.uniform(0, 0.002) if step % 40 < 20 else 0.005)
        kind = int(step % 40 >= 30)
        if not consensus.is_due(kind):
            continue
        calls.append(step)
        is_wanted = world.rank == wants and step >= 200
        if (found := consensus.exchange([int(is_wanted), -world.rank])) is not None:
            heard.append((step, found))
    consensus.close()
    everybody: list[object] = [None] * world.world_size
    dist.all_gather_object(everybody, (heard, calls))
    assert everybody == [everybody[0]] * world.world_size
    assert heard
    assert all(found[1] == 0 for _, found in heard)
    first = next(step for step, found in heard if found[0])
    asked = next(step for step in calls if step >= 200)
    assert first == next(step for step in calls if step > asked)


def test_it_is_asked_for_rarely_where_steps_are_quick(world: World) -> None:
    consensus = Consensus(world, count=1, kinds=1)
    num = 0
    for _ in range(3000):
        if consensus.is_due(0):
            consensus.exchange([0])
            num += 1
    consensus.close()
    assert num < 300


def test_work_that_becomes_slow_is_not_waited_for_long(world: World) -> None:
    consensus = Consensus(world, count=1, kinds=1)
    for _ in range(300):
        if consensus.is_due(0):
            consensus.exchange([0])
    dues = [consensus.is_due(0) for _ in range(40)]
    assert any(dues)
    consensus.exchange([0])
    assert not consensus.is_due(0)
    consensus.forget()
    assert consensus.is_due(0)
    consensus.exchange([0])
    consensus.close()


@pytest.mark.parametrize("late", [0, -1])
def test_a_rank_that_is_late_keeps_none_but_those_who_need_it(
    late: int, world: World
) -> None:
    """Nobody waits at the exchange that is begun, only at the one after."""
    consensus = Consensus(world, count=1, kinds=1)
    assert consensus.is_due(0)
    started = time.monotonic()
    if world.rank == late % world.world_size and world.world_size > 1:
        time.sleep(0.5)
    consensus.exchange([world.rank])
    passed = time.monotonic() - started
    if world.rank != late % world.world_size:
        assert passed < 0.4
    assert consensus.exchange([0]) == [world.world_size - 1]
    consensus.close()
