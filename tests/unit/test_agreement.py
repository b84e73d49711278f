"""What must be equal on all ranks, as tables."""

from __future__ import annotations

import itertools

import pytest

from mpitrain.errors import TopologyError
from mpitrain.launch import consistency
from mpitrain.mpi.world import Node


def nodes_of(*sizes: int) -> tuple[Node, ...]:
    ends = itertools.accumulate(sizes)
    return tuple(
        Node(hostname=f"gpu{i:02}", ranks=tuple(range(end - size, end)))
        for i, (size, end) in enumerate(zip(sizes, ends, strict=True))
    )


SOFTWARE = {"torch": "2.15.0", "Python": "3.11"}
ARGUMENTS = {"device": "'auto'", "timeout_seconds": "1800.0"}
NOW = 1_000_000.0


def test_ranks_that_agree_pass() -> None:
    nodes = nodes_of(2, 2)
    consistency.check_software([SOFTWARE] * 4, nodes)
    consistency.check_arguments([ARGUMENTS] * 4)
    assert consistency.uneven_nodes(nodes) == ""
    assert consistency.check_clocks({0: NOW, 1: NOW}, nodes) == ""


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
    by_rank = [
        SOFTWARE | {"torch": "2.9"} if rank in other else SOFTWARE
        for rank in range(sum(sizes))
    ]
    with pytest.raises(TopologyError) as caught:
        consistency.check_software(by_rank, nodes_of(*sizes))
    assert words in str(caught.value)
    assert "Python" not in str(caught.value)
    assert caught.value.reporting_rank == 0


def test_a_version_that_one_rank_does_not_tell_differs() -> None:
    with pytest.raises(TopologyError, match=r"2\.15\.0 on gpu00 .*unknown on gpu01"):
        consistency.check_software([SOFTWARE, {"Python": "3.11"}], nodes_of(1, 1))


def test_arguments_that_differ_are_told_with_their_ranks() -> None:
    other = ARGUMENTS | {"device": "'cpu'"}
    with pytest.raises(TopologyError) as caught:
        consistency.check_arguments([ARGUMENTS, other] * 2)
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
    said = consistency.uneven_nodes(nodes_of(*sizes))
    assert warning in said
    assert bool(said) == bool(warning)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(0.0, ""), (59.0, ""), (-120.0, "120 s apart"), (120.0, "120 s apart")],
)
def test_clocks_a_minute_apart_are_said(seconds: float, words: str) -> None:
    said = consistency.check_clocks({0: NOW, 1: NOW + seconds}, nodes_of(2, 2))
    assert words in said
    assert bool(said) == bool(words)


def test_clocks_five_minutes_apart_are_refused_by_host() -> None:
    with pytest.raises(TopologyError) as caught:
        consistency.check_clocks({0: NOW, 1: NOW - 400, 2: NOW}, nodes_of(1, 1, 1))
    assert "400 s apart: 1970-01-12 13:40:00 on gpu01 and" in str(caught.value)


def test_one_rank_that_is_late_is_no_wrong_clock() -> None:
    clocks = consistency.merge_earliest({0: NOW + 900}, {0: NOW})
    assert consistency.check_clocks(clocks, nodes_of(2)) == ""
