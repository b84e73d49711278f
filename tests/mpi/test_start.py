"""The start: every rank knows who it is, and all ranks agree."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING

import pytest

from mpitrain.config import LaunchConfig
from mpitrain.errors import MpitrainError, RemoteError, UsageError
from mpitrain.launch import consistency, cpu, gpu
from mpitrain.mpi import topology
from mpitrain.mpi.collectives import all_or_none, barrier, on_rank_zero
from mpitrain.mpi.topology import discover_world, node_comm
from mpitrain.mpi.world import World

if TYPE_CHECKING:
    from mpi4py import MPI

pytestmark = pytest.mark.mpi


def test_the_world_is_what_mpi_says(comm: MPI.Intracomm, world: World) -> None:
    assert (world.rank, world.world_size) == (comm.rank, comm.size)
    assert world.hostname == socket.gethostname()
    assert world.nodes[world.node_rank].ranks[world.local_rank] == world.rank
    assert world.local_world_size == len(world.nodes[world.node_rank].ranks)
    assert sum(len(node.ranks) for node in world.nodes) == world.world_size
    assert 0 in world.nodes[0].ranks


def test_what_is_equal_on_all_ranks_is(comm: MPI.Intracomm, world: World) -> None:
    shared = (world.nodes, world.backend, world.master_addr, world.master_port)
    assert len(set(comm.allgather(shared))) == 1


@pytest.mark.parametrize("has_threads", [True, False])
def test_nodes_talk_by_gloo_where_mpi_has_no_threads(
    comm: MPI.Intracomm,
    apart: World,
    comm_self: MPI.Intracomm,
    has_threads: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(gpu, "has_thread_multiple", lambda: has_threads)
    found = gpu.assign_devices(comm, comm_self, apart, LaunchConfig(device="cpu"), {})
    rather = apart.world_size > 1 and not has_threads
    assert found.backend == ("gloo" if rather else "mpi4py")
    said = "MPI_THREAD_MULTIPLE: gloo instead" in caplog.text
    assert said == (rather and apart.is_rank_zero)
    asked = LaunchConfig(device="cpu", backend="mpi4py")
    assert gpu.assign_devices(comm, comm_self, apart, asked, {}).backend == "mpi4py"


def test_local_ranks_ascend_with_the_rank(comm: MPI.Intracomm) -> None:
    places = comm.allgather(
        (
            discover_world(comm, node_comm(comm)).node_rank,
            discover_world(comm, node_comm(comm)).local_rank,
        )
    )
    for node in {node for node, _ in places}:
        found = [local_rank for on_node, local_rank in places if on_node == node]
        assert found == list(range(len(found)))


def test_host_names_that_contradict_shared_memory_are_refused(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topology.socket, "gethostname", lambda: f"host{comm.rank % 2}")
    monkeypatch.setattr(topology, "boot_id", lambda: f"boot{comm.rank % 2}")
    if comm.size == 1:
        assert discover_world(comm, node_comm(comm)).num_nodes == 1
        return
    with pytest.raises(MpitrainError, match="say they run on host 'host0'") as caught:
        discover_world(comm, node_comm(comm))
    assert caught.value.reporting_rank == 0


def test_containers_with_a_name_each_are_one_node_of_their_machine(
    comm: MPI.Intracomm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(topology.socket, "gethostname", lambda: f"box{comm.rank}")
    found = discover_world(comm, node_comm(comm))
    assert [node.hostname for node in found.nodes] == ["box0"]
    assert found.local_rank == comm.rank


def test_ranks_that_ask_for_different_things_are_refused(
    comm: MPI.Intracomm, world: World
) -> None:
    last = comm.size - 1
    config = LaunchConfig(device="cuda" if comm.rank == last else "cpu")

    def compare() -> None:
        consistency.check_consistency(comm, world, config, 60.0)

    if comm.size == 1:
        compare()
        return
    with pytest.raises(MpitrainError, match=f"'cuda' on rank {last}") as caught:
        compare()
    assert caught.value.reporting_rank == 0


def test_clocks_are_read_at_one_moment(
    comm: MPI.Intracomm, apart: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ranks that come late have no wrong clock."""
    monkeypatch.setattr(consistency, "CLOCK_LIMIT_SECONDS", 0.5)
    time.sleep(1.0 if comm.rank == comm.size - 1 else 0.0)
    consistency.check_consistency(comm, apart, LaunchConfig(), 60.0)


def test_the_variables_of_torchrun_are_set(world: World) -> None:
    assert os.environ["RANK"] == str(world.rank)
    assert os.environ["WORLD_SIZE"] == str(world.world_size)
    assert os.environ["LOCAL_RANK"] == str(world.local_rank)
    assert os.environ["LOCAL_WORLD_SIZE"] == str(world.local_world_size)
    assert os.environ["MASTER_ADDR"] == world.master_addr
    assert os.environ["MASTER_PORT"] == str(world.master_port)


