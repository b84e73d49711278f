"""What the launcher says against what MPI says, as tables."""

from __future__ import annotations

from pathlib import Path

import pytest

from mpitrain.errors import TopologyError
from mpitrain.launch.env_checks import (
    check_size,
    foreign_library,
    forget_parent,
    hide_from_children,
    is_on_one_node,
    launched_rank,
    lone_in_allocation,
    was_launched,
)


@pytest.mark.parametrize(
    "environ",
    [
        {"OMPI_COMM_WORLD_SIZE": "4"},
        {"PMI_SIZE": "2", "PMI_RANK": "1"},
        {"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "1"},
        {"TORCHELASTIC_RUN_ID": "x", "WORLD_SIZE": "2", "RANK": "1"},
        {"WORLD_SIZE": "2", "RANK": "1", "LOCAL_RANK": "1"},  # Kubeflow, DeepSpeed, Ray
    ],
)
def test_alone_though_several_were_started_is_refused(environ: dict) -> None:
    with pytest.raises(TopologyError, match=r"started \d processes .* world of 1"):
        check_size(1, environ)
    assert (launched_rank(environ) == 0) == (len(environ) == 1)


@pytest.mark.parametrize(
    ("size", "environ"),
    [
        (1, {}),
        (1, {"PMI_SIZE": "1"}),
        (1, {"SLURM_NTASKS": "8", "SLURM_JOB_ID": "1"}),
        (1, {"SLURM_STEP_NUM_TASKS": "2", "OMPI_COMM_WORLD_SIZE": "1"}),
        (1, {"WORLD_SIZE": "8"}),
        (1, {"WORLD_SIZE": "8", "RANK": ""}),
        (1, {"WORLD_SIZE": "1", "RANK": "0"}),
        (1, {"WORLD_SIZE": "8", "RANK": "3", "OMPI_COMM_WORLD_SIZE": "1"}),
        (2, {"WORLD_SIZE": "8", "RANK": "3", "OMPI_COMM_WORLD_SIZE": "2"}),
        (1, {"PMIX_RANK": "0"}),
        (4, {"PMIX_RANK": "3"}),
        (1, {"PMIX_RANK": "3", "OMPI_COMM_WORLD_SIZE": "1"}),
        (4, {"OMPI_COMM_WORLD_SIZE": "4"}),
        (6, {"OMPI_COMM_WORLD_SIZE": "4"}),
    ],
)
def test_what_is_no_contradiction_passes(size: int, environ: dict) -> None:
    check_size(size, environ)


@pytest.mark.parametrize("rank", [0, 1])
def test_each_process_of_another_launcher_says_that_it_is_alone(rank: int) -> None:
    """Each may have a log of its own."""
    with pytest.raises(TopologyError, match="unset RANK WORLD_SIZE") as caught:
        check_size(1, {"WORLD_SIZE": "2", "RANK": str(rank)})
    assert caught.value.reporting_rank == rank


@pytest.mark.parametrize("rank", [1, 2])
def test_a_rank_above_zero_that_is_alone_is_refused(rank: int) -> None:
    environ = {"PMIX_RANK": str(rank)}
    with pytest.raises(TopologyError, match=f"started {rank + 1} processes") as e:
        check_size(1, environ)
    # Rank 0 cannot know, so rank 1 says it for all.
    assert (e.value.reporting_rank == launched_rank(environ)) == (rank == 1)


def test_a_rank_of_prterun_was_launched_though_nothing_tells_the_size() -> None:
    environ = {"PMIX_RANK": "0", "PMIX_NAMESPACE": "prterun-node-7@1"}
    assert was_launched(environ)
    assert not is_on_one_node(environ)
    check_size(1, environ)
    assert not was_launched({"PMIX_RANK": "0"}), "a shell that srun opened"
    of_srun = {"PMIX_RANK": "0", "PMIX_NAMESPACE": "slurm.pmix.123.0"}
    assert not was_launched(of_srun), "such a shell, by SLURM's plugin pmix"
    assert was_launched(of_srun | {"SLURM_STEP_NUM_TASKS": "2"})


def test_a_program_that_a_rank_starts_knows_that_it_is_none() -> None:
    size = {"OMPI_COMM_WORLD_SIZE": "2", "PMI_SIZE": "2", "PMIX_RANK": "1"}
    connection = {"PMIX_NAMESPACE": "x", "PMI_FD": "9", "OMPI_MCA_ess": "^singleton"}
    user = {"OMPI_MCA_btl": "^ofi", "LOCAL_RANK": "1"}
    environ = {**size, **connection, **user, "WORLD_SIZE": "2", "RANK": "1"}
    hide_from_children(environ)
    assert not connection.keys() & environ.keys()
    assert {**size, **user}.items() <= environ.items(), "scripts read ranks and sizes"
    assert not forget_parent(environ), "this process is the rank itself"
    assert launched_rank(environ) == 1
    environ["MPITRAIN_RANK_PID"] = "1"  # of another process
    assert not forget_parent({**environ, **connection}), "an mpirun that it started"
    assert forget_parent(environ)
    assert not was_launched(environ)
    check_size(1, environ)
    assert user.items() <= environ.items()


@pytest.mark.parametrize(
    ("library", "environ", "odd"),
    [
        (
            "MPICH Version:      5.0.2\nMPICH Release",
            {"OMPI_COMM_WORLD_SIZE": "2"},
            True,
        ),
        ("Intel(R) MPI Library 2021.11", {"OMPI_COMM_WORLD_SIZE": "2"}, True),
        ("Open MPI v4.1.8, package: x", {"OMPI_COMM_WORLD_SIZE": "2"}, False),
        ("IBM Spectrum MPI v10.4", {"OMPI_COMM_WORLD_SIZE": "2"}, False),
        ("MPICH Version: 5.0.2", {"PMI_SIZE": "2"}, False),
        ("MPICH Version: 5.0.2", {}, False),
    ],
)
def test_a_library_of_another_family_is_said_before_it_fails(
    library: str, environ: dict, odd: bool
) -> None:
    said = foreign_library(library, environ)
    assert (said is not None) == odd
    if said:
        assert "started 2 processes" in said
        assert "MPI4PY_LIBMPI" in said
        assert "Release" not in said


@pytest.mark.parametrize(
    ("environ", "num_lines", "words"),
    [
        ({}, 8, None),
        ({"SLURM_NTASKS": "8"}, 0, "1 process in an allocation of 8 (SLURM_NTASKS)"),
        ({"SLURM_NTASKS": "1"}, 0, None),
        ({"PBS_JOBID": "1"}, 8, "allocation of 8 (PBS_NODEFILE)"),
        # A job script leaves out nodes that are lost.
        ({"PBS_JOBID": "1", "MPITRAIN_STATUS_FILE": "x"}, 8, None),
        ({"PBS_JOBID": "1"}, 1, None),
        ({"PBS_JOBID": "1"}, 0, None),
        ({"WORLD_SIZE": "4"}, 0, "WORLD_SIZE=4 is set, but"),
        ({"WORLD_SIZE": "1"}, 0, None),
    ],
)
def test_one_process_in_a_larger_allocation_gets_one_line(
    environ: dict, num_lines: int, words: str | None, tmp_path: Path
) -> None:
    file = tmp_path / "nodefile"
    if num_lines:
        file.write_text("host\n" * num_lines)
    said = lone_in_allocation({**environ, "PBS_NODEFILE": str(file)})
    assert (said is None) == (words is None)
    if words and said:
        assert words in said
        assert "\n" not in said
