"""Which GPU is whose: the plan, as tables."""

from __future__ import annotations

import pytest

from mpitrain.errors import TopologyError
from mpitrain.launch import devices
from mpitrain.topology import group_by_node


def nodes_of(*sizes: int) -> tuple:
    names = [f"gpu{i:02}" for i, size in enumerate(sizes) for _ in range(size)]
    return group_by_node(names)


@pytest.mark.parametrize(
    ("visible", "sizes", "expected", "backend"),
    [
        ([()] * 8, (8,), ["cpu"] * 8, "gloo"),
        ([("a",)], (1,), ["cuda:0"], "cpu:gloo,cuda:nccl"),
        ([("a", "b")] * 2, (2,), ["cuda:0", "cuda:1"], "cpu:gloo,cuda:nccl"),
        # Two nodes whose GPUs are others, though each counts from 0.
        ([("a",), ("b",)], (1, 1), ["cuda:0", "cuda:0"], "cpu:gloo,cuda:nccl"),
        # --gpus-per-task=1: every rank sees one GPU, its own.
        ([("a",), ("b",)], (2,), ["cuda:0", "cuda:0"], "cpu:gloo,cuda:nccl"),
        # CUDA_VISIBLE_DEVICES differs between the ranks of a node, and overlaps.
        ([("a", "b"), ("b", "a")], (2,), ["cuda:0", "cuda:1"], "gloo"),
        # More ranks than GPUs share them.
        ([("a",)] * 8, (8,), ["cuda:0"] * 8, "gloo"),
        ([("a", "b")] * 3, (3,), ["cuda:0", "cuda:1", "cuda:0"], "gloo"),
        # Shared on one node only is shared.
        ([("a",), ("b",), ("b",)], (1, 2), ["cuda:0"] * 3, "gloo"),
    ],
)
def test_the_plan_gives_each_rank_a_device(
    visible: list, sizes: tuple, expected: list, backend: str
) -> None:
    plan = devices.plan(visible, nodes_of(*sizes))
    assert list(plan.devices) == expected
    assert plan.backend == backend
    assert plan.shared == (backend == "gloo" and expected[0] != "cpu")


def test_mixed_nodes_are_refused_by_name() -> None:
    with pytest.raises(TopologyError, match="gpu00: ranks") as caught:
        devices.plan([("a",), ()], nodes_of(1, 1))
    assert "gpu01: ranks [1], of which [] see a GPU" in str(caught.value)
    assert caught.value.speaker == 0


def test_cuda_that_is_required_and_missing_is_refused() -> None:
    with pytest.raises(TopologyError, match="torch sees no GPU on gpu00"):
        devices.plan([()], nodes_of(1), required=True)
