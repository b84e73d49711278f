"""Groups of ranks and asynchronous operations of the mpi4py backend."""

from __future__ import annotations

import gc
import itertools
import time
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import mpitrain.mpi_backend  # noqa: F401 - registers it
from mpitrain.mpi_backend import over_mpi, points
from mpitrain.world import World

pytestmark = pytest.mark.mpi


def group_of(
    ranks: list[int] | None = None, seconds: float = 30.0, **more: object
) -> dist.ProcessGroup:
    timeout = timedelta(seconds=seconds)
    return dist.new_group(ranks, timeout=timeout, backend="mpi4py", **more)


# --- asynchronous ---------------------------------------------------------------------


def test_asynchronous_returns_at_once(world: World) -> None:
    group = group_of()
    late = world.world_size - 1
    dist.barrier(group=group)
    if world.rank == late:
        time.sleep(0.5)
    found = torch.full((1000,), float(world.rank))
    started = time.perf_counter()
    work = dist.all_reduce(found, group=group, async_op=True)
    took = time.perf_counter() - started
    if world.rank != late:
        assert took < 0.3
        assert not work.is_completed()
    work.wait()
    assert work.is_completed()
    assert work.is_success()
    assert found.eq(sum(range(world.world_size))).all()


def test_operations_keep_their_order(world: World) -> None:
    group = group_of()
    found, works = torch.ones(300), []
    for root in range(40):
        works.append(dist.all_reduce(found, group=group, async_op=True))
        works.append(
            dist.broadcast(found, root % world.world_size, group, async_op=True)
        )
        if root % 10 == 3:
            dist.barrier(group=group)  # waits for those before
            assert all(work.is_completed() for work in works)
        found_then = found
        if root % 5 == 0:
            works[-1].wait()
            found_then.div_(found_then[0].item())
    works[-1].wait()
    assert found.eq(found[0]).all()


def test_groups_do_not_wait_for_each_other(world: World) -> None:
    """Even ranks ask the one first, odd ranks the other: no deadlock, no mixing."""
    groups = [group_of() for _ in range(3)]
    for turn in range(5):
        tensors = [torch.full((2000,), float(10**i)) for i in range(3)]
        order = [0, 1, 2] if world.rank % 2 == 0 else [2, 1, 0]
        works = {
            i: dist.all_reduce(tensors[i], group=groups[i], async_op=True)
            for i in order
        }
        for i in reversed(order) if turn % 2 else order:
            works[i].wait()
        for i, tensor in enumerate(tensors):
            assert tensor.eq(world.world_size * 10.0**i).all()


def test_futures_carry_the_tensors(world: World) -> None:
    group = group_of()
    found = torch.ones(10)
    work = dist.all_reduce(found, group=group, async_op=True)
    half = work.get_future().then(lambda done: done.value()[0] / 2)
    assert half.wait().eq(world.world_size / 2).all()


def test_what_follows_may_ask_for_more(world: World) -> None:
    """Compression hooks of DDP reduce again when the first is done."""
    group = group_of()
    first, second = torch.ones(10), torch.ones(5)

    def follow(done: torch.futures.Future) -> torch.Tensor:
        dist.all_reduce(second, group=group)
        return done.value()[0]

    future = dist.all_reduce(first, group=group, async_op=True).get_future()
    future.then(follow).wait()
    assert second.eq(world.world_size).all()


def test_inference_mode_is_no_obstacle(world: World) -> None:
    group = group_of()
    with torch.inference_mode():
        found = torch.ones(10)
        dist.all_reduce(found, group=group, async_op=True).wait()
    weights = torch.ones(10, requires_grad=True)
    dist.all_reduce(weights, group=group)
    assert found.eq(world.world_size).all()
    assert weights.eq(world.world_size).all()


# --- groups ---------------------------------------------------------------------------


def test_any_ranks_in_any_order(world: World) -> None:
    ranks = range(world.world_size)
    made = [
        (list(some), group_of(list(some)))
        for size in (1, 2, 3)
        for some in itertools.combinations(ranks, size)
    ]
    for some, group in reversed(made):
        if world.rank in some:
            found = torch.tensor([float(world.rank)])
            dist.all_reduce(found, group=group)
            assert found.item() == sum(some)
            assert dist.get_rank(group) == some.index(world.rank)


