"""`sbatch slurm/demo.sh`, the script as it is, with fewer ranks."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from .runs import assert_finished
from .slurm import Slurm

TIMEOUT_SECONDS = 240


def test_sbatch_of_the_demo_script_trains_on_two_nodes(
    slurm: Slurm, folder: Path
) -> None:
    """Words after the script go to mpitrain."""
    words = ["--ntasks-per-node=1", "slurm/demo.sh", "--epochs", "1", "--name", "demo"]
    job = slurm.sbatch(*words, cwd=folder, timeout_seconds=TIMEOUT_SECONDS)
    assert job.exit_code == "0:0", job.output
    assert (folder / "runs/demo").is_dir()
    assert_finished(folder, job.output, hosts=["node1", "node2"], world_size=2)


STRUCK = """
import os, signal, time
from pathlib import Path
import torch
import mpitrain
from mpitrain.warm.protocol import socket_path

class Fault(mpitrain.Callback):
    def on_fit_start(self, trainer):
        kind = "warm" if "MPITRAIN_PROXY" in os.environ else "cold"
        print(f"rank {trainer.world.rank} is {kind}")

    def on_step_end(self, trainer):
        time.sleep(0.05)
        flag, world = Path("struck"), trainer.engine.world
        end = time.monotonic() + 60
        while trainer.state.step == 59 and not socket_path(os.environ).exists():
            assert time.monotonic() < end
            time.sleep(0.1)
        if trainer.state.step == 60 and world.rank == 1 and not flag.exists():
            flag.touch()
            os.kill(os.getpid(), signal.SIGKILL)

torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(320, 5), torch.randint(3, (320,)))
config = mpitrain.TrainConfig(epochs=5, global_batch_size=16)
callbacks = [*mpitrain.default_callbacks("runs/mine"), Fault()]
mpitrain.Trainer(torch.nn.Linear(5, 3), data, data, config, callbacks=callbacks).fit()
"""


def test_a_rank_that_is_killed_costs_a_restart_in_the_job(
    slurm: Slurm, folder: Path
) -> None:
    (folder / "train.py").write_text(STRUCK)
    script = (folder / "slurm/demo.sh").read_text()
    assert "supervise --restarts 3 -- " in script
    script = script.replace("--restarts 3 ", "--restarts 3 --warm ")
    script = script.replace('-m mpitrain "$@"', "-m mpitrain run train.py")
    script = script.replace("#SBATCH --gres=gpu:4\n", "")  # these nodes have none
    (folder / "job.sh").write_text(script)
    words = ["--ntasks-per-node=1", "job.sh"]
    job = slurm.sbatch(*words, cwd=folder, timeout_seconds=TIMEOUT_SECONDS)
    assert job.exit_code == "0:0", job.output
    assert job.output.count("supervise: restart 1 of 3 at step ") == 1, job.output
    assert "supervise: restart 2" not in job.output
    kinds = [sorted(re.findall(f"rank {it} is (....)", job.output)) for it in range(2)]
    assert kinds == [["cold", "warm"]] * 2, job.output
    assert_finished(folder, job.output, hosts=["node1", "node2"], world_size=2)


@pytest.mark.slow
def test_a_heterogeneous_job_is_told_that_one_component_is_used(
    slurm: Slurm, folder: Path
) -> None:
    words = ["--nodes=1", "--ntasks=1", ":", "--nodes=2", "--ntasks=2"]
    script = folder / "het.sh"
    script.write_text(
        "#!/bin/bash\nenv | grep HET_\nexport PATH=$PWD/.venv/bin:$PATH\n"
        'mpirun --prefix "$PWD/.venv" python -m mpitrain --dry-run\n'
    )
    slurm.sbatch(*words, "het.sh", cwd=folder, timeout_seconds=TIMEOUT_SECONDS)
    said = "".join(file.read_text() for file in folder.glob("slurm-*.out"))
    assert "a heterogeneous job of 2 components and 3 nodes" in said, said


def test_srun_without_pmix_is_refused_by_one_message(
    slurm: Slurm, folder: Path
) -> None:
    script = folder / "by-srun.sh"
    script.write_text("#!/bin/bash\nsrun --mpi=none .venv/bin/python -m mpitrain\n")
    words = ["--nodes=2", "--ntasks-per-node=1", "by-srun.sh"]
    job = slurm.sbatch(*words, cwd=folder, timeout_seconds=TIMEOUT_SECONDS)
    assert job.exit_code != "0:0", job.output
    assert "srun started 2 processes (SLURM_STEP_NUM_TASKS=2)" in job.output
    assert "world of 1" in job.output
    assert not (folder / "runs").exists()
