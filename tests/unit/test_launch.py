"""The pure parts of the start, as tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpitrain.errors import LaunchError, TopologyError
from mpitrain.launch import devices, threads
from mpitrain.launch.contradictions import check_size, speaks_before_mpi
from mpitrain.launch.guard import exit_status, message
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


@pytest.mark.parametrize(
    ("masks", "quota", "expected"),
    [
        ([range(8)], float("inf"), (8,)),
        ([range(8)] * 2, float("inf"), (4, 4)),
        ([range(2)] * 8, float("inf"), (1,) * 8),
        ([range(4), range(4, 8)], float("inf"), (4, 4)),  # mpirun bound them apart
        ([{0}, {1}], float("inf"), (1, 1)),  # bound to a core each
        ([range(3)] * 3, float("inf"), (1, 1, 1)),  # thirds sum to just below one
        ([range(64)] * 4, 8.0, (2, 2, 2, 2)),  # a container with 8 cores' worth
        ([range(64)], 0.5, (1,)),
    ],
)
def test_threads_share_the_cores(masks: list, quota: float, expected: tuple) -> None:
    assert threads.share(masks, quota) == expected


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("max 100000", float("inf")),
        ("150000 100000", 1.5),
        ("rubbish", float("inf")),
        (None, float("inf")),
    ],
)
def test_the_quota_of_a_container_is_read(
    text: str | None, expected: float, tmp_path: Path
) -> None:
    if text is not None:
        (tmp_path / "cpu.max").write_text(text)
    assert threads.cpu_quota(tmp_path) == expected


@pytest.mark.parametrize(
    "environ",
    [
        {"OMPI_COMM_WORLD_SIZE": "4"},
        {"PMI_SIZE": "2", "PMI_RANK": "1"},
        {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"},
        {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "2", "RANK": "1"},
    ],
)
def test_alone_though_several_were_started_is_refused(environ: dict) -> None:
    with pytest.raises(TopologyError, match=r"started \d processes .* world of 1"):
        check_size(1, environ)
    assert speaks_before_mpi(environ) == (len(environ) == 1)


@pytest.mark.parametrize(
    ("size", "environ"),
    [
        (1, {}),
        (1, {"PMI_SIZE": "1"}),
        (1, {"SLURM_NTASKS": "8", "SLURM_JOB_ID": "1"}),
        (1, {"SLURM_STEP_NUM_TASKS": "2", "OMPI_COMM_WORLD_SIZE": "1"}),
        (1, {"WORLD_SIZE": "8"}),
        (4, {"OMPI_COMM_WORLD_SIZE": "4"}),
        (6, {"OMPI_COMM_WORLD_SIZE": "4"}),
    ],
)
def test_what_is_no_contradiction_passes(size: int, environ: dict) -> None:
    check_size(size, environ)


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (SystemExit(7), 7, "[rank 1/2 h] sys.exit(7)"),
        (SystemExit(256), 1, "sys.exit(256)"),
        (SystemExit(-1), 255, "sys.exit(-1)"),
        (SystemExit("no"), 1, "sys.exit('no')"),
        (KeyboardInterrupt(), 130, "interrupted by Ctrl-C"),
        (ValueError("bad"), 1, "[rank 1/2 h] ValueError: bad"),
        (LaunchError("worse"), 1, "[rank 1/2 h] LaunchError: worse"),
    ],
)
def test_every_way_out_has_a_status_and_words(
    error: BaseException, status: int, words: str
) -> None:
    assert exit_status(error) == status
    assert words in message(error, "rank 1/2 h")


def test_leaving_well_is_no_failure() -> None:
    assert exit_status(SystemExit()) == 0
    assert exit_status(SystemExit(0)) == 0
