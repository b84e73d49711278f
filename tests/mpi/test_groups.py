"""Groups of ranks and asynchronous operations of the mpi4py backend."""

from __future__ import annotations

import itertools
import time
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.torch_version import TorchVersion
from transports import group_of

from mpitrain.backend import inter_node, p2p
from mpitrain.mpi.world import World

pytestmark = pytest.mark.mpi


@pytest.mark.parametrize("has_threads", [True, False])
def test_a_message_arrives_for_who_asks_or_waits_with_a_limit(
    world: World, monkeypatch: pytest.MonkeyPatch, has_threads: bool
) -> None:
    from mpitrain.backend import group as made

    if not has_threads:
        monkeypatch.setattr(made, "has_thread_multiple", lambda: False)
    group = group_of()
    if world.rank > 1 or world.world_size == 1:
        return
    other = 1 - world.rank
    for is_asked in (True, False):
        come = torch.zeros(3)
        works = [
            dist.irecv(come, other, group=group),
            dist.isend(torch.full((3,), float(world.rank)), other, group=group),
        ]
        for work in works:
            assert work is not None
            if is_asked:
                end = time.monotonic() + 20
                while not work.is_completed():
                    assert time.monotonic() < end
                    time.sleep(0.001)
            else:
                work.wait(timedelta(seconds=20))
        assert come.tolist() == [other] * 3


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
    if TorchVersion(torch.__version__) < (2, 15):
        with pytest.raises(RuntimeError, match="No device associated"):  # torch's own
            dist.split_group(parent, parts)
        return
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

    def files() -> set[Path]:
        return set(Path("/dev/shm").glob("mpitrain-*"))

    before, files_before = shared(), files()
    group = group_of()
    dist.all_reduce(torch.ones(10), group=group, async_op=True).wait()
    if max(len(node.ranks) for node in world.nodes) > 1:
        assert shared() > before
        assert files() <= files_before  # it has no name
    dist.destroy_process_group(group)
    del group
    assert shared() == before


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


@pytest.mark.usefixtures("mpi_alone")
def test_what_is_longer_than_mpi_can_count_is_cut(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As from 1 GiB on; tried with 2 GiB and a bit by hand."""
    for module in (inter_node, p2p):
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
