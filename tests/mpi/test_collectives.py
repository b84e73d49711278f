"""Every collective of the mpi4py backend x type x operation: right, and as on gloo.

What must come out is worked out from all ranks' inputs, which each rank can make; where
gloo knows the type, its answer is asked for, too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
import transports
from torch.distributed import ReduceOp
from transports import all_gather_single, reduce_scatter_single

from mpitrain.mpi.world import World

pytestmark = pytest.mark.mpi

FLOATS = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
COMPLEX = (torch.complex64, torch.complex128)
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
TYPES = (*FLOATS, *COMPLEX, *INTEGERS, torch.bool)
ODD = (torch.float8_e4m3fn, torch.uint16)

OPS: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "SUM": torch.add,
    "AVG": torch.add,
    "PRODUCT": torch.mul,
    "MIN": torch.minimum,
    "MAX": torch.maximum,
    "BAND": torch.bitwise_and,
    "BOR": torch.bitwise_or,
    "BXOR": torch.bitwise_xor,
}

SIZES = (0, 1, 5, 1000, 100_003)
"""Of one element, of a few, of one meeting, and of several chunks in small rooms."""


ROADS = ("as-it-is", "small-room", "MPI-alone", "two-nodes")


@pytest.fixture(scope="module", params=ROADS)
def ours(world: World, request: pytest.FixtureRequest) -> Iterator[dist.ProcessGroup]:
    """All ranks, by the mpi4py backend, on each of its transports."""
    with pytest.MonkeyPatch.context() as patch:
        if request.param != "as-it-is":
            transports.in_small_pieces(patch)
        if request.param == "MPI-alone":
            transports.without_shared_memory(patch)
        if request.param == "two-nodes":
            transports.on_two_nodes(patch, world.rank)
        group = dist.new_group(backend="mpi4py", timeout=timedelta(seconds=60))
        if request.param == "two-nodes" and world.world_size > 2:
            assert transports.has_shared_memory_of_a_part(group)
        yield group


@pytest.fixture(scope="module")
def gloo(world: World) -> dist.ProcessGroup:
    return dist.new_group(backend="gloo", timeout=timedelta(seconds=60))


def values(rank: int, dtype: torch.dtype, size: int, seed: int = 0) -> torch.Tensor:
    """What a rank has; known to all."""
    random = torch.Generator().manual_seed(1000 * rank + seed)
    if dtype is torch.bool:
        return torch.rand(size, generator=random) > 0.4
    if dtype.is_complex:
        parts = torch.randn(size, 2, generator=random, dtype=torch.float64)
        return torch.view_as_complex(parts).to(dtype)
    if dtype.is_floating_point:
        return torch.randn(size, generator=random, dtype=torch.float64).to(dtype)
    return torch.randint(0, 5, (size,), generator=random).to(dtype)


def combined(parts: list[torch.Tensor], op: str) -> torch.Tensor:
    """The ranks' values as one, in double where they are floating point."""
    exact = {torch.bfloat16: torch.float64, torch.float16: torch.float64}
    wide = [part.to(exact.get(part.dtype, part.dtype)) for part in parts]
    total = functools.reduce(OPS[op], wide)
    if op == "AVG":
        if parts[0].dtype.is_floating_point or parts[0].dtype.is_complex:
            total = total / len(parts)
        else:
            total = torch.div(total, len(parts), rounding_mode="trunc")
    return total.to(parts[0].dtype)


def allowed(op: str, dtype: torch.dtype) -> bool:
    number = dtype.is_floating_point or dtype.is_complex
    if dtype.is_complex:
        return op in ("SUM", "AVG")  # torch itself refuses the others
    if dtype is torch.bool:
        return op != "AVG"
    return not (number and op.startswith("B"))


def like_gloo(
    gloo: dist.ProcessGroup, found: torch.Tensor, call: Callable[[], torch.Tensor]
) -> None:
    """Compare with gloo's answer, where it has one."""
    try:
        answer = call()
    except (RuntimeError, ValueError):
        return  # on all ranks alike: gloo does not know the type
    close(found, answer)


