"""What `check` tries is true at any number of ranks, and what is broken is seen."""

from __future__ import annotations

from dataclasses import replace

import pytest

import mpitrain
from mpitrain.mpi.world import World
from mpitrain.tools.check import bandwidth, collectives, gradients, pairs, truths

pytestmark = pytest.mark.mpi

TRUTHS = {truth.kind: truth for truth in truths.TRUTHS + truths.OBJECT_TRUTHS}


@pytest.mark.parametrize("kind", TRUTHS)
def test_each_kind_gives_what_the_table_says(
    job: mpitrain.Job, world: World, kind: str
) -> None:
    store = job._guard.store
    truth = TRUTHS[kind]
    results = collectives.try_all(job, world, "cpu", store, [truth])
    if world.world_size >= truth.least_ranks:
        (found,) = results
        assert (found.outcome, found.detail) == ("right", "")


@pytest.mark.parametrize("kind", TRUTHS)
def test_a_wrong_value_on_one_rank_is_seen_there(
    job: mpitrain.Job, world: World, kind: str
) -> None:
    truth = TRUTHS[kind]
    culprit = world.world_size - 1  # where all kinds that have a root end

    def falsified(setting: truths.Setting) -> object:
        found = truth.call(setting)
        if setting.rank != culprit:
            return found
        return found + 1 if not isinstance(found, list) else [*found, None]

    broken = replace(truth, call=falsified)
    results = collectives.try_all(job, world, "cpu", job._guard.store, [broken])
    outcomes = [result.outcome for result in results]
    if world.world_size >= truth.least_ranks:
        expected = "wrong" if world.rank == culprit else "right"
        assert outcomes == [expected]
        assert all(bool(r.detail) == (expected == "wrong") for r in results)


def test_a_kind_that_the_backend_lacks_is_no_error(
    job: mpitrain.Job, world: World
) -> None:
    import torch
    import torch.distributed as dist

    gloo = dist.new_group(backend="gloo")

    def call(setting: truths.Setting) -> object:
        premultiplied = dist._make_nccl_premul_sum(2.0)
        return dist.all_reduce(torch.ones(3), op=premultiplied, group=gloo)

    truth = truths.Truth(kind="all_reduce (premul)", call=call, must=lambda s: None)
    (found,) = collectives.try_all(job, world, "cpu", None, [truth])
    assert found.outcome == "lacking"
    assert "Gloo" in found.detail


def test_gradients_of_all_ranks_are_those_of_one_process(
    job: mpitrain.Job, world: World
) -> None:
    for strategy, tolerance in gradients.TOLERANCES.items():
        assert gradients.largest_difference(job, world, strategy) <= tolerance


def test_a_sum_in_the_place_of_an_average_is_seen(
    job: mpitrain.Job, world: World, summing: None
) -> None:
    """As gloo of torch 2.8 has it."""
    if world.world_size > 1:
        truth = TRUTHS["reduce_scatter_tensor (avg)"]
        (found,) = collectives.try_all(job, world, "cpu", None, [truth])
        assert found.outcome == "wrong"
        assert gradients.largest_difference(job, world, "ddp") <= 1e-12
        assert gradients.largest_difference(job, world, "fsdp") > 0.1


def test_a_rank_that_has_other_samples_is_seen(
    job: mpitrain.Job, world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shares(rank: int) -> int:
        return 2 if world.rank == 0 and rank == 0 else 3

    if world.world_size > 1:
        monkeypatch.setattr(gradients, "share_of", shares)
        for strategy in gradients.TOLERANCES:
            assert gradients.largest_difference(job, world, strategy) > 1e-3


def test_all_pairs_of_nodes_reach_each_other(
    job: mpitrain.Job, world: World, apart: World
) -> None:
    """Each rank plays a node of its own."""
    assert pairs.find_failures(job._guard, apart, "127.0.0.1") == []
    assert pairs.exchange(job, apart, 30) == (
        world.world_size * (world.world_size - 1) // 2,
        0,
    )


def test_a_node_that_nobody_reaches_is_named_by_all(
    job: mpitrain.Job, world: World, apart: World
) -> None:
    last = world.world_size - 1
    # An address that no host has (RFC 5737), so that it cannot listen there.
    address = "192.0.2.1" if world.rank == last else "127.0.0.1"
    found = pairs.find_failures(job._guard, apart, address)
    assert [(failure.source, failure.target) for failure in found] == [
        (node, last) for node in range(last)
    ]
    assert {failure.why for failure in found} <= {"it could not listen"}


def test_who_does_not_know_the_job_is_somebody_else(
    job: mpitrain.Job, world: World, apart: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    if world.rank == 0:
        monkeypatch.setattr(
            pairs, "_answer", lambda connection, token: connection.close()
        )
    found = pairs.find_failures(job._guard, apart, "127.0.0.1")
    assert [(failure.source, failure.target) for failure in found] == [
        (node, 0) for node in range(1, world.world_size)
    ]


def test_bandwidth_is_measured_until_the_time_is_up(
    job: mpitrain.Job, world: World
) -> None:
    found = bandwidth.measure(job, world, 1.0, 2**40)
    everybodys = job.comm.allgather(found)
    assert everybodys == [found] * world.world_size
    assert [row.num_bytes for row in found.rows] == list(
        bandwidth.SIZES[: len(found.rows)]
    )
    assert bool(found.left_out) == (len(found.rows) < len(bandwidth.SIZES))
    for row in found.rows:
        assert set(row.seconds) == {"mpi4py", "gloo", "MPI"}
        assert all(seconds > 0 for seconds in row.seconds.values())


def test_messages_that_do_not_fit_are_left_out(job: mpitrain.Job, world: World) -> None:
    found = bandwidth.measure(job, world, 30.0, 5 * 2048 * world.world_size)
    assert [row.num_bytes for row in found.rows] == [1024]
    assert found.left_out == "not enough memory"
