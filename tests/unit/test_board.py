"""The meetings of ranks on one node, with real processes and shared memory."""

from __future__ import annotations

import mmap
import os
import time
from collections.abc import Callable

import pytest
import torch

from mpitrain.mpi_backend.board import (
    Board,
    board_bytes,
    doing,
    is_gone,
)
from mpitrain.mpi_backend.failures import GroupError, PeerGone
from mpitrain.mpi_backend.sharing import LEAST_PER_RANK, room_per_rank

NAMES = ["rank 0", "rank 1"]


def shared() -> mmap.mmap:
    return mmap.mmap(-1, board_bytes(2, LEAST_PER_RANK))


def board(memory: mmap.mmap, rank: int, pids: list[int]) -> Board:
    return Board(memory, rank, NAMES, pids, LEAST_PER_RANK)


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


def test_what_was_written_before_a_meeting_is_read_after_it() -> None:
    memory = shared()

    def meet_often(rank: int) -> list[float]:
        mine, found = board(memory, rank, []), []
        for turn in range(300):
            rows = mine.next_typed(torch.float32, 4)
            rows[rank].fill_(100.0 * rank + turn)
            if turn % 50 == 10 + rank:
                time.sleep(0.01)
            mine.meet(doing("turn", turn), soon())
            found.append(rows[1 - rank].sum().item() / 4)
        return found

    child = fork(lambda: meet_often(1))
    assert meet_often(0) == [100.0 + turn for turn in range(300)]
    os.waitpid(child, 0)


def test_numbers_of_meetings_may_run_over() -> None:
    memory = shared()
    both = [board(memory, rank, []) for rank in range(2)]
    late = 2**32 - 3
    for mine in both:  # before there are two who meet
        mine._turn = late
        mine._words[mine._mine] = late
        mine._open.value = late

    def meet(rank: int) -> None:
        if rank == 1:
            time.sleep(0.2)
        for _ in range(8):
            both[rank].meet(doing("turn"), soon())

    child = fork(lambda: meet(1))
    meet(0)
    os.waitpid(child, 0)
    assert both[0]._turn == 5


def test_one_that_has_ended_is_named_at_once() -> None:
    memory = shared()
    child = fork(lambda: None)
    mine = board(memory, 0, [os.getpid(), child])
    started = time.monotonic()
    with pytest.raises(PeerGone, match=f"rank 1 is gone: its process {child}"):
        mine.meet(doing("all_reduce"), soon(60))
    assert time.monotonic() - started < 10
    assert is_gone(child)
    os.waitpid(child, 0)
    assert is_gone(child)
    assert not is_gone(os.getpid())


def test_one_that_does_not_come_is_named_with_where_it_was_last() -> None:
    memory = shared()
    other = board(memory, 1, [])
    mine = board(memory, 0, [])
    child = fork(lambda: other.meet(doing("broadcast", 8), soon()))
    mine.meet(doing("broadcast", 8), soon())
    os.waitpid(child, 0)
    with pytest.raises(GroupError) as error:
        mine.meet(doing("barrier"), soon(0.2))
    assert str(error.value) == (
        "rank 1 did not come to barrier before its timeout ended. "
        "Last seen at: rank 1: broadcast 8"
    )


@pytest.mark.parametrize("free_mib", [0, 1])
def test_too_little_memory_is_said_in_numbers(free_mib: int) -> None:
    with pytest.raises(OSError, match=f"{free_mib} MiB are free, expected 2 MiB"):
        room_per_rank(8, free_mib << 20)
