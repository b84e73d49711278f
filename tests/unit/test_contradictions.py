"""What the launcher says against what MPI says, as tables."""

from __future__ import annotations

import pytest

from mpitrain.errors import TopologyError
from mpitrain.launch.contradictions import check_size, speaks_before_mpi


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
