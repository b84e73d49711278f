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


HIDDEN = """
import sys
from pathlib import Path
from mpitrain.launch import pci
pci.hidden_gpus.__defaults__ = (Path("machine"),)
import mpitrain
device = sys.argv[1] if sys.argv[1:] else "auto"
with mpitrain.init(device=device) as world: print("trained on", world.device)
"""


def test_gpus_that_torch_does_not_see_end_the_start_once(
    openmpi: Mpi, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(HIDDEN)
    (tmp_path / "machine/dev").mkdir(parents=True)
    (tmp_path / "machine/dev/nvidia0").touch()
    done = mpirun(openmpi, 3, "script.py", cwd=tmp_path)
    assert done.status == 1
    assert done.err.count("sees no GPU, but there are some") == 1
    assert "1 of NVIDIA" in done.err
    assert "--device cpu" in done.err
    assert "trained" not in done.out
    done = mpirun(openmpi, 2, "script.py", "cpu", cwd=tmp_path)
    assert done.status == 0
    assert done.out.count("trained on cpu") == 2
    done = mpirun(openmpi, 2, "script.py", cwd=tmp_path, CUDA_VISIBLE_DEVICES="")
    assert done.status == 0
    assert done.out.count("trained on cpu") == 2
