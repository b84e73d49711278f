"""`Checkpointer` in scripts: with `Trainer`, and in a loop written by hand."""

from __future__ import annotations

import random
import signal
from pathlib import Path

import pytest
import torch
from launcher import Mpi, mpirun, slow

WITH_TRAINER = """
import os, signal, sys
import torch
from torch.utils.data import TensorDataset
import mpitrain

class Cut(mpitrain.Callback):
    def on_step_end(self, trainer):
        if trainer.state.step == int(sys.argv[2]) and trainer.world.rank == 1:
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


@pytest.mark.parametrize("kind", ["trainer", slow("by hand"), slow("under run")])
def test_a_script_that_is_killed_at_random_steps_ends_with_the_same_bits(
    kind: str, openmpi: Mpi, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(WITH_TRAINER if kind == "trainer" else BY_HAND)
    words = ["-m", "mpitrain", "run"] if kind == "under run" else []

    def run(name: str, step: str, how: str = "SIGKILL") -> int:
        done = mpirun(openmpi, 2, *words, str(script), name, step, how, cwd=tmp_path)
        print(done.out + done.err)
        return done.status

    assert run("whole", NEVER) == 0
    seed = random.SystemRandom().randrange(10**6)
    print("seed", seed)
    for step in sorted(random.Random(seed).sample(range(2, 20), 2)):
        assert run("cut", str(step)) != 0
    assert run("cut", NEVER) == 0
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


def test_another_configuration_is_refused(openmpi: Mpi, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(WITH_TRAINER)
    words = (str(script), "run", NEVER, "SIGKILL")
    assert mpirun(openmpi, 2, *words, cwd=tmp_path).status == 0
    script.write_text(WITH_TRAINER.replace("lr=0.01", "lr=0.02"))
    done = mpirun(openmpi, 2, *words, cwd=tmp_path)
    assert done.status == 2
    assert "lr: 0.01 -> 0.02" in done.err
