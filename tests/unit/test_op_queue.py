"""The asynchronous works of the mpi4py backend."""

from __future__ import annotations

import threading
import time

import pytest
import torch

from mpitrain.backend.op_queue import PendingWork


def work() -> PendingWork:
    return PendingWork([torch.ones(1)], lambda _: None)


def test_who_waited_finds_its_future_done(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch asks the future whether the work is completed."""
    one = work()
    future, tell = one.get_future(), one._complete

    def tell_late(told: torch.futures.Future) -> None:
        time.sleep(0.2)
        tell(told)

    monkeypatch.setattr(one, "_complete", tell_late)
    thread = threading.Thread(target=one.finish)
    thread.start()
    one.wait()
    assert future.done()
    thread.join()


def test_what_follows_may_wait_for_it() -> None:
    one = work()
    then = one.get_future().then(lambda _: one.wait())
    one.finish()
    assert then.wait()


def test_an_error_reaches_all_who_ask() -> None:
    one = work()
    before = one.get_future()
    one.finish(ValueError("that went wrong"))
    for ask in (one.wait, before.wait, one.get_future().wait):
        with pytest.raises(Exception, match="that went wrong"):
            ask()
