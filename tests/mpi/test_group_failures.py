"""What goes wrong in groups of the mpi4py backend: who is named, what stays whole."""

from __future__ import annotations

import gc
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import transports
from transports import all_gather_single, group_of, reduce_scatter_single

from mpitrain.backend.group import default_communicator
from mpitrain.errors import TopologyError
from mpitrain.mpi.world import World

pytestmark = pytest.mark.mpi

WHO = "rank 0 did not arrive|no report from rank 0:"
"""The first on one node, the other through MPI."""

Call = Callable[[dist.ProcessGroup, World], None]


def other_shape(group: dist.ProcessGroup, world: World) -> None:
    dist.all_reduce(torch.ones(4 if world.rank else 5), group=group)


def other_type(group: dist.ProcessGroup, world: World) -> None:
    dtype = torch.float64 if world.rank else torch.float32
    dist.all_reduce(torch.ones(4, dtype=dtype), group=group)


def other_call(group: dist.ProcessGroup, world: World) -> None:
    if world.rank:
        dist.barrier(group=group)
    else:
        dist.broadcast(torch.ones(4), 0, group=group)


def other_root(group: dist.ProcessGroup, world: World) -> None:
    dist.broadcast(torch.ones(4), min(world.rank, 1), group=group)


def test_a_group_that_is_closed_refuses(world: World) -> None:
    """As a sharded model meets it that is used after the job's end."""
    from mpitrain.backend.op_queue import GroupError

    group = group_of()
    dist.barrier(group=group)
    ours = group._get_backend(torch.device("cpu"))._group
    dist.destroy_process_group(group)
    with pytest.raises(GroupError, match="is closed; expected no operation"):
        ours.queue.run(lambda deadline: None, 10.0)
    # As DDP meets it in a backward pass: it asks, and waits for the future alone.
    future = ours.queue.submit(lambda deadline: None, [], 10.0).get_future()
    assert future.done()
    with pytest.raises(RuntimeError, match="is closed; expected no operation"):
        future.value()


@pytest.mark.parametrize("call", [other_shape, other_type, other_call, other_root])
def test_ranks_that_disagree_are_told_so(world: World, call: Call) -> None:
    group = group_of()
    if world.world_size == 1:
        call(group, world)
    if world.world_size == 1 or world.num_nodes > 1:
        return  # between nodes MPI carries bytes and does not know
    with pytest.raises(dist.DistBackendError, match="different operations") as error:
        call(group, world)
    assert "rank 0:" in str(error.value)
    if call is other_shape:
        others = ", ".join(f"rank {rank}" for rank in range(1, world.world_size))
        assert "  rank 0: all_reduce SUM torch.float32 5\n" in str(error.value)
        assert f"  {others}: all_reduce SUM torch.float32 4\n" in str(error.value)
    with pytest.raises(dist.DistBackendError, match="failed before"):
        dist.barrier(group=group)


def test_more_ranks_than_mpi_knows_are_refused(world: World) -> None:
    """As under torchrun, where each process is a world of MPI."""
    told = world.world_size + 1
    words = f"was told of {told} ranks, MPI knows {world.world_size}"
    with pytest.raises(TopologyError, match=words):
        default_communicator(world.rank, told)


@pytest.mark.parametrize("is_async", [False, True])
def test_who_does_not_come_is_named(world: World, is_async: bool) -> None:
    group = group_of(seconds=1.0)
    if world.rank > 0:

        def reduce() -> None:
            work = dist.all_reduce(torch.ones(3), group=group, async_op=is_async)
            if work is not None:
                work.wait()

        with pytest.raises(dist.DistBackendError, match=WHO):
            reduce()
    dist.barrier()


@pytest.mark.usefixtures("mpi_alone")
def test_who_does_not_come_is_named_through_mpi(world: World) -> None:
    group = group_of(seconds=1.0)
    last = world.world_size - 1
    dist.all_reduce(torch.ones(3), group=group)
    started = time.monotonic()
    if world.rank < last:
        with pytest.raises(dist.DistBackendError) as error:
            dist.all_reduce(torch.ones(3), group=group)
        said = str(error.value)
        assert f"no report from rank {last}:" in said
        assert said.count("operation 2 of the group: all_reduce was not done") == 1
        with pytest.raises(dist.DistBackendError, match="failed before"):
            dist.barrier(group=group)
        assert time.monotonic() - started < 30
    dist.barrier()