def close(found: torch.Tensor, expected: torch.Tensor) -> None:
    loose = {torch.bfloat16: 2e-2, torch.float16: 2e-3, torch.float32: 1e-5}
    rtol = loose.get(found.dtype, 1e-5 if found.dtype is torch.complex64 else 1e-12)
    torch.testing.assert_close(found, expected, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("op", OPS)
def test_reductions(
    ours: dist.ProcessGroup,
    gloo: dist.ProcessGroup,
    world: World,
    op: str,
    dtype: torch.dtype,
    size: int,
) -> None:
    if not allowed(op, dtype):
        with pytest.raises(ValueError, match=r"mpi4py|does not support"):
            dist.all_reduce(values(0, dtype, 3), getattr(ReduceOp, op), group=ours)
        return
    which = getattr(ReduceOp, op)
    parts = [values(rank, dtype, size) for rank in range(world.world_size)]
    mine, expected = parts[world.rank], combined(parts, op)

    found = mine.clone()
    dist.all_reduce(found, which, group=ours)
    close(found, expected)

    def of_gloo() -> torch.Tensor:
        answer = mine.clone()
        dist.all_reduce(answer, which, group=gloo)
        return answer

    if size == 1000:
        like_gloo(gloo, found, of_gloo)

    root = world.world_size - 1
    at_root = mine.clone()
    dist.reduce(at_root, root, which, group=ours)
    close(at_root, expected if world.rank == root else mine)

    lists = [
        [values(rank, dtype, size, seed=to) for to in range(world.world_size)]
        for rank in range(world.world_size)
    ]
    of_me = combined([row[world.rank] for row in lists], op)
    out = torch.empty_like(mine)
    dist.reduce_scatter(out, lists[world.rank], which, group=ours)
    close(out, of_me)
    out = torch.empty_like(mine)
    flat = torch.cat(lists[world.rank])
    reduce_scatter_single()(out, flat, which, group=ours)
    close(out, of_me)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [*TYPES, *ODD], ids=str)
def test_what_is_carried_as_it_is(
    ours: dist.ProcessGroup, world: World, dtype: torch.dtype, size: int
) -> None:
    ranks = range(world.world_size)
    kind = torch.float32 if dtype in ODD else dtype
    parts = [values(rank, kind, size).to(dtype) for rank in ranks]
    mine, last = parts[world.rank], world.world_size - 1

    def same(found: torch.Tensor, expected: torch.Tensor) -> None:
        assert found.view(torch.uint8).equal(expected.view(torch.uint8))

    found = mine.clone()
    dist.broadcast(found, last, group=ours)
    same(found, parts[last])

    out = [torch.empty_like(mine) for _ in ranks]
    dist.all_gather(out, mine, group=ours)
    for one, expected in zip(out, parts, strict=True):
        same(one, expected)

    single = torch.empty(size * len(parts), dtype=dtype)
    all_gather_single()(single, mine, group=ours)
    same(single, torch.cat(parts))

    out = [torch.empty_like(mine) for _ in ranks]
    dist.gather(mine, out if world.rank == last else None, last, group=ours)
    if world.rank == last:
        for one, expected in zip(out, parts, strict=True):
            same(one, expected)

    found = torch.empty_like(mine)
    dist.scatter(found, parts if world.rank == last else None, last, group=ours)
    same(found, mine)

    table = [[values(r, kind, size, to).to(dtype) for to in ranks] for r in ranks]
    out = [torch.empty_like(mine) for _ in ranks]
    dist.all_to_all(out, table[world.rank], group=ours)
    for rank, one in enumerate(out):
        same(one, table[rank][world.rank])

    found = torch.empty(size * len(parts), dtype=dtype)
    dist.all_to_all_single(found, torch.cat(table[world.rank]), group=ours)
    same(found, torch.cat([row[world.rank] for row in table]))


