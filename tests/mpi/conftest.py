"""Tests that hold at any number of ranks: ``make test-1``, ``make test-4``."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import transports
from sub_worlds import in_node_order, numbers

import mpitrain
from mpitrain.errors import UsageError
from mpitrain.launch.subworld import sub_world
from mpitrain.mpi.collectives import barrier
from mpitrain.mpi.shared_arrays import Communicator, communicator
from mpitrain.mpi.world import World

if TYPE_CHECKING:
    from mpi4py import MPI


DEVICE: Any = os.environ.get("MPITRAIN_TEST_DEVICE", "cpu")
"""`tests/gpu` runs some of these files on a GPU."""


@pytest.hookimpl(tryfirst=True)
def pytest_configure(config: pytest.Config) -> None:
    """Give each rank a folder of its own; of a common one all would remove the old."""
    config.option.basetemp = tempfile.mkdtemp()


def pytest_unconfigure(config: pytest.Config) -> None:
    """Remove it."""
    shutil.rmtree(config.option.basetemp, ignore_errors=True)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call() -> Generator[None, Any, Any]:
    """Skip what a shared GPU cannot do; `tests/gpu` holds that it is refused."""
    try:
        return (yield)
    except UsageError as error:
        if DEVICE == "cpu" or "gloo has no collectives of FSDP" not in str(error):
            raise
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def job() -> Iterator[mpitrain.Job]:
    """One start for the whole session: a process group starts but once."""
    started = mpitrain.init(device=DEVICE, timeout_seconds=60)
    yield started
    started.close()


@pytest.fixture(scope="session")
def comm(job: mpitrain.Job) -> MPI.Intracomm:
    """All ranks."""
    return job.comm


@pytest.fixture(scope="session")
def world(job: mpitrain.Job) -> World:
    """Where this rank stands."""
    return job.world


@pytest.fixture(scope="module", autouse=True)
def num_threads(world: World) -> Iterator[None]:
    """The threads of a rank after each file: a training with --bitwise leaves one."""
    import torch

    yield
    torch.set_num_threads(world.num_threads)


@pytest.fixture
def ranks(world: World) -> Communicator:
    """All of them, for objects of Python."""
    return communicator(world)


@pytest.fixture
def run_dir(ranks: Communicator) -> Iterator[Path]:
    """A folder that all ranks see, once it is made."""
    with tempfile.TemporaryDirectory() as made:
        yield Path(ranks.on_rank_zero(lambda: made, "make a folder")) / "run"
        ranks.allgather(None)


@pytest.fixture
def parts(job: mpitrain.Job) -> Iterator[Callable[[int, Callable[[World], Any]], Any]]:
    """Runs something on the first ranks alone; the others wait."""
    from mpitrain.launch.init import init_process_group
    from mpitrain.torch_compat import destroy_process_group

    destroy_process_group()

    def run(num_ranks: int, action: Callable[[World], Any]) -> Any:
        ranks, number = in_node_order(job.world)[:num_ranks], next(numbers)
        found = None
        if job.world.rank in ranks:
            with sub_world(job, job.world, ranks, number, 60.0) as part:
                found = action(part)
        barrier(job.comm)
        return found

    yield run
    import torch.distributed as dist

    store = dist.PrefixStore(f"after/{next(numbers)}", job.store)
    init_process_group(job, job.world, 60.0, store)


@pytest.fixture
def comm_self() -> MPI.Intracomm:
    """This rank alone: the ranks of its node in the world `apart`."""
    from mpi4py import MPI

    return MPI.COMM_SELF


@pytest.fixture
def apart(world: World) -> World:
    """The same ranks, as if each were on a node of its own."""
    return replace(
        world,
        nodes=tuple(
            replace(world.nodes[0], hostname=f"h{rank}", ranks=(rank,))
            for rank in range(world.world_size)
        ),
        node_rank=world.rank,
        local_rank=0,
        local_world_size=1,
    )


@pytest.fixture
def mpi_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Groups of the mpi4py backend are made as where there is no memory to share."""
    transports.without_shared_memory(monkeypatch)


@pytest.fixture
def summing(monkeypatch: pytest.MonkeyPatch) -> None:
    """FSDP gets the sum where it asks for the average, as from gloo of torch 2.8."""
    import torch.distributed as dist

    names = ("reduce_scatter_single", "reduce_scatter_tensor")
    name = next(name for name in names if hasattr(dist, name))
    right = getattr(dist, name)

    def sum_for_average(value: Any) -> Any:
        is_average = isinstance(value, type(dist.ReduceOp.AVG)) and (
            value == dist.ReduceOp.AVG
        )
        return dist.ReduceOp.SUM if is_average else value

    def falsified(*args: Any, **options: Any) -> Any:
        options = {name: sum_for_average(value) for name, value in options.items()}
        return right(*map(sum_for_average, args), **options)

    monkeypatch.setattr(dist, name, falsified)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> None:
    """Show a failure at once: pytest's words may come after the abort of all ranks."""
    if call.excinfo is None or call.excinfo.errisinstance(pytest.skip.Exception):
        return
    reporter: Any = item.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is not None:
        reporter.write_line(f"\n{item.nodeid}\n{call.excinfo.getrepr(style='short')}")
        sys.stdout.flush()
        time.sleep(0.5)  # for mpirun to forward it
