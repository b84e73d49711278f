"""What a user types, and what it leaves behind."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import subprocess
import sys
import time
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import yaml
from example_files import own_training
from launcher import ROOT, Mpi, environment, mpirun, rows, slow, wait_until_gone

pytestmark = pytest.mark.usefixtures("warm_starts")

COLD = {"MPITRAIN_FORK_SERVER": "none"}
"""For tests of what a rank imports, how it dies, or what it has as its terminal."""


def test_steps_before_a_loss_that_is_no_number_are_written(
    openmpi: Mpi, tmp_path: Path
) -> None:
    flags = ("--name", "r", "--device", "cpu", "--lr", "1e18", "--warmup-epochs", "0")
    done = mpirun(openmpi, 2, *("-m", "mpitrain"), *flags, cwd=tmp_path)
    assert done.status == 1
    run = tmp_path / "runs/r"
    error = json.loads((run / "result.json").read_text())["error"]
    failed, *_ = re.findall(r"step (\d+)", error)
    steps = [row["step"] for row in rows(run, "step")]
    assert int(failed) > 1
    assert steps[: int(failed) - 1] == list(range(1, int(failed)))


def test_the_run_folder_holds_what_it_promises(mpi: Mpi, tmp_path: Path) -> None:
    done = mpirun(
        mpi,
        2,
        *("-m", "mpitrain", "--name", "first", "--epochs", "2", "--lr", "0.05"),
        cwd=tmp_path,
        SECRET_TOKEN="do not record me",
    )
    assert done.status == 0, done.err
    assert done.ours == []
    run = tmp_path / "runs" / "first"
    config = yaml.safe_load((run / "config.yaml").read_text())
    assert (config["name"], config["lr"], config["data"]) == ("first", 0.05, "digits")

    environment_text = (run / "environment.json").read_text()
    recorded = json.loads(environment_text)
    assert recorded["world"]["world_size"] == 2
    assert recorded["hosts"][0]["ranks"] == [0, 1]
    assert recorded["variables"]["WORLD_SIZE"] == "2"
    assert "do not record me" not in environment_text
    assert recorded["versions"]["torch"] == torch.__version__.partition("+")[0]

    result = json.loads((run / "result.json").read_text())
    assert result["status"] == "finished"
    assert (result["world_size"], result["num_nodes"]) == (2, 1)
    assert result["backend"] == "mpi4py"
    assert result["start_seconds"] > 0
    assert result["train_seconds"] > 0

    lines = [json.loads(x) for x in (run / "metrics.jsonl").read_text().splitlines()]
    assert [line["event"] for line in lines].count("step") == 46
    epochs = [line for line in lines if line["event"] == "epoch"]
    assert [epoch["step"] for epoch in epochs] == [23, 46]
    assert epochs[-1]["val_accuracy"] == result["val_accuracy"]
    keys = ["epoch", "step", "train_loss", "val_loss", "val_accuracy", "epoch_seconds"]
    assert {*keys, "samples_per_second"} <= epochs[0].keys()

    weights = torch.load(run / "model.pt", weights_only=True)
    assert "conv1.weight" in weights
    assert sorted(p.name for p in (run / "logs").iterdir()) == [
        "rank-0.log",
        "rank-1.log",
    ]
    assert "64 per step = 2 ranks x 32 x 1" in done.out
    assert done.out.count("finished: val_accuracy") == 1
    assert done.out.count("val_accuracy") == 3
    assert "%|" not in done.out  # a log has lines, and no bar


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--epohs", "3"), "--epohs"),
        (("--config", "none.yaml"), "--config none.yaml: cannot be read: No such file"),
    ],
)
def test_a_bad_command_line_is_told_once(
    openmpi: Mpi, flags: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    done = mpirun(openmpi, 2, "-m", "mpitrain", *flags, cwd=tmp_path)
    assert done.status == 2
    assert (done.out + done.err).count(words) == 1
    assert "Traceback" not in done.err
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--data", "mnits"), "--data 'mnits' is not known"),
        slow(("--model", "custom:Nest"), "module 'custom' has no callable 'Nest'"),
        slow(("--model", "nowhere:Net"), "there is no module 'nowhere'"),
        slow(("--data", "custom:strike"), "returned 'NoneType'; expected a pair"),
    ],
)
def test_unknown_data_and_models_are_told_once(
    openmpi: Mpi, flags: tuple[str, ...], words: str, tmp_path: Path
) -> None:
    done = mpirun(
        openmpi, 2, "-m", "mpitrain", *flags, cwd=tmp_path, FAULTY_RANK="none"
    )
    assert done.status in (1, 2)
    assert (done.out + done.err).count(words) == 1
    assert "Traceback" not in done.err


def test_help_and_version_are_told_once_by_several_ranks(
    openmpi: Mpi, tmp_path: Path
) -> None:
    done = mpirun(openmpi, 2, "-m", "mpitrain", "--help", cwd=tmp_path)
    assert done.status == 0
    assert done.out.count("usage: python -m mpitrain") == 1
    assert "\x1b[" not in done.out
    done = mpirun(openmpi, 2, "-m", "mpitrain", "--version", cwd=tmp_path)
    assert done.status == 0
    assert done.out.count("mpitrain 0.") == 1


def test_alone_without_mpirun_it_trains_as_a_world_of_one(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mpitrain", "--name", "alone", "--dry-run"],
        cwd=tmp_path,
        env=environment(**COLD) | {"PYTHONPROFILEIMPORTTIME": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert "mpitrain.train.trainer" in done.stderr
    # Of 0.5 s of CPU time each.
    for package in ("torch._dynamo", "torch.distributed.checkpoint", "sympy"):
        assert package not in done.stderr
    # A dry run leaves the name to the training.
    result = json.loads((tmp_path / "runs/alone-dry-run/result.json").read_text())
    assert (result["status"], result["world_size"]) == ("finished", 1)
    assert result["steps"] == 1


def test_ctrl_c_at_mpirun_ends_all_ranks(openmpi: Mpi, tmp_path: Path) -> None:
    job = subprocess.Popen(
        [
            *("timeout", "-k", "10", "--signal=INT", "--foreground", "12"),
            *(str(openmpi.mpirun), "-np", "2", *openmpi.flags, sys.executable),
            *("-m", "mpitrain", "--name", "r", "--epochs", "100000"),
        ],
        cwd=tmp_path,
        env=environment(openmpi, **COLD),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    _, err = job.communicate(timeout=60)
    assert job.returncode != 0
    assert "Traceback" not in err
    logs = (tmp_path / "runs/r/logs").iterdir()
    pids = [int(log.read_text().split()[1]) for log in logs]
    wait_until_gone(pids)


@pytest.mark.slow
def test_the_examples_of_the_tutorials_run(openmpi: Mpi, tmp_path: Path) -> None:
    page = (ROOT / "docs/tutorial/custom-model.md").read_text()
    assert (ROOT / "examples/custom_model.py").read_text().split('"""\n\n')[1] in page
    (tmp_path / "examples").symlink_to(ROOT / "examples")
    words = ("--model", "examples.custom_model:TwoLayers", "--name", "own")
    done = mpirun(openmpi, 2, "-m", "mpitrain", *words, cwd=tmp_path)
    assert done.status == 0, done.err
    done = mpirun(openmpi, 2, "examples/custom_loop.py", cwd=tmp_path)
    assert done.status == 0, done.err
    assert "2 ranks, loss 0.00" in done.out


