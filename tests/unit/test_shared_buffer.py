"""The barrier of ranks on one node, with real processes and shared memory."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable

import pytest
import torch

from mpitrain.backend.op_queue import GroupError
from mpitrain.backend.shared_buffer import (
    MAX_SLOT_BYTES,
    MIN_SLOT_BYTES,
    PeerGone,
    SharedBuffer,
    buffer_bytes,
    choose_slot_bytes,
    op_signature,
)
from mpitrain.watchdog.process import is_gone

NAMES = ["rank 0", "rank 1"]


def shared() -> mmap.mmap:
    return mmap.mmap(-1, buffer_bytes(2, MIN_SLOT_BYTES))


def buffer(memory: mmap.mmap, rank: int, pids: list[int]) -> SharedBuffer:
    return SharedBuffer(memory, rank, NAMES, pids, MIN_SLOT_BYTES)


def soon(seconds: float = 20.0) -> float:
    return time.monotonic() + seconds


def fork(action: Callable[[], object]) -> int:
    pid = os.fork()
    if pid == 0:
        try:
            action()
        finally:
            os._exit(0)
    return pid


def test_what_was_written_before_a_barrier_is_read_after_it() -> None:
    memory = shared()

    def write_often(rank: int) -> list[float]:
        mine, found = buffer(memory, rank, []), []
        for turn in range(300):
            slots = mine.next_typed_slots(torch.float32, 4)
            slots[rank].fill_(100.0 * rank + turn)
            if turn % 50 == 10 + rank:
                time.sleep(0.01)
            mine.barrier(op_signature("turn", turn), soon())
            found.append(slots[1 - rank].sum().item() / 4)
        return found

    child = fork(lambda: write_often(1))
    assert write_often(0) == [100.0 + turn for turn in range(300)]
    os.waitpid(child, 0)


def test_the_count_of_barriers_may_overflow() -> None:
    memory = shared()
    both = [buffer(memory, rank, []) for rank in range(2)]
    late = 2**32 - 3
    for mine in both:  # before there are two who meet
        mine._count = late
        mine._words[mine._own_header] = late
        mine._released.word.value = late

    def meet(rank: int) -> None:
        if rank == 1:
            time.sleep(0.2)
        for _ in range(8):
            both[rank].barrier(op_signature("turn"), soon())

    child = fork(lambda: meet(1))
    meet(0)
    os.waitpid(child, 0)
    assert both[0]._count == 5


def test_one_that_has_ended_is_named_at_once() -> None:
    memory = shared()
    child = fork(lambda: None)
    mine = buffer(memory, 0, [os.getpid(), child])
    started = time.monotonic()
    with pytest.raises(PeerGone, match=f"rank 1 is gone: its process {child}"):
        mine.barrier(op_signature("all_reduce"), soon(60))
    assert time.monotonic() - started < 10
    assert is_gone(child)
    os.waitpid(child, 0)
    assert is_gone(child)
    assert not is_gone(os.getpid())


def test_one_that_does_not_come_is_named_with_where_it_was_last() -> None:
    memory = shared()
    other = buffer(memory, 1, [])
    mine = buffer(memory, 0, [])
    child = fork(lambda: other.barrier(op_signature("broadcast", 8), soon()))
    mine.barrier(op_signature("broadcast", 8), soon())
    os.waitpid(child, 0)
    with pytest.raises(GroupError) as error:
        mine.barrier(op_signature("barrier"), soon(0.2))
    assert str(error.value) == (
        "rank 1 did not arrive at barrier before its timeout ended. "
        "Last operation: rank 1: broadcast 8"
    )


@pytest.mark.parametrize("size", [2, 8, 64, 256, 600])
def test_a_buffer_has_at_most_80_mib_however_many_ranks_there_are(size: int) -> None:
    slot_bytes = choose_slot_bytes(size)
    assert buffer_bytes(size, slot_bytes) <= 80 << 20
    assert slot_bytes == MAX_SLOT_BYTES or buffer_bytes(size, 2 * slot_bytes) > 80 << 20
    assert choose_slot_bytes(2000) == MIN_SLOT_BYTES
