"""The checks of `check` pass at any number of ranks, and faults are found."""

from __future__ import annotations

import json
import math

import pytest
import torch
import torch.distributed as dist

import mpitrain
from mpitrain.mpi.world import World
from mpitrain.tools.check import communication

pytestmark = pytest.mark.mpi


def test_all_reduce_and_gradients_are_right(job: mpitrain.Job, world: World) -> None:
    parts, findings = communication.check_all_reduce(job, world)
    assert parts == [{"device": "cpu", "backend": "mpi4py", "is_right": True}]
    assert findings == []
    gradients, findings = communication.check_gradients(job, world)
    assert findings == []
    for found in gradients.values():
        assert found["largest_difference"] <= found["tolerance"]


@pytest.mark.parametrize(
    ("raises", "words"), [(True, ": out of luck"), (False, ": element 3 is")]
)
def test_an_all_reduce_that_is_wrong_on_one_rank_is_named_there(
    raises: bool,
    words: str,
    job: mpitrain.Job,
    world: World,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    culprit = world.world_size - 1
    right = dist.all_reduce

    def all_reduce(tensor: torch.Tensor) -> None:
        right(tensor)
        if world.rank == culprit and raises:
            raise RuntimeError("out of luck")
        tensor[3] += world.rank == culprit

    monkeypatch.setattr(dist, "all_reduce", all_reduce)
    (part,), (finding,) = communication.check_all_reduce(job, world)
    assert not part["is_right"]
    assert finding.name == "wrong-all-reduce"
    assert finding.found.startswith(f"all_reduce on cpu, rank {culprit} ")
    assert words in finding.found
    assert not raises or finding.found.endswith(words)
    assert finding.remedy


def test_a_sum_in_the_place_of_an_average_is_found(
    job: mpitrain.Job, world: World, summing: None
) -> None:
    """As gloo of torch 2.8 has it, in reduce-scatter: FSDP averages gradients by it."""
    if world.world_size > 1:
        _, (finding,) = communication.check_gradients(job, world)
        assert finding.found.startswith("FSDP's gradients differ")


def test_gradients_that_are_infinite_are_told_as_json(
    job: mpitrain.Job, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(communication, "gradient_difference", lambda *_: math.inf)
    part, findings = communication.check_gradients(job, world)
    assert findings[0].name == "wrong-gradients"
    json.dumps(part, allow_nan=False)


def test_all_nodes_reach_each_other(job: mpitrain.Job, apart: World) -> None:
    """Each rank plays a node of its own."""
    assert communication.find_broken_links(job, apart, "127.0.0.1") == []


def test_a_node_that_nobody_reaches_is_named_by_all(
    job: mpitrain.Job, world: World, apart: World
) -> None:
    last = world.world_size - 1
    # An address that no host has (RFC 5737), so that it cannot listen there.
    address = "192.0.2.1" if world.rank == last else "127.0.0.1"
    found = communication.find_broken_links(job, apart, address)
    assert found == [
        (node, last, "it cannot listen on its address") for node in range(last)
    ]


def test_bandwidth_is_measured_until_the_time_is_up(
    job: mpitrain.Job, world: World
) -> None:
    rows, left_out = communication.measure_bandwidth(job, world, 1.0, 2**40)
    assert job.comm.allgather(rows) == [rows] * world.world_size
    sizes = communication.SIZES
    assert [row["num_bytes"] for row in rows] == list(sizes[: len(rows)])
    assert bool(left_out) == (len(rows) < len(sizes))
    for row in rows:
        assert set(row["ms"]) == {"mpi4py", "gloo", "MPI"}
        assert all(ms > 0 for ms in row["ms"].values())


def test_messages_that_do_not_fit_are_left_out(job: mpitrain.Job, world: World) -> None:
    memory = 5 * 2048 * world.world_size
    rows, left_out = communication.measure_bandwidth(job, world, 30.0, memory)
    assert [row["num_bytes"] for row in rows] == [1024]
    assert left_out == "not enough memory"
