"""`Checkpointer` in scripts: with `Trainer`, and in a loop written by hand."""

from __future__ import annotations

import json
import random
import re
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from launcher import ROOT, Mpi, environment, mpirun, slow

WITH_TRAINER = """
import os, signal, sys, time
from pathlib import Path
import torch
from torch.utils.data import TensorDataset
import mpitrain

class Cut(mpitrain.Callback):
    def on_step_end(self, trainer):
        time.sleep(0.05)  # for a checkpoint, from which the next job resumes
        is_there = any(Path(sys.argv[1], "checkpoints").glob("step-*"))
        if is_there and trainer.world.rank == 1:
            if 0 < int(sys.argv[2]) <= trainer.state.step:
                sys.argv[2] = "-1"
                os.kill(os.getpid(), getattr(signal, sys.argv[3]))

torch.manual_seed(1)
inputs = torch.randn(60, 8)
data = TensorDataset(inputs, (inputs.sum(1) > 0).long())
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Dropout(0.2),
                            torch.nn.Linear(16, 2))
config = mpitrain.TrainConfig(epochs=3, global_batch_size=8, precision="fp64",
                              optimizer="adam", lr=0.01, ema_decay=0.9)
checkpointer = mpitrain.Checkpointer(sys.argv[1], every_steps=1, keep=None)
trainer = mpitrain.Trainer(model, data, data, config,
                           callbacks=[checkpointer, Cut()])
found = trainer.fit()
if trainer.world.rank == 0:
    torch.save((trainer.state_dict(), dict(found.values)), sys.argv[1] + ".pt")
"""

BY_HAND = """
import os, signal, sys
import torch
import mpitrain

checkpointer = mpitrain.Checkpointer(sys.argv[1], keep=2)
with mpitrain.init() as world:
    torch.manual_seed(1)
    inputs = torch.randn(60, 8, dtype=torch.float64)
    model = torch.nn.Linear(8, 1).double()
    model = torch.nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.1)
    state = checkpointer.restore(model=model, optimizer=optimizer)
    losses = state["losses"] if state else []
    for step in range(state["step"] if state else 0, 20):
        optimizer.zero_grad()
        noise = torch.rand(3, 8, dtype=torch.float64)
        loss = (model(inputs[step + 20 * world.rank :][:3] + noise) ** 2).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if step % 3 == 2:
            checkpointer.save(step + 1, model=model, optimizer=optimizer,
                              state={"losses": losses})
        if step == int(sys.argv[2]) and world.rank == 1:
            os.kill(os.getpid(), getattr(signal, sys.argv[3]))
        if checkpointer.should_stop():
            checkpointer.save(step + 1, model=model, optimizer=optimizer,
                              state={"losses": losses})
            sys.exit(75)
    for _ in range(2):  # the second time it is there already
        checkpointer.save(20, model=model, optimizer=optimizer,
                          state={"losses": losses})
    if world.rank == 0:
        torch.save((model.module.state_dict(), {"losses": losses}),
                   sys.argv[1] + ".pt")
"""

NEVER = "-1"


def result(folder: Path, name: str) -> tuple[dict[str, torch.Tensor], dict[str, float]]:
    found: tuple[dict[str, torch.Tensor], dict[str, float]] = torch.load(
        folder / f"{name}.pt"
    )
    return found


