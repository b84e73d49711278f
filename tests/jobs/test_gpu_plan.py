"""What the start says of GPUs, where torch is made to see some.

CUDA itself cannot be had without a GPU; tests/gpu has the rest.
"""

from __future__ import annotations

from pathlib import Path

from launcher import Done, Mpi, mpirun

SCRIPT = """
import os, types
import torch
gpus = os.environ["FAKE_GPUS"].split()
if os.environ["OMPI_COMM_WORLD_RANK"] == "2":
    gpus = gpus[: int(os.environ["OF_THE_LAST"])]
torch.cuda.device_count = lambda: len(gpus)
torch.cuda.get_device_properties = lambda i: types.SimpleNamespace(uuid=gpus[i])
import mpitrain
with mpitrain.init() as world: print("trained", world)
"""


def init(mpi: Mpi, folder: Path, gpus: str, of_the_last: str) -> Done:
    """Start three ranks that ask for their devices."""
    (folder / "script.py").write_text(SCRIPT)
    variables = {"FAKE_GPUS": gpus, "OF_THE_LAST": of_the_last}
    return mpirun(mpi, 3, "script.py", cwd=folder, **variables)


def test_a_rank_without_gpu_among_others_is_named(openmpi: Mpi, tmp_path: Path) -> None:
    done = init(openmpi, tmp_path, "a b", "0")
    assert done.status == 1
    assert (
        done.err.count("TopologyError: some ranks see a GPU and others see none") == 1
    )
    assert "ranks 2 of 0-2 see none" in done.err


def test_a_gpu_that_ranks_share_and_cuda_does_not_open_is_said_once(
    openmpi: Mpi, tmp_path: Path
) -> None:
    done = init(openmpi, tmp_path, "a", "1")
    assert done.err.count("up to 3 ranks share a GPU") == 1
    assert "Duplicate GPU" not in done.err
    assert done.status == 1
    assert len(done.ours) == 1
    assert "trained" not in done.out