@pytest.mark.slow
def test_each_step_of_your_own_training_runs(openmpi: Mpi, tmp_path: Path) -> None:
    programs = own_training()
    steps = [f"step{number}.py" for number in (3, 4, 5, 6)]
    assert list(programs) == ["plain.py", "tags.py", *steps]
    for name, program in programs.items():
        (tmp_path / name).write_text(program)
    run_all = f"import runpy; [runpy.run_path(it, None, '__main__') for it in {steps}]"
    done = mpirun(openmpi, 1, "-c", run_all, cwd=tmp_path)
    assert done.status == 0, done.err
    assert done.out.count("finished: val_f1 ") == 2
    assert "resuming from" in mpirun(openmpi, 2, "step5.py", cwd=tmp_path).out
    early = rows(tmp_path / "runs/tags-steps", "validation")
    assert [it["step"] for it in early][:2] == [10, 20]


def test_your_own_training_is_the_plain_loop(openmpi: Mpi, tmp_path: Path) -> None:
    """In the order of the loop, and in fp64."""
    programs = own_training()
    plain, step5 = programs["plain.py"], programs["step5.py"]
    changes = {
        "shuffle=True": "shuffle=False",
        "loss:.4f": "loss:.12f",
        "range(5)": "range(2)",
        "total_steps=5": "total_steps=2",
        "torch.manual": "torch.set_default_dtype(torch.float64)\ntorch.manual",
    }
    for old, new in changes.items():
        assert plain.count(old) == 1
        plain = plain.replace(old, new)
    step5 = step5.replace("epochs=5", 'epochs=2, precision="fp64", micro_batch_size=3')
    order = "sampler=lambda seed, epoch: range(300),"
    step5 = step5.replace("task=", f"{order}\n    task=")
    (tmp_path / "plain.py").write_text(plain)
    (tmp_path / "tags.py").write_text(step5)
    run = ("-m", "mpitrain", "run")
    by_hand = mpirun(openmpi, 1, *run, "plain.py", cwd=tmp_path)
    assert by_hand.status == 0, by_hand.err
    expected = re.findall(r"val_loss (\S+), val_f1 (\S+)", by_hand.out)
    done = mpirun(openmpi, 2, *run, "tags.py", cwd=tmp_path)
    assert done.status == 0, done.err
    epochs = rows(tmp_path / "runs/tags", "epoch")
    assert len(expected) == len(epochs) == 2
    for (loss, f1), epoch in zip(expected, epochs, strict=True):
        assert epoch["val_loss"] == pytest.approx(float(loss), rel=1e-9)
        assert epoch["val_f1"] == pytest.approx(float(f1), abs=1e-4)


