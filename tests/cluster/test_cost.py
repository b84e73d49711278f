"""The cost of a chain of jobs is what `sacct` has on record of them.

`sacct` reads the record of completed jobs (`--completion`), a file that needs no data
base. No real PBS is here: tests/unit/test_cost.py has a stand-in for `qstat`.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from datetime import datetime
from pathlib import Path

import pytest

from mpitrain.record.cost import cost_of

from .hosts import LOGIN
from .slurm import UNENDED, Slurm

TRAIN = """
import os, time
import torch
import mpitrain

class Sleeps(mpitrain.Callback):
    def on_step_end(self, trainer):
        time.sleep(float(os.environ["STEP_SECONDS"]))

torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(640, 5), torch.randint(3, (640,)))
config = mpitrain.TrainConfig(epochs=3, global_batch_size=16)
callbacks = mpitrain.default_callbacks("runs/mine", checkpoint_every_steps=5)
model = torch.nn.Linear(5, 3)
mpitrain.Trainer(model, data, data, config, callbacks=[*callbacks, Sleeps()]).fit()
"""
WAIT_SECONDS = 900


def wait_for(what: str, is_there: object) -> None:
    end = time.monotonic() + WAIT_SECONDS
    while not is_there():  # type: ignore[operator]
        assert time.monotonic() < end, what
        time.sleep(0.2)


def kill_all(number: str, slurm: Slurm) -> None:
    """Kill all processes of a job at once.

    As a cluster does that has cgroups. Here `scancel` leaves ranks, which end some
    seconds after the job does by SLURM's record.
    """
    conf = f"SLURM_CONF={slurm.environ['SLURM_CONF']}"
    expected = {conf.encode(), f"SLURM_JOB_ID={number}".encode()}
    found = []
    for entry in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if expected <= set(entry.read_bytes().split(b"\0")):
                found.append(int(entry.parent.name))
    assert len(found) >= 4  # script, mpirun, and a rank on each node
    for pid in found:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("step_seconds", "seconds", "share"),
    [
        (0.3, 3.0, 0.0),  # SLURM's times are whole seconds
        (4.0, 0.0, 0.01),
    ],
)
def test_core_hours_of_a_killed_and_a_finished_job_are_those_of_sacct(
    step_seconds: float, seconds: float, share: float, slurm: Slurm, folder: Path
) -> None:
    (folder / "train.py").write_text(TRAIN)
    script = (folder / "slurm/demo.sh").read_text()
    script = script.replace('-m mpitrain "$@"', "-m mpitrain run train.py")
    script = script.replace("#SBATCH --gres=gpu:4\n", "")
    assert "mpitrain run train.py" in script
    (folder / "job.sh").write_text(script)
    words = ["sbatch", "--parsable", "--time=30"]
    words += ["--ntasks-per-node=1", "--cpus-per-task=3"]
    run_dir = folder / "runs/mine"

    def submit() -> str:
        environ = {"STEP_SECONDS": str(step_seconds)}
        sent = slurm.hosts.run(LOGIN, [*words, "job.sh"], cwd=folder, environ=environ)
        assert sent.returncode == 0, sent.stdout
        return str(sent.stdout).strip()

    def has_ended(number: str) -> bool:
        return slurm.state_of(number) not in UNENDED

    numbers = [submit()]
    wait_for("checkpoint", lambda: [*run_dir.glob("checkpoints/step-*/SHA256SUMS")])
    kill_all(numbers[0], slurm)
    wait_for("end", lambda: has_ended(numbers[0]))
    numbers.append(submit())
    wait_for("end", lambda: has_ended(numbers[1]))
    result = json.loads((run_dir / "result.json").read_text())
    assert result["status"] == "finished"

    asked = ["sacct", "--completion", "-n", "-P", "-o", "jobid,ncpus,start,end"]
    said = slurm.hosts.run(LOGIN, [*asked, "-j", ",".join(numbers)]).stdout
    rows = [line.split("|") for line in said.split()]
    assert [row[:2] for row in rows] == [[number, "6"] for number in numbers], said
    times = [[datetime.fromisoformat(it).timestamp() for it in row[2:]] for row in rows]
    jobs = json.loads((run_dir / "costs.json").read_text())["jobs"]
    assert [it["id"] for it in jobs] == [
        f"slurm {number} {start:.0f}"
        for number, (start, _) in zip(numbers, times, strict=True)
    ]
    expected = 6 * sum(end - start for start, end in times) / 3600
    found = cost_of(run_dir)
    print(f"sacct {expected * 3600} core-seconds, {found['core_hours'] * 3600} here")
    tolerance = max(share * expected, 6 * seconds / 3600)
    assert found["core_hours"] == pytest.approx(expected, abs=tolerance)
    assert found["num_jobs"] == 2
    assert 0.0 <= found["queue_seconds"] < 60.0
    # The result was written before the processes ended.
    assert 0.8 * expected < result["cost"]["core_hours"] <= found["core_hours"]