def test_each_rank_may_have_rows_of_its_own_number(
    ours: dist.ProcessGroup, world: World
) -> None:
    """Rank r sends r + to rows to rank `to`."""
    ranks = range(world.world_size)
    sent = [world.rank + to for to in ranks]
    received = [rank + world.rank for rank in ranks]
    rows = torch.cat(
        [torch.full((n, 3), 100.0 * world.rank + to) for to, n in enumerate(sent)]
    )
    found = torch.empty(sum(received), 3)
    dist.all_to_all_single(found, rows, received, sent, group=ours)
    expected = [
        torch.full((n, 3), 100.0 * r + world.rank) for r, n in enumerate(received)
    ]
    torch.testing.assert_close(found, torch.cat(expected), rtol=0, atol=0)

    out = [torch.empty(rank + 1, dtype=torch.int64) for rank in ranks]
    dist.all_gather(out, torch.full((world.rank + 1,), world.rank), group=ours)
    assert [one.tolist() for one in out] == [[r] * (r + 1) for r in ranks]


def test_one_element_of_a_row_with_gaps(ours: dist.ProcessGroup, world: World) -> None:
    one = torch.arange(8.0)[2::5][:1]
    assert one.is_contiguous()
    assert one.stride() == (5,)
    found = [torch.empty(8)[::5][:1] for _ in range(world.world_size)]
    dist.all_gather(found, one, group=ours)
    assert [part.item() for part in found] == [2.0] * world.world_size
    same = torch.full((8,), float(world.rank))[::5][:1]
    given = torch.sparse_coo_tensor([[3, 3]], [1.0, 1.0], (5,), check_invariants=True)
    dist.all_reduce(same, group=ours)
    dist.all_reduce(given, group=ours)
    assert same.item() == sum(range(world.world_size))
    assert given.to_dense()[3].item() == 2 * world.world_size


def test_reduce_scatter_in_place(ours: dist.ProcessGroup, world: World) -> None:
    """Into a rank's own part, as optimizers that shard their state do."""
    ranks = range(world.world_size)
    whole = torch.arange(10.0 * world.world_size) * (world.rank + 1)
    mine = whole.chunk(world.world_size)[world.rank]
    expected = mine / (world.rank + 1) * sum(rank + 1 for rank in ranks)
    reduce_scatter_single()(mine, whole, group=ours)
    torch.testing.assert_close(mine, expected, rtol=0, atol=0)


def test_gaps_and_shapes(ours: dist.ProcessGroup, world: World) -> None:
    square = torch.arange(12.0).view(3, 4) + world.rank
    found = square.t()
    assert not found.is_contiguous()
    dist.all_reduce(found, group=ours)
    ranks = range(world.world_size)
    expected = sum(torch.arange(12.0).view(3, 4) + rank for rank in ranks)
    torch.testing.assert_close(square, expected)

    whole = torch.zeros(world.world_size, 3, 4)
    all_gather_single()(whole, square, group=ours)
    torch.testing.assert_close(whole, expected.expand_as(whole))

    columns = torch.zeros(4, 6)
    dist.broadcast(columns[:, ::2] if world.rank else columns[:, ::2].add_(1), 0, ours)
    assert columns.sum() == 12

    scalar = torch.tensor(2.0)
    dist.all_reduce(scalar, ReduceOp.PRODUCT, group=ours)
    assert scalar == 2.0**world.world_size


def test_a_factor_before_the_sum(ours: dist.ProcessGroup, world: World) -> None:
    found = torch.full((5,), 2.0)
    dist.all_reduce(found, dist._make_nccl_premul_sum(0.5), group=ours)
    torch.testing.assert_close(found, torch.full((5,), float(world.world_size)))


def test_sums_are_equal_to_the_last_bit_on_all_ranks(
    ours: dist.ProcessGroup, world: World
) -> None:
    for size in SIZES[1:]:
        found = values(world.rank, torch.float32, size)
        dist.all_reduce(found, group=ours)
        everywhere = [torch.empty_like(found) for _ in range(world.world_size)]
        dist.all_gather(everywhere, found, group=ours)
        assert all(other.equal(found) for other in everywhere)


