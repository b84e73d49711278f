"""What must be equal on all ranks, as tables."""

from __future__ import annotations

import pytest

from mpitrain.errors import TopologyError
from mpitrain.launch import consistency
from mpitrain.launch.consistency import Facts
from mpitrain.mpi.topology import group_by_node
from mpitrain.mpi.world import Node


def nodes_of(*sizes: int) -> tuple[Node, ...]:
    return group_by_node(
        [f"gpu{i:02}" for i, size in enumerate(sizes) for _ in range(size)]
    )


def records(num_ranks: int, **changes: dict) -> list[Facts]:
    """Ranks that agree, but for ``field={rank: value}``."""
    alike = {
        "software": {"torch": "2.15.0", "Python": "3.11"},
        "arguments": {"device": "'auto'", "timeout_seconds": "1800.0"},
        "clock_seconds": 1_000_000.0,
    }
    return [
        alike | {f: by[rank] for f, by in changes.items() if rank in by}
        for rank in range(num_ranks)
    ]


def test_ranks_that_agree_pass() -> None:
    four, nodes = records(4), nodes_of(2, 2)
    consistency.check_software(four, nodes)
    consistency.check_arguments(four)
    consistency.check_ranks_per_node(four, nodes)
    assert consistency.check_clocks(four, nodes) == ""


@pytest.mark.parametrize(
    ("sizes", "other", "words"),
    [
        (
            (2, 2),
            [2, 3],
            "torch: 2.15.0 on gpu00 (ranks 0-1); 2.9 on gpu01 (ranks 2-3)",
        ),
        ((2, 1), [1], "2.15.0 on gpu00, gpu01 (ranks 0,2); 2.9 on gpu00 (rank 1)"),
        (
            (1,) * 7,
            [6],
            "2.15.0 on gpu00, gpu01, gpu02, gpu03, gpu04, gpu05 (ranks 0-5)",
        ),
    ],
)
def test_versions_that_differ_are_told_with_their_hosts(
    sizes: tuple, other: list, words: str
) -> None:
    changed = {rank: {"torch": "2.9", "Python": "3.11"} for rank in other}
    with pytest.raises(TopologyError) as caught:
        consistency.check_software(
            records(sum(sizes), software=changed), nodes_of(*sizes)
        )
    assert words in str(caught.value)
    assert "Python" not in str(caught.value)
    assert caught.value.reporting_rank == 0


def test_a_version_that_one_rank_does_not_tell_differs() -> None:
    changed = {1: {"Python": "3.11"}}
    with pytest.raises(TopologyError, match=r"2\.15\.0 on gpu00 .*unknown on gpu01"):
        consistency.check_software(records(2, software=changed), nodes_of(1, 1))


def test_arguments_that_differ_are_told_with_their_ranks() -> None:
    changed = {
        rank: {"device": "'cpu'", "timeout_seconds": "1800.0"} for rank in (1, 3)
    }
    with pytest.raises(TopologyError) as caught:
        consistency.check_arguments(records(4, arguments=changed))
    assert "device: 'auto' on ranks 0,2; 'cpu' on ranks 1,3" in str(caught.value)
    assert "timeout" not in str(caught.value)


@pytest.mark.parametrize(
    ("sizes", "warning"),
    [
        ((4, 4, 4, 3), "4 on gpu00, gpu01, gpu02; 3 on gpu03"),
        ((2, 1), "2 on gpu00; 1 on gpu01"),
        ((4, 4), ""),
        ((1,), ""),
    ],
)
def test_nodes_with_other_numbers_of_ranks_are_named(
    sizes: tuple, warning: str
) -> None:
    said = consistency.check_ranks_per_node(records(sum(sizes)), nodes_of(*sizes))
    assert warning in said
    assert bool(said) == bool(warning)


def test_a_node_that_the_launcher_counts_otherwise_is_refused() -> None:
    said = dict.fromkeys(range(4), ("OMPI_COMM_WORLD_LOCAL_SIZE", 2))
    with pytest.raises(TopologyError) as caught:
        consistency.check_ranks_per_node(records(4, local_size=said), nodes_of(4))
    assert "started 2 processes on gpu00 (OMPI_COMM_WORLD_LOCAL_SIZE=2)" in str(
        caught.value
    )
    assert "4 say that they run there (ranks 0-3)" in str(caught.value)
    consistency.check_ranks_per_node(records(4, local_size=said), nodes_of(2, 2))


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.0, ""), (59.0, ""), (-120.0, "120 s apart"), (120.0, "120 s apart")],
)
def test_clocks_a_minute_apart_are_said(seconds: float, words: str) -> None:
    changed = {2: 1_000_000.0 + seconds, 3: 1_000_000.0 + seconds}
    said = consistency.check_clocks(records(4, clock_seconds=changed), nodes_of(2, 2))
    assert words in said
    assert bool(said) == bool(words)


def test_clocks_five_minutes_apart_are_refused_by_host() -> None:
    changed = {1: 1_000_000.0 - 400}
    with pytest.raises(TopologyError) as caught:
        consistency.check_clocks(records(3, clock_seconds=changed), nodes_of(1, 1, 1))
    assert "400 s apart: 1970-01-12 13:40:00 on gpu01 and" in str(caught.value)


def test_one_rank_that_is_late_is_no_wrong_clock() -> None:
    changed = {1: 1_000_900.0}
    assert (
        consistency.check_clocks(records(2, clock_seconds=changed), nodes_of(2)) == ""
    )
