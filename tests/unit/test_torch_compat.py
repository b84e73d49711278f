"""The private APIs of torch that mpitrain relies on are still as they were."""

from __future__ import annotations

import _ctypes
import ctypes.util
import importlib.util
import os
import subprocess
import sys
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from mpitrain import torch_compat
from mpitrain.backend.op_queue import PendingWork


def test_torch_takes_a_backend_written_in_python() -> None:
    assert torch_compat.python_backend_error() == ""


def test_the_backend_is_registered_by_its_name() -> None:
    assert "mpi4py" in dist.Backend.backend_list


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


DEFER = """
import sys, torch, torch.distributed as dist
from mpitrain.torch_compat import defer_dynamo
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
defer_dynamo()
model = torch.nn.Linear(3, 2)
ddp = torch.nn.parallel.DistributedDataParallel(model)
for kind in (torch.optim.SGD, torch.optim.AdamW):
    optimizer = kind(model.parameters(), lr=0.1)
    ddp(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
print("torch._dynamo.eval_frame" in sys.modules)
{use}
print("torch._dynamo.eval_frame" in sys.modules, sys.modules["torch._dynamo"].__file__)
"""
COMPILE = "assert torch.compile(model, backend='eager')(torch.ones(2, 3)).sum() != 0"
SHARD = (
    "from torch.distributed.fsdp import fully_shard; "
    "fully_shard(model)(torch.ones(2, 3)).sum().backward()"
)
DECORATED = (
    "off = torch.compiler.disable(recursive=False)(lambda x: x + 1); graphs = []; "
    "note = lambda graph, _: graphs.append(graph) or graph.forward; "
    "torch.compile(lambda x: off(x * 2) * 3, backend=note)(torch.ones(2)); "
    "assert len(graphs) == 2, graphs"
)
FROM_THREADS = (
    "from concurrent.futures import ThreadPoolExecutor as Pool; "
    "read = lambda _: torch._dynamo.config.optimize_ddp; "
    "assert all(Pool(6).map(read, range(6)))"
)
SUBMODULE = "import torch._dynamo.config; assert torch._dynamo.config.optimize_ddp"


@pytest.mark.parametrize(
    "use",
    [
        *(COMPILE, SUBMODULE),
        *(
            pytest.param(it, marks=pytest.mark.slow)
            for it in (SHARD, DECORATED, FROM_THREADS)
        ),
    ],
)
def test_dynamo_is_imported_by_its_first_use_alone(use: str) -> None:
    script = [sys.executable, "-c", DEFER.replace("{use}", use)]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    before, after = done.stdout.splitlines()
    assert before == "False"
    assert after.startswith("True /")


IMPORT = """
import importlib.util, sys
from mpitrain.launch.import_torch import import_torch
import_torch()
import torch
print(torch.cuda._utils._HAS_CUDA_BINDINGS)
if importlib.util.find_spec("cuda"):
    import cuda.bindings.driver
"""


@pytest.mark.parametrize("has_driver", [False, True])
def test_cuda_bindings_are_imported_if_there_is_a_driver(
    tmp_path: Path, has_driver: bool
) -> None:
    if ctypes.util.find_library("cuda") and not has_driver:
        pytest.skip("this machine has a GPU's driver")
    if has_driver:
        (tmp_path / "libcuda.so.1").symlink_to(_ctypes.__file__)  # any library
    is_installed = has_driver and importlib.util.find_spec("cuda") is not None
    done = subprocess.run(
        [sys.executable, "-c", IMPORT],
        env={**os.environ, "LD_LIBRARY_PATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout == f"{is_installed}\n", done.stderr
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_many_tensors_are_multiplied_as_each_would_be(dtype: torch.dtype) -> None:
    tensors = [torch.randn(37, dtype=dtype) for _ in range(5)]
    factor = 0.1234567890123
    expected = [tensor * factor for tensor in tensors]
    torch_compat.multiply_all(tensors, factor)
    assert all(map(torch.equal, tensors, expected))


MANY_JOBS = """
import torch, torch.distributed as dist
from mpitrain import torch_compat
called = []
for number in range(2000):
    torch_compat.call_before_destroy(lambda n=number: called.append(n))
    torch_compat.call_at_messages(lambda group, n=number: called.append(n))
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
dist.monitored_barrier()
dist.destroy_process_group()
print(called)
"""


def test_many_jobs_of_one_process_wrap_the_functions_of_torch_once() -> None:
    command = [sys.executable, "-c", MANY_JOBS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.stdout == "[1999, 1999]\n", done.stderr