def test_who_waits_for_another_node_is_not_accused(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One number: the first rank of each node combines it, the others wait for that."""
    transports.on_two_nodes(monkeypatch, world.rank)
    group = group_of(seconds=1.0)
    last = world.world_size - 1
    if world.world_size >= 4 and world.rank < last:
        if world.rank == 0:
            time.sleep(0.3)  # those that wait for it give up before
        with pytest.raises(dist.DistBackendError) as error:
            dist.all_reduce(torch.ones(1), group=group)
        said = str(error.value)
        assert "rank 0 did not arrive" not in said
        assert f"no report from rank {last}:" in said
    dist.barrier()


@pytest.mark.parametrize("what", ["all_reduce", "all_gather", "recv", "send"])
@pytest.mark.usefixtures("mpi_alone")
def test_who_comes_late_writes_into_nobodys_memory(world: World, what: str) -> None:
    """MPI still has an operation that a rank has given up."""
    group = group_of(seconds=0.5)
    size, other = 200_000, (world.rank + 1) % world.world_size
    if world.world_size == 1:
        return

    def meet() -> None:
        found = torch.ones(size)
        if what == "all_reduce":
            dist.all_reduce(found, group=group)
        elif what == "all_gather":
            many = torch.empty(world.world_size * size)
            all_gather_single()(many, found, group=group)
        elif (what == "recv") == (world.rank > 0):
            dist.recv(found, 0 if world.rank else other, group=group)
        else:
            for to in range(1, world.world_size) if world.rank == 0 else [0]:
                dist.send(found, to, group=group)

    def meet_in_vain() -> None:
        with suppress(dist.DistBackendError):
            meet()

    mine = []
    if world.rank > 0:
        meet_in_vain()
        gc.collect()
        mine = [torch.full((size,), 7.0) for _ in range(10)]
    dist.barrier()
    if world.rank == 0:
        meet_in_vain()
    dist.barrier()
    time.sleep(0.2)
    dist.barrier()  # MPI goes on in here
    assert all(one.eq(7).all() for one in mine)


def test_an_error_is_one_to_all_who_ask(world: World) -> None:
    group = group_of(seconds=0.5)
    if world.rank > 0:
        work = dist.all_reduce(torch.ones(3), group=group, async_op=True)
        future = work.get_future()
        with pytest.raises(RuntimeError, match=WHO):
            future.wait()
        assert work.is_completed()
        assert not work.is_success()
        with pytest.raises(dist.DistBackendError, match=WHO):
            work.wait()
    dist.barrier()


def test_one_rank_that_fails_is_told_to_the_others(world: World) -> None:
    group = group_of()
    if world.world_size == 1 or world.num_nodes > 1:
        return  # between nodes nobody is told
    started = time.monotonic()
    sizes = [1] * world.world_size
    expected = [*sizes[1:], 2] if world.rank == 0 else sizes
    found = torch.empty(sum(expected))
    with pytest.raises(dist.DistBackendError, match=r"expects \[.*\] bytes"):
        dist.all_to_all_single(found, torch.ones(len(sizes)), expected, sizes, group)
    assert time.monotonic() - started < 15
    dist.barrier()


def test_a_result_of_another_size_is_refused(world: World) -> None:
    group = group_of()
    whole = torch.ones(2 * world.world_size)
    with pytest.raises(ValueError, match="output has 5 elements, expected 2"):
        reduce_scatter_single()(torch.empty(5), whole, group=group)
    dist.barrier(group=group)


def test_a_monitored_barrier_names_who_is_missing(world: World) -> None:
    group = group_of()
    if world.rank > 0:
        with pytest.raises(dist.DistBackendError, match=WHO):
            dist.monitored_barrier(group, timedelta(seconds=0.5))
    dist.barrier()


def test_a_message_of_another_length_is_refused(world: World) -> None:
    group = group_of()
    if world.world_size == 1:
        return
    if world.rank == 0:
        dist.send(torch.ones(3), 1, group=group)
    if world.rank == 1:
        with pytest.raises(
            dist.DistBackendError, match="received 12 bytes, expected 20"
        ):
            dist.recv(torch.ones(5), 0, group=group)
