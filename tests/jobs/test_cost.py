"""The cost of a run is that of all its jobs: of one that was killed, too.

The counter of energy is a file in a folder that stands for ``/sys``.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launcher import Mpi, children_of, environment, send_signal

SCRIPT = """
import os, time
from pathlib import Path
import torch
import mpitrain
from mpitrain.record import energy

energy.SYSFS = Path("sys")
counter = Path("sys/class/powercap/intel-rapl:0/energy_uj")

class Uses5JoulesAStep(mpitrain.Callback):
    def on_step_end(self, trainer):
        time.sleep(0.1)
        if trainer.world.rank == 0:
            counter.write_text(f"{int(counter.read_text()) + 5_000_000}")

torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(640, 5), torch.randint(3, (640,)))
config = mpitrain.TrainConfig(epochs=2, global_batch_size=16)
callbacks = mpitrain.default_callbacks("runs/mine", checkpoint_every_steps=5)
model = torch.nn.Linear(5, 3)
callbacks.append(Uses5JoulesAStep())
mpitrain.Trainer(model, data, data, config, callbacks=callbacks).fit()
"""
NUM_STEPS = 80


def test_a_chain_of_a_killed_and_a_finished_job_adds_up(
    openmpi: Mpi, tmp_path: Path
) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    zone = tmp_path / "sys/class/powercap/intel-rapl:0"
    zone.mkdir(parents=True)
    (zone / "name").write_text("package-0\n")
    (zone / "energy_uj").write_text("123\n")
    costs = tmp_path / "runs/mine/costs.json"
    command = [str(openmpi.mpirun), "-np", "2", *openmpi.flags, sys.executable]

    def start() -> tuple[subprocess.Popen[bytes], float]:
        with (tmp_path / "out").open("ab") as out:
            return subprocess.Popen(
                [*command, "train.py"],
                cwd=tmp_path,
                env=environment(openmpi),
                stdout=out,
                stderr=out,
            ), time.time()

    def said() -> str:
        return (tmp_path / "out").read_text()

    process, began = start()
    end = time.monotonic() + 90
    steps = (tmp_path / "runs/mine/checkpoints").glob
    while not any(int(it.name[5:13]) > 20 for it in steps("step-*")):
        assert process.poll() is None, said()
        assert time.monotonic() < end, said()
        time.sleep(0.05)
    send_signal([process.pid, *children_of(process.pid)])  # as a scheduler does
    killed = time.time()
    process.wait()
    (first,) = json.loads(costs.read_text())["jobs"]
    assert first["began"] == pytest.approx(began, abs=1.0)
    assert killed - 3.0 < first["ended"] <= killed + 1.0
    assert first["cores"] >= 1
    used, nothing = first["ranks"]  # what was gathered last
    assert 5 * 5 <= used["energy_joules"] <= 5 * 50
    assert used["energy_parts"] == ["cpu"]
    assert nothing == {}  # one rank of the node counts

    process, began = start()
    assert process.wait(120) == 0, said()
    ended = (tmp_path / "runs/mine/result.json").stat().st_mtime
    before, second = json.loads(costs.read_text())["jobs"]
    assert before == first
    assert second["began"] == pytest.approx(began, abs=1.0)
    assert ended - 2.0 < second["ended"] <= ended
    result = json.loads((tmp_path / "runs/mine/result.json").read_text())
    lines = (tmp_path / "runs/mine/metrics.jsonl").read_text().splitlines()
    (resumed,) = [
        it["step"] for it in map(json.loads, lines) if it["event"] == "resume"
    ]
    joules = second["ranks"][0]["energy_joules"]
    assert joules == pytest.approx(5 * (NUM_STEPS - resumed))
    hours = [(it["ended"] - it["began"]) / 3600 for it in (first, second)]
    assert result["status"] == "finished"
    assert result["cost"] == {
        "num_jobs": 2,
        "wall_hours": pytest.approx(sum(hours)),
        "core_hours": pytest.approx(sum(hours) * first["cores"]),
        "gpu_hours": 0.0,
        "energy_joules": used["energy_joules"] + joules,
        "energy_parts": ["cpu"],
    }