def test_half_floats_are_rounded_once(ours: dist.ProcessGroup, world: World) -> None:
    """In bfloat16 256 + 1 is 256, however often; in between it is not."""
    found = torch.tensor([256.0 if world.rank == 0 else 1.0], dtype=torch.bfloat16)
    dist.all_reduce(found, group=ours)
    exact = torch.tensor([256.0 + world.world_size - 1]).bfloat16()
    assert found.equal(exact)


def test_sparse_tensors_are_added(ours: dist.ProcessGroup, world: World) -> None:
    dense = torch.zeros(20, 3)
    for rank in range(world.world_size):
        for row in (rank, 7):
            dense[row] += rank + 1
    indices = torch.tensor([[world.rank, 7]])
    rows = torch.full((2, 3), world.rank + 1.0)
    found = torch.sparse_coo_tensor(indices, rows, (20, 3), check_invariants=True)
    dist.all_reduce(found, group=ours)
    torch.testing.assert_close(found.to_dense(), dense)


def test_many_tensors_at_once(ours: dist.ProcessGroup, world: World) -> None:
    many = [torch.full((n,), float(world.rank)) for n in (1, 7, 300)]
    with dist._coalescing_manager(group=ours):
        for one in many:
            dist.all_reduce(one, group=ours)
    total = sum(range(world.world_size))
    assert all(one.eq(total).all() for one in many)

    out = [torch.empty(n * world.world_size) for n in (2, 5)]
    with dist._coalescing_manager(group=ours, async_ops=True) as together:
        for one, n in zip(out, (2, 5), strict=True):
            all_gather_single()(one, torch.full((n,), float(world.rank)), group=ours)
    together.wait()
    for one, n in zip(out, (2, 5), strict=True):
        expected = torch.arange(float(world.world_size)).repeat_interleave(n)
        torch.testing.assert_close(one, expected)


def test_objects(ours: dist.ProcessGroup, world: World) -> None:
    mine = {"rank": world.rank, "text": "x" * world.rank}
    found: list = [None] * world.world_size
    dist.all_gather_object(found, mine, group=ours)
    assert found == [{"rank": r, "text": "x" * r} for r in range(world.world_size)]
    box = [mine]
    dist.broadcast_object_list(box, 0, group=ours)
    assert box[0]["rank"] == 0
    given: list = [None]
    everything = [{"for": r} for r in range(world.world_size)]
    dist.scatter_object_list(given, everything if world.rank == 0 else None, 0, ours)
    assert given == [{"for": world.rank}]


def test_messages(ours: dist.ProcessGroup, world: World) -> None:
    """Around the ring, to whoever asks, and many at once."""
    after = (world.rank + 1) % world.world_size
    before = (world.rank - 1) % world.world_size
    if world.world_size > 1:
        for size in (1, 300_000):
            found = torch.empty(size)
            sent = dist.isend(torch.full((size,), float(world.rank)), after, ours, 5)
            come = dist.irecv(found, before, ours, 5)
            sent.wait()
            come.wait()
            assert come.is_completed()
            assert found.eq(before).all()
        strided = torch.zeros(4, 2)
        ops = [
            dist.P2POp(dist.isend, torch.full((4,), 1.0 + world.rank), after, ours),
            dist.P2POp(dist.irecv, strided[:, 1], before, ours),
        ]
        for work in dist.batch_isend_irecv(ops):
            work.wait()
        assert strided.sum().item() == 4.0 * (before + 1)
    if world.rank == 0:
        seen = []
        for _ in range(world.world_size - 1):
            found = torch.empty(2, dtype=torch.int64)
            source = dist.recv(found, group=ours)
            assert found.tolist() == [source, source]
            seen.append(source)
        assert sorted(seen) == list(range(1, world.world_size))
    else:
        dist.send(torch.tensor([world.rank] * 2), 0, group=ours)


def test_barriers(ours: dist.ProcessGroup, world: World) -> None:
    dist.barrier(group=ours)
    dist.barrier(group=ours, async_op=True).wait()
    dist.monitored_barrier(group=ours, timeout=timedelta(seconds=30))
