"""Which GPU is whose: the plan, and what it is made from, as tables."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest

from mpitrain.errors import TopologyError
from mpitrain.launch import gpu
from mpitrain.launch.gpu import VisibleGpus
from mpitrain.mpi.topology import group_by_node
from mpitrain.mpi.world import Node

OURS, NCCL = "mpi4py", "cpu:mpi4py,cuda:nccl"

OLD = gpu.sharing_error((2, 28, 9), {})
NEW = gpu.sharing_error((2, 30, 7), {})


def nodes_of(*sizes: int) -> tuple[Node, ...]:
    names = [f"gpu{i:02}" for i, size in enumerate(sizes) for _ in range(size)]
    return group_by_node(names)


def sees(*uuids: str, reason: str = OLD) -> VisibleGpus:
    return VisibleGpus(gpus=uuids, has_nccl=True, sharing_error=reason)


@pytest.mark.parametrize(
    ("visible", "sizes", "expected", "backend"),
    [
        ([()] * 8, (8,), ["cpu"] * 8, OURS),
        ([("a",)], (1,), ["cuda:0"], NCCL),
        ([("a", "b")] * 2, (2,), ["cuda:0", "cuda:1"], NCCL),
        # Fewer ranks than GPUs.
        ([("a", "b", "c")], (1,), ["cuda:0"], NCCL),
        # Two nodes whose GPUs are others, though each counts from 0.
        ([("a",), ("b",)], (1, 1), ["cuda:0", "cuda:0"], NCCL),
        # --gpus-per-task=1: every rank sees one GPU, its own.
        ([("a",), ("b",)], (2,), ["cuda:0", "cuda:0"], NCCL),
        # A wrapper that gives the ranks of a socket the GPUs of that socket.
        (
            [("a", "b"), ("c", "d")] * 2,
            (4,),
            ["cuda:0", "cuda:0", "cuda:1", "cuda:1"],
            NCCL,
        ),
        # CUDA_VISIBLE_DEVICES differs between the ranks of a node, and overlaps.
        ([("a", "b"), ("b", "a")], (2,), ["cuda:0", "cuda:0"], NCCL),
        ([("a", "b"), ("a",)], (2,), ["cuda:1", "cuda:0"], NCCL),
        # More ranks than GPUs share them.
        ([("a",)] * 8, (8,), ["cuda:0"] * 8, OURS),
        ([("a", "b")] * 3, (3,), ["cuda:0", "cuda:1", "cuda:0"], OURS),
        # Shared on one node only is shared.
        ([("a",), ("b",), ("b",)], (1, 2), ["cuda:0"] * 3, OURS),
    ],
)
def test_the_plan_gives_each_rank_a_device(
    visible: list, sizes: tuple, expected: list, backend: str
) -> None:
    plan = gpu.plan_devices([sees(*uuids) for uuids in visible], nodes_of(*sizes))
    assert list(plan.devices) == expected
    assert plan.backend == backend
    assert plan.shared == (backend == OURS and expected[0] != "cpu")


@pytest.mark.parametrize("reason", [OLD, NEW], ids=["nccl-2.28", "nccl-2.30"])
@pytest.mark.parametrize("num_nodes", [1, 2])
@pytest.mark.parametrize("num_gpus", [0, 1, 2, 4, 8])
@pytest.mark.parametrize("num_ranks", range(1, 9))
def test_any_number_of_ranks_trains_on_any_number_of_gpus(
    num_ranks: int, num_gpus: int, num_nodes: int, reason: str
) -> None:
    seen = [
        sees(*(f"{node}-{i}" for i in range(num_gpus)), reason=reason)
        for node in range(num_nodes)
        for _ in range(num_ranks)
    ]
    nodes = nodes_of(*[num_ranks] * num_nodes)
    plan = gpu.plan_devices(seen, nodes)
    if num_gpus == 0:
        assert (set(plan.devices), plan.backend) == ({"cpu"}, OURS)
        assert plan.warning == ""
        return
    for node in nodes:
        # Local rank i takes device i; then it goes round.
        assert [plan.devices[rank] for rank in node.ranks] == [
            f"cuda:{i % num_gpus}" for i in range(num_ranks)
        ]
    load = Counter(plan.gpus)
    assert max(load.values()) == plan.ranks_per_gpu == -(-num_ranks // num_gpus)
    assert max(load.values()) - min(load.values()) <= 1
    assert plan.shared == (num_ranks > num_gpus)
    assert plan.backend == (OURS if plan.shared and reason else NCCL)
    assert bool(plan.warning) == plan.shared


def test_sharing_by_gloo_says_why_and_what_it_costs() -> None:
    said = gpu.plan_devices([sees("a")] * 8, nodes_of(8)).warning
    assert "up to 8 ranks share a GPU and NCCL 2.28.9 refuses it" in said
    assert "through host memory" in said


def test_sharing_by_nccl_says_how_to_start_mps() -> None:
    said = gpu.plan_devices([sees("a", reason=NEW)] * 2, nodes_of(2)).warning
    assert "up to 2 ranks share a GPU by NCCL: without CUDA MPS" in said
    assert "nvidia-cuda-mps-control -d" in said


def test_one_rank_that_cannot_share_decides_for_all() -> None:
    seen = [sees("a", reason=NEW), sees("a", reason=OLD)]
    assert gpu.plan_devices(seen, nodes_of(2)).backend == OURS


def test_without_nccl_it_is_gloo_even_for_a_gpu_each() -> None:
    seen = [VisibleGpus(gpus=(x,), has_nccl=False) for x in "ab"]
    plan = gpu.plan_devices(seen, nodes_of(2))
    assert plan.backend == OURS
    assert "torch has no NCCL here" in plan.warning


def test_mixed_nodes_are_refused_by_name() -> None:
    with pytest.raises(TopologyError, match="some ranks see a GPU") as caught:
        gpu.plan_devices([sees("a"), sees("a"), sees(), sees()], nodes_of(2, 2))
    assert "gpu01: ranks 2-3 of 2-3 see none" in str(caught.value)
    assert "gpu00" not in str(caught.value)
    assert caught.value.reporting_rank == 0
    with pytest.raises(TopologyError, match="gpu00: ranks 0 of 0-1 see none"):
        gpu.plan_devices([sees(), sees("a")], nodes_of(2))


def test_cuda_that_is_required_and_missing_is_refused() -> None:
    with pytest.raises(TopologyError, match="torch sees no GPU on gpu00"):
        gpu.plan_devices([VisibleGpus()], nodes_of(1), required=True)


@pytest.mark.parametrize(
    ("version", "environ", "words"),
    [
        ((), {}, "no NCCL"),
        ((2, 28, 9), {}, "2.28.9"),
        ((2, 30, 2), {}, "2.30.2"),
        ((2, 30, 3), {}, ""),
        ((3, 0, 0), {}, ""),
        ((2, 30, 7), {"NCCL_MULTI_RANK_GPU_ENABLE": "1"}, ""),
        ((2, 30, 7), {"NCCL_MULTI_RANK_GPU_ENABLE": "0"}, "NCCL_MULTI_RANK"),
        ((2, 30, 7), {"NCCL_NVLS_ENABLE": "1"}, "NCCL_NVLS_ENABLE=1"),
        ((2, 30, 7), {"NCCL_NVLS_ENABLE": "2"}, ""),
    ],
)
def test_why_nccl_cannot_share_is_known_before_it_starts(
    version: tuple, environ: dict, words: str
) -> None:
    said = gpu.sharing_error(version, environ)
    assert words in said
    assert bool(said) == bool(words)


def test_amds_nccl_is_not_asked_to_share() -> None:
    assert gpu.sharing_error((2, 31, 0), {}, is_rocm=True)


def test_what_nccl_needs_to_share_shrinks_with_the_ranks() -> None:
    ctas = [int(gpu.shared_nccl_variables(n)["NCCL_MAX_CTAS"]) for n in (2, 4, 8, 99)]
    assert ctas == [16, 8, 4, 1]


def test_the_order_of_ranks_does_not_change_who_shares() -> None:
    """Whatever each rank sees, nobody shares while a GPU that it sees is free."""
    for seen in itertools.permutations([("a",), ("b", "a"), ("c", "a", "b")]):
        plan = gpu.plan_devices([sees(*uuids) for uuids in seen], nodes_of(3))
        assert not plan.shared, seen


@pytest.mark.parametrize(
    ("asked", "host", "visible", "reason", "backend"),
    [
        ("auto", "gloo", ("a", "b"), NEW, "cpu:gloo,cuda:nccl"),
        ("nccl", OURS, ("a", "b"), OLD, NCCL),
        ("mpi4py", OURS, ("a", "b"), OLD, OURS),
        ("gloo", "gloo", ("a", "b"), OLD, "gloo"),
        ("gloo", "gloo", ("a",), OLD, "gloo"),
        ("auto", OURS, ("a",), OLD, OURS),
        ("nccl", OURS, ("a",), NEW, NCCL),
    ],
)
def test_the_backend_that_was_asked_for(
    asked: str, host: str, visible: tuple[str, ...], reason: str, backend: str
) -> None:
    seen = [sees(*visible, reason=reason)] * 2
    plan = gpu.plan_devices(seen, nodes_of(2), asked=asked, host_backend=host)
    assert plan.backend == backend
    assert bool(plan.warning) == (len(visible) == 1 and asked in ("auto", "nccl"))


def test_nccl_is_refused_where_it_cannot() -> None:
    with pytest.raises(TopologyError, match="2 ranks share a GPU and NCCL"):
        gpu.plan_devices([sees("a")] * 2, nodes_of(2), asked="nccl")
    with pytest.raises(TopologyError, match="--backend nccl asks for one per rank"):
        gpu.plan_devices([VisibleGpus()] * 2, nodes_of(2), asked="nccl")


def test_ours_is_refused_where_torch_is_too_old() -> None:
    with pytest.raises(TopologyError, match="--backend mpi4py: torch"):
        gpu.choose_host_backend("mpi4py", "torch 2.11 takes no backend")
    assert gpu.choose_host_backend("auto", "torch is old")[0] == "gloo"
    assert gpu.choose_host_backend("mpi4py", "")[0] == "mpi4py"
    assert gpu.choose_host_backend("nccl", "torch is old")[0] == "gloo"
