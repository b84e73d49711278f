"""What the start says of GPUs, where torch is made to see some.

CUDA itself cannot be had without a GPU; tests/gpu has the rest.
"""

from __future__ import annotations

from pathlib import Path

from launcher import Mpi, mpirun

SCRIPT = """
import types
import torch
torch.cuda.device_count = lambda: 1
torch.cuda.get_device_properties = lambda i: types.SimpleNamespace(uuid="a")
import mpitrain
with mpitrain.init() as world: print("trained", world)
"""


def test_a_gpu_that_ranks_share_and_cuda_does_not_open_is_said_once(
    openmpi: Mpi, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = mpirun(openmpi, 2, "script.py", cwd=tmp_path)
    assert done.err.count("up to 2 ranks share a GPU") == 1
    assert "Duplicate GPU" not in done.err
    assert done.status == 1
    assert len(done.ours) == 1
    assert "trained" not in done.out


HIDDEN = """
import os, sys
from pathlib import Path
from mpitrain.launch import pci
pci.hidden_gpus.__defaults__ = (Path("machine"),)
import mpitrain
if "cpu" in sys.argv:
    with mpitrain.init(device="cpu") as world: print("trained on", world.device)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
with mpitrain.init() as world: print("trained on", world.device)
"""


def test_gpus_that_torch_does_not_see_end_the_start_once(
    openmpi: Mpi, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(HIDDEN)
    (tmp_path / "machine/dev").mkdir(parents=True)
    (tmp_path / "machine/dev/nvidia0").touch()
    done = mpirun(openmpi, 2, "script.py", cwd=tmp_path)
    assert done.status == 1
    assert done.err.count("sees no GPU, but there are some") == 1
    assert "1 of NVIDIA" in done.err
    assert "--device cpu" in done.err
    assert "trained" not in done.out
    # Unless they are not asked for, or hidden on purpose.
    done = mpirun(openmpi, 1, "script.py", "cpu", cwd=tmp_path)
    assert done.status == 0, done.err
    assert done.out.count("trained on cpu") == 2
