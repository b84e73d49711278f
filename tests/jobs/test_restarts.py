"""`supervise --restarts`: after a fault a training starts again, and is finished."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launcher import MPIS, Mpi, environment, rows, slow, supervise

TRAINING = ("-m", "mpitrain", "--device", "cpu", "--epochs", "3")
SAVED_OFTEN = ("--checkpoint-every-steps", "5")

SCRIPT = """
import os, signal
from pathlib import Path
import torch
import mpitrain

class Faults(mpitrain.Callback):
    def on_step_end(self, trainer):
        world, step = trainer.engine.world, trainer.state.step
        flag = Path(f"struck-{step}")
        if world.rank == 1 and step in (4, 7) and not flag.exists():
            flag.touch()
            FAULT

def main():
    torch.manual_seed(0)
    data = torch.utils.data.TensorDataset(torch.randn(64, 5), torch.randint(3, (64,)))
    config = mpitrain.TrainConfig(epochs=2, global_batch_size=16, precision="fp64")
    trainer = mpitrain.Trainer(torch.nn.Linear(5, 3), data, data, config, callbacks=[
        mpitrain.Checkpointer("mine", every_steps=1, resume=RESUME),
        mpitrain.Recorder("mine"), Faults()])
    trainer.fit()
    if trainer.engine.world.is_rank_zero:
        print("weights", [it.tolist() for it in trainer.state_dict().values()])

with mpitrain.init(device="cpu", backend="gloo"):
    main()
"""


# In CI restarts are those of tests/jobs/test_warm.py, and bits of tests/cluster/
# test_recovery.py.
@pytest.mark.slow
@pytest.mark.parametrize("mpi", MPIS, indirect=True)
def test_a_script_whose_ranks_are_killed_has_the_weights_of_one_that_ran_through(
    mpi: Mpi, tmp_path: Path
) -> None:
    weights = []
    kill = "os.kill(os.getpid(), signal.SIGKILL)"
    for name, fault in (("with", kill), ("no", "...")):
        (folder := tmp_path / name).mkdir()
        text = SCRIPT.replace("FAULT", fault).replace("RESUME", '"never"')
        (folder / "train.py").write_text(text)
        done = supervise(mpi, folder, ["--restarts", "3"], "train.py", num_ranks=2)
        assert done.status == 0, done.out + done.err
        weights += re.findall("weights .*", done.out)
        restarts = re.findall("supervise: restart (.*)", done.err)
        assert len(restarts) == (2 if name == "with" else 0), done.err
        for number, line in enumerate(restarts, 1):
            assert re.match(rf"{number} of 3 at step \d+: \[rank 1/2 .* died", line)
        assert json.loads((folder / "mine/result.json").read_text())["steps"] == 8
    assert len(weights) == 2
    assert weights[0] == weights[1]


@pytest.mark.slow  # tests/unit/test_chain.py: two failures in a row without progress
def test_a_fault_that_comes_back_ends_it(openmpi: Mpi, tmp_path: Path) -> None:
    fault = "flag.unlink(); raise ArithmeticError('this is the fault')"
    text = SCRIPT.replace("FAULT", fault).replace("RESUME", '"auto"')
    (tmp_path / "train.py").write_text(text)
    done = supervise(openmpi, tmp_path, ["--restarts", "9"], "train.py", num_ranks=2)
    assert done.status == 1
    restarts = re.findall("supervise: restart (.*)", done.err)
    assert 1 <= len(restarts) <= 5, done.err  # it comes to 4 steps at most
    assert "mine failed 2 times without progress, at step" in done.err
    assert done.err.splitlines()[-1].endswith("ArithmeticError: this is the fault")


def test_a_run_without_a_name_is_resumed_and_not_begun_anew(
    openmpi: Mpi, tmp_path: Path
) -> None:
    with subprocess.Popen(
        [
            *(sys.executable, "-m", "mpitrain", "supervise", "--restarts", "1", "--"),
            *(str(openmpi.mpirun), "-np", "2", *openmpi.flags, sys.executable),
            *(*TRAINING, *SAVED_OFTEN, "--new-run"),
        ],
        cwd=tmp_path,
        env=environment(openmpi),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as job:
        end = time.monotonic() + 60
        while not (saved := [*tmp_path.glob("runs/*/checkpoints/step-*")]):
            assert time.monotonic() < end
            time.sleep(0.05)
        log = next(saved[0].parents[1].glob("logs/rank-1.log")).read_text()
        os.kill(int(log.split()[1]), signal.SIGKILL)
        out, _ = job.communicate(timeout=120)
    assert job.returncode == 0, out
    (run_dir,) = (tmp_path / "runs").iterdir()
    assert "resuming from" in out
    assert json.loads((run_dir / "result.json").read_text())["status"] == "finished"
    steps = [row["step"] for row in rows(run_dir, "step")]
    assert steps == [*range(1, len(steps) + 1)]


@pytest.mark.parametrize("status", [slow(0), 75])
def test_what_ends_as_it_should_is_not_started_again(
    status: int, openmpi: Mpi, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(
        f"import mpitrain\nwith mpitrain.init(device='cpu'):\n    print('begun')\n"
        f"    raise SystemExit({status})\n"
    )
    options = ["--restarts", "3"]
    done = supervise(openmpi, tmp_path, options, "script.py", num_ranks=1)
    assert done.status == status, done.out + done.err
    assert done.out.count("begun") == 1