def test_a_program_that_a_rank_starts_is_alone(comm: MPI.Intracomm) -> None:
    code = "from mpi4py import MPI; print(MPI.COMM_WORLD.size)"
    for words, said in ((["-c", code], "1"), (["-m", "mpitrain", "--version"], "mpi")):
        done = subprocess.run(
            [sys.executable, *words], capture_output=True, text=True, timeout=50
        )
        assert done.stdout.startswith(said), done.stderr
    barrier(comm)


def test_the_process_group_is_the_world(world: World) -> None:
    import torch
    import torch.distributed as dist

    assert (dist.get_rank(), dist.get_world_size()) == (world.rank, world.world_size)
    total = torch.tensor([float(world.rank)])
    dist.all_reduce(total)
    assert total.item() == sum(range(world.world_size))


def test_threads_do_not_outnumber_cores(world: World) -> None:
    import torch

    assert torch.get_num_threads() == world.num_threads
    cores = world.nodes[world.node_rank].num_cores
    assert world.num_threads == 1 or world.num_threads * world.local_world_size <= cores


@pytest.mark.parametrize("asks", [True, False, None])
def test_threads_of_pbs_are_kept_or_shared_on_nodes_with_more_ranks_than_the_first(
    comm: MPI.Intracomm,
    asks: bool | None,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Rank zero has its node's 8 cores for itself; the others share those of another.

    ``None``: `qstat` does not answer.
    """
    node = min(comm.rank, 1)
    monkeypatch.setattr(topology.socket, "gethostname", lambda: f"host{node}")
    monkeypatch.setattr(topology, "boot_id", lambda: f"boot{node}")
    monkeypatch.setattr(cpu.os, "sched_getaffinity", lambda pid: set(range(8)))
    monkeypatch.setattr(cpu.os, "cpu_count", lambda: 8)
    monkeypatch.setattr(cpu, "cpu_quota", lambda: float("inf"))
    monkeypatch.setattr(cpu, "asks_for_ompthreads", lambda job_id: asks)
    variables = {"PBS_JOBID": "7.head", "PBS_NODEFILE": "nodes"}
    variables |= {"NCPUS": "8", "OMP_NUM_THREADS": "8"}
    on_node = comm.Split(node)
    world = discover_world(comm, on_node)
    found = cpu.configure_threads(comm, on_node, world, variables)
    on_node.Free()
    share = 8 // world.local_world_size
    assert found.num_cores == share
    assert found.num_threads == (8 if asks else share)
    assert variables["OMP_NUM_THREADS"] == str(found.num_threads)
    is_warned = comm.rank == 0 and comm.size > 2 and not asks
    assert caplog.text.count("OMP_NUM_THREADS=8, set by PBS") == is_warned
    if is_warned:
        assert f"{8 // (comm.size - 1)} threads on host1" in caplog.text
        assert "host0" not in caplog.text
        assert ("qstat" in caplog.text) == (asks is None)


def test_an_error_on_one_rank_is_raised_on_all(comm: MPI.Intracomm) -> None:
    culprit = comm.size - 1

    def act() -> str:
        if comm.rank == culprit:
            raise OSError("this rank alone")
        return "fine"

    kind, words = RemoteError, r"could not try it on rank .*this rank alone"
    if comm.rank == culprit:
        kind, words = OSError, "this rank alone"  # with its own traceback
    with pytest.raises(kind, match=words) as caught:
        all_or_none(comm, act, "try it")
    assert caught.value.reporting_rank == culprit
    assert caught.value.is_collective == (comm.size == 1)


def test_the_lowest_rank_speaks_when_several_fail(comm: MPI.Intracomm) -> None:
    def act() -> None:
        raise UsageError(f"rank {comm.rank}")

    with pytest.raises(UsageError, match=f"rank {comm.rank}") as caught:
        all_or_none(comm, act, "fail")
    assert caught.value.reporting_rank == 0
    assert caught.value.is_collective == (comm.size == 1)


def test_an_error_that_all_ranks_share_is_nobodys_own(comm: MPI.Intracomm) -> None:
    def act() -> None:
        raise UsageError("the same")

    with pytest.raises(UsageError, match="the same") as caught:
        all_or_none(comm, act, "fail")
    assert caught.value.is_collective


def test_rank_zero_decides_for_all(comm: MPI.Intracomm) -> None:
    found = on_rank_zero(comm, lambda: ("from", comm.rank), "decide")
    assert found == ("from", 0)


def test_waiting_gives_up_in_time_and_does_not_spin(comm: MPI.Intracomm) -> None:
    own = comm.Dup()
    if comm.rank > 0:
        time.sleep(0.8)
        assert barrier(own, timeout_seconds=10)
    else:
        cpu_seconds = time.process_time()
        came = barrier(own, timeout_seconds=0.4)
        assert came == (comm.size == 1)
        assert time.process_time() - cpu_seconds < 0.2
    # The barrier that was given up is still open on rank zero: nobody frees `own`.
    barrier(comm)
