"""The private APIs of torch that mpitrain relies on are still as they were."""

from __future__ import annotations

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from mpitrain import torch_compat
from mpitrain.backend.op_queue import PendingWork


def test_torch_takes_a_backend_written_in_python() -> None:
    assert torch_compat.python_backend_error() == ""


def test_the_backend_is_registered_by_its_name() -> None:
    assert torch_compat.is_backend_registered("mpi4py")
    assert not torch_compat.is_backend_registered("nothing")


def test_the_timeout_of_options_is_read_and_set() -> None:
    options = torch_compat.Backend.Options("mpi4py", timeout=timedelta(seconds=3))
    torch_compat.set_options_timeout(options, timedelta(seconds=7))
    assert torch_compat.options_timeout(options) == timedelta(seconds=7)


def test_a_store_appends() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    for text in ("a", "b"):
        torch_compat.append_to_store(store, "key", text)
    assert store.get("key") == b"ab"


def test_a_work_written_in_python_answers_what_torch_does_not_forward() -> None:
    torch_compat.patch_work()
    received = torch.ones(1)
    torch_compat.set_source_rank(received, 3)
    work = PendingWork([received], lambda _: None)
    assert not work.is_completed()
    work.finish()
    assert work.is_completed()
    assert work.is_success()
    assert work.source_rank() == 3


@pytest.mark.parametrize("name", ["is_completed", "is_success", "source_rank"])
def test_the_patched_methods_exist(name: str) -> None:
    assert callable(getattr(dist.Work, name))