def result_of(run_dir: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((run_dir / "result.json").read_text())
    return found


FAULTY = """
import os, sys, time
import torch
from torch.utils.data import TensorDataset
import mpitrain

class Fault(mpitrain.Callback):
    def on_step_end(self, trainer):
        if trainer.state.step == 3 and trainer.world.rank == 1:
            if sys.argv[1] == "hang":
                time.sleep(1000)
            raise ArithmeticError("this is the fault")

data = TensorDataset(torch.ones(60, 8), torch.arange(60) % 2)
launch = mpitrain.LaunchConfig(hang_timeout=3, start_timeout=60)
config = mpitrain.TrainConfig(epochs=3, global_batch_size=8, launch=launch)
mpitrain.Trainer(torch.nn.Linear(8, 2), data, data, config,
                 callbacks=[Fault(), mpitrain.Recorder("r")]).fit()
"""

FAULTY_LOOP = """
import torch
import mpitrain

with mpitrain.init() as world:
    checkpointer = mpitrain.Checkpointer("r")
    model = torch.nn.Linear(8, 2)
    checkpointer.restore(model=model)
    checkpointer.save(1, model=model)
    if world.rank == 1:
        raise ArithmeticError("this is the fault")
    torch.distributed.barrier()
"""


@pytest.mark.parametrize(
    ("script", "fault", "message"),
    [
        (FAULTY, "raise", "ArithmeticError: this is the fault"),
        slow(FAULTY, "hang", "hang: no rank has made progress for"),
        (FAULTY_LOOP, "raise", "ArithmeticError: this is the fault"),
    ],
    ids=["raise", "hang", "loop"],
)
def test_a_failure_of_any_rank_of_a_script_is_in_its_run_folder(
    script: str, fault: str, message: str, openmpi: Mpi, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(script)
    done = mpirun(openmpi, 2, "script.py", fault, cwd=tmp_path)
    assert done.status == (76 if fault == "hang" else 1), done.err
    result = result_of(tmp_path / "r")
    assert result["status"] == "failed"
    assert "[rank 1/2 " in result["error"]
    assert message in result["error"]
    printer = 0 if fault == "hang" else 1
    assert message in (tmp_path / f"r/logs/rank-{printer}.log").read_text()
    if fault == "hang":
        assert "in on_step_end" in (tmp_path / "r/logs/rank-1.log").read_text()


ENDINGS = """
import sys
import torch
import mpitrain

with mpitrain.init():
    checkpointer = mpitrain.Checkpointer("r")
    model = torch.nn.Linear(8, 2)
    start = (checkpointer.restore(model=model) or {"step": 0})["step"]
    for step in range(start + 1, start + 3):
        checkpointer.save(step, model=model)
    exec(sys.argv[1])
"""


FORKS = """
import os, runpy, shutil, sys
import torch
import mpitrain
from mpitrain.cli import main

for number, action in enumerate(sys.argv[2:]):
    if os.fork() == 0:
        if sys.argv[1] == "run":
            sys.exit(main(["run", "script.py", action]))
        sys.argv = ["script.py", action]
        runpy.run_path("script.py", run_name="__main__")
        sys.exit()
    print("status", os.waitstatus_to_exitcode(os.wait()[1]), flush=True)
    shutil.copy("r/result.json", f"{number}.json")
"""
"""Starts the script again and again, after one import of torch."""


@pytest.mark.parametrize("by", ["itself", slow("run")])
def test_a_loop_leaves_in_its_run_folder_how_it_ended(
    by: str, openmpi: Mpi, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(ENDINGS)
    stop = "checkpointer.should_stop()\nimport os, signal\n"
    stop += "os.kill(os.getpid(), signal.SIGUSR2)\nassert checkpointer.should_stop()"
    actions = ("raise mpitrain.Stopped('the night is over')", "pass")
    actions += ("try: 1 / 0\nfinally: checkpointer.close()", stop)
    actions += ("checkpointer.close(); 1 / 0",)
    done = subprocess.run(
        [sys.executable, "-c", FORKS, by, *actions],
        cwd=tmp_path,
        env=environment(openmpi),
        capture_output=True,
        text=True,
    )
    statuses = re.findall(r"^status (\d+)$", done.stdout, re.MULTILINE)
    assert statuses == ["75", "0", "1", "0", "1"], done.stdout + done.stderr
    files = [tmp_path / f"{number}.json" for number in range(len(actions))]
    first, second, third, fourth, fifth = (json.loads(it.read_text()) for it in files)
    assert (first["status"], first["stopped"]) == ("stopped", "the night is over")
    assert (second["status"], second["steps"]) == ("finished", 4)
    assert third["status"] == "failed"
    assert "division by zero" in third["error"]
    assert fourth["status"] == "stopped"
    assert fourth["stopped"].startswith("stopped at step 8: ")
    assert fifth["status"] == "finished"


EXITS = """
import os, signal, sys
import torch
import mpitrain

def main(world):
    # The record is opened first, and closed last.
    recorder, checkpointer = mpitrain.Recorder("r"), mpitrain.Checkpointer("r")
    model = torch.nn.Linear(1, 1)
    step = (checkpointer.restore(model=model) or {"step": 0})["step"]
    while step < 12:
        step += 1
        losses = {"loss": 1.0 / step} | ({"val_loss": 2.0} if step % 3 == 0 else {})
        recorder.log(step, **losses)
        if step == 4 and world.is_rank_zero and "stop" in sys.argv:
            os.kill(os.getpid(), signal.SIGUSR2)
        reason = checkpointer.should_stop()
        if reason or step % 5 == 0:
            checkpointer.save(step, model=model)
        if reason:
            return 75
    return 0

with mpitrain.init(device="cpu") as world:
    sys.exit(main(world))
"""


def test_a_loop_that_exits_with_its_status_is_finished_or_stopped(
    openmpi: Mpi, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(EXITS)
    for words, status in (("stop", 75), ("", 0)):
        done = mpirun(openmpi, 2, "script.py", words, cwd=tmp_path)
        assert done.status == status, done.out + done.err
        result = result_of(tmp_path / "r")
        assert result["status"] == ("stopped" if status else "finished")
        assert result["steps"] == (4 if status else 12)
        assert ("stopped" in result) == bool(status)
    assert (result["epochs"], result["val_loss"]) == (4, 2.0)
    assert "finished: " in done.out


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["trainer", "by hand", "under run"])
def test_a_script_that_is_killed_at_a_random_step_ends_with_the_same_bits(
    kind: str, openmpi: Mpi, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(WITH_TRAINER if kind == "trainer" else BY_HAND)
    words = ["-m", "mpitrain", "run"] if kind == "under run" else []

    def run(name: str, step: str) -> tuple[int, str]:
        given = (str(script), name, step, "SIGKILL")
        done = mpirun(openmpi, 2, *words, *given, cwd=tmp_path)
        print(done.out + done.err)
        return done.status, done.out

    assert run("whole", NEVER)[0] == 0
    step = random.randrange(2, 20)
    print("killed at step", step)
    assert run("cut", str(step))[0] != 0
    status, out = run("cut", NEVER)
    assert status == 0
    assert kind != "trainer" or "resuming from" in out
    assert result_of(tmp_path / "cut")["status"] == "finished"
    (whole, values), (cut, cut_values) = (
        result(tmp_path, it) for it in ("whole", "cut")
    )
    assert values == cut_values
    assert all(torch.equal(whole[name], cut[name]) for name in whole)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["trainer", "by hand"])
def test_a_signal_stops_a_script_which_resumes(
    kind: str, openmpi: Mpi, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(WITH_TRAINER if kind == "trainer" else BY_HAND)

    def run(name: str, step: int) -> tuple[int, str]:
        words = (str(script), name, str(step), signal.SIGUSR2.name)
        done = mpirun(openmpi, 2, *words, cwd=tmp_path)
        return done.status, done.out + done.err

    status, out = run("stopped", 5)
    assert status == 75, out
    assert result_of(tmp_path / "stopped")["status"] == "stopped"
    if kind == "trainer":
        assert "SIGUSR2 arrived" in out
    status, out = run("stopped", -1)
    assert status == 0, out
    if kind == "trainer":
        assert "resuming from" in out
    assert run("whole", -1)[0] == 0
    whole, stopped = result(tmp_path, "whole"), result(tmp_path, "stopped")
    assert whole[1] == stopped[1]
    assert all(torch.equal(whole[0][name], stopped[0][name]) for name in whole[0])


@pytest.mark.slow
def test_a_gan_resumes_on_other_numbers_of_ranks(openmpi: Mpi, tmp_path: Path) -> None:
    losses: list[list[float]] = []
    for name, parts in (("whole", [(1, 2)]), ("parts", [(3, 1), (2, 2)])):
        for num_ranks, epochs in parts:
            command = str(ROOT / "examples/gan.py"), str(tmp_path / name), str(epochs)
            done = mpirun(openmpi, num_ranks, *command, cwd=tmp_path)
            assert done.status == 0, done.err
        lines = (tmp_path / name / "metrics.jsonl").read_text().splitlines()
        steps = [row for row in map(json.loads, lines) if row["event"] == "step"]
        assert [row["step"] for row in steps] == list(range(1, 39))
        losses.append([row[key] for row in steps for key in ("train_d", "train_g")])
    assert losses[1] == pytest.approx(losses[0], rel=1e-9)
