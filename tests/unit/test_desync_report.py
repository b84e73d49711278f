"""Who waits for whom when a group of the mpi4py backend is made."""

from __future__ import annotations

import threading
import time

import pytest
import torch.distributed as dist

from mpitrain.backend.desync_report import connect
from mpitrain.backend.op_queue import GroupError


def come(store: dist.Store, late: dict[int, float], size: int = 3) -> dict[int, str]:
    """Let ranks come, some late; return what each was told."""
    told = {}

    def one(rank: int) -> None:
        time.sleep(late.get(rank, 0.0))
        try:
            connect(store, rank, range(10, 10 + size), "7", 1.0)
            told[rank] = ""
        except GroupError as error:
            told[rank] = str(error)

    ranks = [rank for rank in range(size) if late.get(rank, 0.0) < 10]
    threads = [threading.Thread(target=one, args=[rank]) for rank in ranks]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return told


def test_who_comes_in_time_finds_all() -> None:
    assert come(dist.HashStore(), {1: 0.3}) == {0: "", 1: "", 2: ""}


@pytest.mark.parametrize("seconds", [1.6, 99.0], ids=["late", "never"])
def test_who_does_not_come_is_named_on_every_rank(seconds: float) -> None:
    """Also on the late one: it must not wait for those who have given up."""
    told = come(dist.HashStore(), {1: seconds})
    assert len(told) == (3 if seconds < 10 else 2)
    for text in told.values():
        assert text.startswith("rank 11 did not arrive within 1 s to create group 7.")
