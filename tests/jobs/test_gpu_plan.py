"""What the start says of GPUs, where the driver's library is a stand-in.

CUDA itself cannot be had without a GPU; tests/gpu has the rest.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from fake_gpus import build_nvml
from launcher import Done, Mpi, mpirun


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a driver's library that names the GPUs in FAKE_GPUS."""
    return str(build_nvml(tmp_path_factory.mktemp("nvml")).parent)


def init(
    mpi: Mpi, folder: Path, driver: str, *, before: str = "", **variables: str
) -> Done:
    """Start three ranks that ask for their devices."""
    script = folder / "script.py"
    script.write_text(
        f"import os\nlast = os.environ.get('OMPI_COMM_WORLD_RANK') == '2'\n{before}\n"
        "import mpitrain\nwith mpitrain.init() as world: print('trained', world)\n"
    )
    return mpirun(mpi, 3, str(script), cwd=folder, LD_LIBRARY_PATH=driver, **variables)


def test_a_rank_without_gpu_among_others_is_named(
    openmpi: Mpi, driver: str, tmp_path: Path
) -> None:
    before = "if last: os.environ['CUDA_VISIBLE_DEVICES'] = ''"
    done = init(openmpi, tmp_path, driver, before=before, FAKE_GPUS="a,b")
    assert done.status == 1
    assert (
        done.err.count("TopologyError: some ranks see a GPU and others see none") == 1
    )
    assert "only ranks 0-1 of 0-2 see a GPU" in done.err


def test_a_gpu_for_one_process_is_no_gpu_for_three_ranks(
    openmpi: Mpi, driver: str, tmp_path: Path
) -> None:
    done = init(openmpi, tmp_path, driver, FAKE_GPUS="xa")
    assert done.status == 1
    assert done.err.count("TopologyError: GPU xa of ") == 1
    assert "ranks 0-2 share it" in done.err


def test_a_gpu_that_ranks_share_is_said_before_anything_opens_it(
    openmpi: Mpi, driver: str, tmp_path: Path
) -> None:
    done = init(openmpi, tmp_path, driver, FAKE_GPUS="a")
    assert done.err.count("up to 3 ranks share a GPU") == 1
    assert "Duplicate GPU" not in done.err


def test_a_gpu_that_the_driver_names_and_cuda_does_not_open_is_named_once(
    openmpi: Mpi, driver: str, tmp_path: Path
) -> None:
    done = init(openmpi, tmp_path, driver, FAKE_GPUS="a,b,c")
    assert done.status == 1
    assert len(done.ours) == 1
    assert "trained" not in done.out


def test_no_gpu_is_asked_for_where_cpus_are_wanted(
    openmpi: Mpi, driver: str, tmp_path: Path
) -> None:
    done = mpirun(
        openmpi,
        2,
        *("-m", "mpitrain", "--dry-run", "--device", "cpu"),
        cwd=tmp_path,
        LD_LIBRARY_PATH=driver,
        FAKE_GPUS="pa,pb",
    )
    assert done.status == 0, done.err