SLOW = """
import os
import time

from slow_loop import SlowModel


class Slow(SlowModel):
    def forward(self, images):
        if self.calls == 12 and os.environ["RANK"] == "1":
            print("said by rank 1", flush=True)
        return super().forward(images)
"""


def screen_of(said: str) -> list[str]:
    """What a terminal shows in the end; knows the control codes that a bar needs."""
    rows, row, column = [""], 0, 0
    for part in re.findall(r"\x1b\[\d*[A-Z]|\r|\n|[^\x1b\r\n]+", said):
        if part == "\n":
            row += 1
            rows += [""] * (row == len(rows))
        elif part == "\r":
            column = 0
        elif part == "\x1b[A":
            row = max(row - 1, 0)
        elif part == "\x1b[2K":
            rows[row] = ""
        else:
            assert not part.startswith("\x1b"), part
            line = rows[row].ljust(column)
            rows[row] = line[:column] + part + line[column + len(part) :]
            column += len(part)
    return rows


def test_on_a_terminal_a_bar_moves(mpi: Mpi, tmp_path: Path) -> None:
    """Open MPI 5 hands on whole lines alone: a bar that ends none would never come."""
    (tmp_path / "slow.py").write_text(SLOW)
    words = [str(mpi.mpirun), "-np", "2", *mpi.flags, sys.executable, "-m", "mpitrain"]
    words += ["--epochs", "1", "--model", "slow:Slow", "--device", "cpu"]
    if mpi.name == "mpich":  # whose ranks cannot know that a terminal is there
        words += ["--progress", "bar"]
    on_terminal, its_end = pty.openpty()
    variables = environment(mpi, PACE="0.2", **COLD)
    came: dict[str, float] = {}
    with subprocess.Popen(
        words, cwd=tmp_path, env=variables, stdout=its_end, stderr=its_end
    ) as job:
        os.close(its_end)
        said = b""
        with contextlib.suppress(OSError):  # the terminal's other end is closed
            while part := os.read(on_terminal, 65536):
                said += part
                for step in re.findall(r" (\d+)/23", part.decode(errors="replace")):
                    came.setdefault(step, time.monotonic())
        assert job.wait(timeout=60) == 0, said.decode()
    os.close(on_terminal)
    text = said.decode()
    times = list(came.values())
    assert len(times) > 8, text
    assert times[-1] - times[0] > 3.0
    assert max(b - a for a, b in pairwise(times)) < 2.0
    assert "/23 | train_loss" in text
    assert "samples/s | done in " in text
    rows = screen_of(f"$ {' '.join(words)}\r\n{text}")
    assert sum("val_accuracy" in row for row in rows) == 2
    # MPICH's mpiexec may put it behind a part of a bar.
    begins = "" if mpi.name == "mpich" else "said by rank 1"
    assert [row for row in rows if "said by rank 1" in row and row.startswith(begins)]
    # The last bar is cleared; one whose line another rank wrote on stays.
    assert sum("/23" in row for row in rows) <= 1, rows