def test_only_its_members_need_to_make_a_group(world: World) -> None:
    mine = [r for r in range(world.world_size) if r // 2 == world.rank // 2]
    group = group_of(mine, use_local_synchronization=True)
    found = torch.ones(1)
    dist.all_reduce(found, group=group)
    assert found.item() == len(mine)


def test_a_group_splits(world: World) -> None:
    parent = group_of()
    ranks = list(range(world.world_size))
    parts = [part for part in (ranks[::2], ranks[1::2]) if part]
    group = dist.split_group(parent, parts)
    mine = next(part for part in parts if world.rank in part)
    found = torch.tensor([float(world.rank)])
    dist.all_reduce(found, group=group)
    assert found.item() == sum(mine)


def test_a_mesh_has_groups(world: World) -> None:
    if world.world_size % 2:
        return  # two rows want an even number
    mesh = init_device_mesh(
        "cpu", (2, world.world_size // 2), mesh_dim_names=("replicate", "shard")
    )
    for name in ("replicate", "shard"):
        found = torch.tensor([float(world.rank)])
        dist.all_reduce(found, group=mesh.get_group(name))
        assert found.item() == sum(dist.get_process_group_ranks(mesh.get_group(name)))


def test_memory_is_given_back(world: World) -> None:
    def shared() -> int:
        return Path("/proc/self/maps").read_text().count("mpitrain-")

    before = shared()
    group = group_of()
    dist.all_reduce(torch.ones(10), group=group, async_op=True).wait()
    if max(len(node.ranks) for node in world.nodes) > 1:
        assert shared() > before
        assert not list(Path("/dev/shm").glob("mpitrain-*"))  # it has no name
    dist.destroy_process_group(group)
    del group
    assert shared() == before


# --- what goes wrong ------------------------------------------------------------------

WHO = "rank 0 did not come|nothing was heard from rank 0:"
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


@pytest.mark.parametrize("call", [other_shape, other_type, other_call, other_root])
def test_ranks_that_disagree_are_told_so(world: World, call: Call) -> None:
    group = group_of()
    if world.world_size == 1:
        call(group, world)
    if world.world_size == 1 or world.num_nodes > 1:
        return  # between nodes MPI carries bytes and does not know
    with pytest.raises(dist.DistBackendError, match="different things") as error:
        call(group, world)
    assert "rank 0:" in str(error.value)
    with pytest.raises(dist.DistBackendError, match="failed before"):
        dist.barrier(group=group)


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
        assert f"nothing was heard from rank {last}:" in said
        assert said.count("operation 2 of the group: all_reduce was not done") == 1
        with pytest.raises(dist.DistBackendError, match="failed before"):
            dist.barrier(group=group)
        assert time.monotonic() - started < 30
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
            dist.all_gather_into_tensor(many, found, group=group)
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


def test_what_follows_may_wait_for_more(world: World) -> None:
    """As PowerSGD's hook does: in the thread that would do it."""
    group = group_of()
    dist.barrier(group=group)
    total = sum(range(world.world_size))

    def reduce_again(_: torch.futures.Future) -> float:
        again = torch.full((3,), float(world.rank))
        dist.all_reduce(again, group=group, async_op=True).get_future().wait()
        return again[0].item()

    late = torch.ones(3_000_000)  # not done before something follows on it
    work = dist.all_reduce(late, group=group, async_op=True)
    assert work.get_future().then(reduce_again).wait() == total
    work.wait()


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


def test_a_message_may_be_answered_while_another_is_waited_for(world: World) -> None:
    group = group_of()
    one = torch.ones(1)
    if world.world_size == 1:
        return
    if world.rank == 0:
        asked = dist.irecv(one.clone(), 1, group=group, tag=2)
        last = dist.irecv(one.clone(), 1, group=group, tag=1)
        answer = asked.get_future().then(
            lambda _: dist.isend(one, 1, group=group, tag=3).wait()
        )
        last.wait()
        answer.wait()
    elif world.rank == 1:
        time.sleep(0.3)  # the other one waits by now
        dist.send(one, 0, group=group, tag=2)
        dist.recv(one.clone(), 0, group=group, tag=3)
        dist.send(one, 0, group=group, tag=1)


def test_a_result_of_another_size_is_refused(world: World) -> None:
    group = group_of()
    whole = torch.ones(2 * world.world_size)
    with pytest.raises(ValueError, match="output has 5 elements, expected 2"):
        dist.reduce_scatter_tensor(torch.empty(5), whole, group=group)
    dist.barrier(group=group)


def test_waiting_may_end_before_the_operation(world: World) -> None:
    group = group_of()
    if world.rank == 0:
        time.sleep(0.6)
    found = torch.ones(3)
    work = dist.all_reduce(found, group=group, async_op=True)
    if world.rank > 0:
        with pytest.raises(dist.DistBackendError, match="not done within"):
            work.wait(timedelta(seconds=0.1))
    work.wait()
    assert found.eq(world.world_size).all()


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
        with pytest.raises(dist.DistBackendError, match="12 bytes came, expected 20"):
            dist.recv(torch.ones(5), 0, group=group)


@pytest.mark.usefixtures("mpi_alone")
def test_what_is_longer_than_mpi_can_count_is_cut(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As from 1 GiB on; tried with 2 GiB and a bit by hand."""
    for module in (over_mpi, points):
        monkeypatch.setattr(module, "MESSAGE_BYTES", 1000)
    group = group_of()
    for size in (1000, 1001, 5000, 12_345):
        after = (world.rank + 1) % world.world_size
        before = (world.rank - 1) % world.world_size
        mine = torch.arange(size, dtype=torch.uint8) + world.rank
        theirs = torch.arange(size, dtype=torch.uint8) + before
        found = torch.zeros(size, dtype=torch.uint8)
        sent = dist.isend(mine, after, group=group)
        dist.recv(found, before, group=group)
        sent.wait()
        assert found.equal(theirs)
        all_of = [torch.zeros_like(mine) for _ in range(world.world_size)]
        dist.all_gather(all_of, mine, group=group)
        assert all_of[before].equal(theirs)
