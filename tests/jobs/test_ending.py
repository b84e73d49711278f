"""Every way out of one rank ends the whole job, soon, and says why once."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from launcher import (
    Done,
    Mpi,
    environment,
    mpirun,
    slow,
    supervise,
    under_each_mpi,
    wait_until_gone,
)

GONE_WITHIN_SECONDS = 10.0

BEFORE_TRAINING = """
import os, signal, sys, time
from pathlib import Path
from mpitrain.launch.job import start_job

job = start_job()
with job.guard:
    Path(f"pid-{job.comm.rank}").write_text(str(os.getpid()))
    job.comm.Barrier()
    if job.comm.rank == 1:
        Path("time").write_text(str(time.time()))
        match sys.argv[1]:
            case "raise": raise ArithmeticError("this is the fault")
            case "exit": sys.exit(3)
            case "interrupt":
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(1)
            case "kill": os.kill(os.getpid(), signal.SIGKILL)
    job.comm.Barrier()
"""

OWN_SCRIPT = """
import sys
import mpitrain
import torch, torch.distributed as dist

job = mpitrain.init()
if job.world.rank == 1 and sys.argv[1] == "raise":
    raise ArithmeticError("this is the fault")
dist.all_reduce(torch.ones(1))
print("all is well on", job.world.rank)
"""

FREEZES_ON_ONE_RANK = """
import mpitrain
import torch
from torch import nn
from torch.utils.data import TensorDataset

class Freezes(mpitrain.Callback):
    def on_step_end(self, trainer):
        if trainer.world.rank == 1:
            trainer.model.weight.requires_grad_(False)

with mpitrain.init() as world:
    data = TensorDataset(torch.ones(8, 3), torch.zeros(8, dtype=torch.int64))
    config = mpitrain.TrainConfig(global_batch_size=4, CONFIG)
    arguments = {"callbacks": [Freezes()], "find_unused_parameters": False}
    model = nn.Linear(3, 2)
    mpitrain.Trainer(model, data, data, config, world=world, **arguments).fit()
"""


def check_gone(done: Done, struck: float, pids: list[int]) -> None:
    assert done.ended - struck < GONE_WITHIN_SECONDS
    wait_until_gone(pids)
    assert done.status != 0


def check_kill_is_named(done: Done) -> None:
    """A rank that was killed has no last word; its sidecar has, and nobody else."""
    (line,) = done.ours
    assert line.startswith("[rank 1/3 ")
    assert "died without an error message" in line


@pytest.mark.parametrize("fault", ["raise", "kill"])
@pytest.mark.parametrize(
    ("mpi", "step"),
    [
        slow("openmpi-5", 0),
        *(slow("openmpi-5", step) for step in (1, 2)),
        slow("openmpi-4.1", 1),
        ("mpich", 2),
    ],
    indirect=["mpi"],
)
def test_a_fault_around_the_first_step_ends_the_job(
    mpi: Mpi, fault: str, step: int, tmp_path: Path
) -> None:
    done = run_faulty(mpi, fault, step, tmp_path)
    logs = [log.read_text() for log in sorted((tmp_path / "runs/r/logs").iterdir())]
    assert [log.split()[4] for log in logs] == ["0/3", "1/3", "2/3"]
    pids = [int(log.split()[1]) for log in logs]
    check_gone(done, float((tmp_path / "time").read_text()), pids)
    result = json.loads((tmp_path / "runs/r/result.json").read_text())
    if fault == "kill":
        check_kill_is_named(done)
        assert result["status"] == "failed"
        assert "[rank 1/3 " in result["error"]
    else:
        (line,) = done.ours
        assert line.startswith("[rank 1/3 ")
        assert line.endswith("ArithmeticError: this is the fault")
        assert done.err.count("Traceback (most recent call last)") == 1
        assert "this is the fault" in logs[1]
        assert result["status"] == "failed"
        assert "this is the fault" in result["error"]


@pytest.mark.parametrize(
    "config",
    [
        "",  # DDP, which waits for each weight's gradient
        slow("bitwise=True"),
        slow("strategy='fsdp'"),
        slow("strategy='fsdp', bitwise=True"),
        slow("shard_optimizer=True"),
    ],
)
def test_weights_that_one_rank_freezes_end_the_job(
    openmpi: Mpi, config: str, tmp_path: Path
) -> None:
    script = FREEZES_ON_ONE_RANK.replace("CONFIG", config)
    (tmp_path / "script.py").write_text(script)
    done = mpirun(openmpi, 2, "script.py", cwd=tmp_path)
    assert done.status == 2
    (line,) = done.ours
    assert line.startswith("[rank 1/2 ")
    assert "; now frozen: weight." in line


@pytest.mark.parametrize(
    ("fault", "status", "words"),
    [
        ("exit", 3, "sys.exit(3)"),
        slow("exit-text", 1, "sys.exit('no more')"),
        slow("interrupt", 130, "interrupted by Ctrl-C (SIGINT)"),
    ],
)
def test_the_job_ends_with_the_status_of_the_rank_that_left(
    openmpi: Mpi, fault: str, status: int, words: str, tmp_path: Path
) -> None:
    done = run_faulty(openmpi, fault, 1, tmp_path, num_ranks=2)
    assert done.status == status
    (line,) = done.ours
    assert line.startswith("[rank 1/2 ")
    assert line.endswith(words)


def test_a_crash_of_compiled_code_leaves_its_stack_in_the_log(
    mpi: Mpi, tmp_path: Path
) -> None:
    done = run_faulty(mpi, "segv", 1, tmp_path, num_ranks=2)
    assert done.status != 0
    (line,) = done.ours
    assert line.startswith("[rank 1/2 ")
    log = (tmp_path / "runs/r/logs/rank-1.log").read_text()
    assert "Segmentation fault" in log
    assert "in strike" in log


@under_each_mpi
@pytest.mark.parametrize("fault", ["raise", "exit", "interrupt", "kill"])
def test_the_promise_holds_from_the_return_of_mpi_init(
    mpi: Mpi, fault: str, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(BEFORE_TRAINING)
    done = mpirun(mpi, 3, str(script), fault, cwd=tmp_path, timeout_seconds=60)
    pids = [int((tmp_path / f"pid-{rank}").read_text()) for rank in range(3)]
    check_gone(done, float((tmp_path / "time").read_text()), pids)
    if fault == "kill":
        check_kill_is_named(done)
    else:
        (line,) = done.ours
        assert line.startswith("[rank 1/3 ")
        assert done.status == {"exit": 3, "interrupt": 130}.get(fault, 1)


@pytest.mark.parametrize("fault", ["raise", "none"])
def test_without_with_an_exception_still_ends_the_job(
    mpi: Mpi, fault: str, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(OWN_SCRIPT)
    done = mpirun(mpi, 2, str(script), fault, cwd=tmp_path, timeout_seconds=60)
    if fault == "none":
        assert done.status == 0, done.err
        assert done.out.count("all is well") == 2
    else:
        assert done.status == 1
        (line,) = done.ours
        assert line.startswith("[rank 1/2 ")


def run_faulty(
    mpi: Mpi, fault: str, step: int, tmp_path: Path, num_ranks: int = 3
) -> Done:
    return mpirun(
        mpi,
        num_ranks,
        *("-m", "mpitrain", "--name", "r", "--model", "custom:Net"),
        cwd=tmp_path,
        timeout_seconds=90,
        FAULT=fault,
        FAULT_STEP=str(step),
        FAULTY_RANK="1",
        FAULT_TIME=str(tmp_path / "time"),
    )


@pytest.mark.parametrize("np", [1, 2])
def test_what_fails_on_all_ranks_before_the_store_stands_is_told_once(
    openmpi: Mpi, np: int, tmp_path: Path
) -> None:
    words = ("-m", "mpitrain", "--name", "r")
    done = mpirun(openmpi, np, *words, cwd=tmp_path, OMP_NUM_THREADS="none")
    assert done.status == 2
    assert (done.out + done.err).count("OMP_NUM_THREADS='none' in the environment") == 1
    assert "Traceback" not in done.err


def test_a_run_folder_that_one_rank_cannot_write_ends_all(
    openmpi: Mpi, tmp_path: Path
) -> None:
    """Its log is a folder already, by the time that the run folder is made."""
    script = tmp_path / "script.py"
    script.write_text(
        "import sys; from mpitrain import cli\n"
        "from mpitrain.tools.train import prepare\n"
        "open_run = prepare.open_run\n"
        "def spoiled(*words, **more):\n"
        "    run = open_run(*words, **more)\n"
        "    (run.path / 'logs/rank-1.log').mkdir()\n"
        "    return run\n"
        "prepare.open_run = spoiled\n"
        "sys.exit(cli.main(sys.argv[1:]))\n"
    )
    done = mpirun(openmpi, 2, str(script), "--name", "r", cwd=tmp_path)
    assert done.status == 1
    (line,) = done.ours
    assert line.startswith("[rank 1/2 ")
    assert "IsADirectoryError" in line


def test_alone_a_failure_is_told_once(openmpi: Mpi, tmp_path: Path) -> None:
    done = mpirun(
        openmpi,
        1,
        *("-m", "mpitrain", "--name", "r", "--model", "custom:Net"),
        cwd=tmp_path,
        FAULT="raise",
        FAULT_STEP="1",
        FAULTY_RANK="0",
        FAULT_TIME=str(tmp_path / "time"),
    )
    assert done.status == 1
    (line,) = done.ours
    assert (
        line == f"[rank 0/1 {socket.gethostname()}] ArithmeticError: this is the fault"
    )
    log = (tmp_path / "runs/r/logs/rank-0.log").read_text()
    for text in (log, done.err):
        assert text.count("Traceback (most recent call last)") == 1
    result = json.loads((tmp_path / "runs/r/result.json").read_text())
    assert result["status"] == "failed"
    assert result["world_size"] == 1


@pytest.mark.parametrize(
    ("error", "status"),
    [
        ("mpitrain.Stopped", 75),
        slow("mpitrain.UsageError", 2),
        slow("ArithmeticError", 1),
    ],
)
@pytest.mark.parametrize("way", ["with mpitrain.init(): ", "mpitrain.init(); "])
def test_alone_a_script_ends_with_the_status_of_its_error(
    way: str, error: str, status: int, tmp_path: Path
) -> None:
    code = f"import mpitrain\n{way}raise {error}('this is the fault')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == status
    assert "this is the fault" in done.stderr


def test_the_error_of_the_training_is_the_last_line_of_a_job_script(
    openmpi: Mpi, tmp_path: Path
) -> None:
    """Below the message of mpirun; an error of an earlier job is not told again."""
    (tmp_path / "faulty.py").write_text(
        "def model(num_classes):\n    raise ArithmeticError('this is the fault')\n"
    )

    words = ("-m", "mpitrain", "--name", "r", "--device", "cpu")
    words += ("--model", "faulty:model")
    done = supervise(openmpi, tmp_path, [], *words, num_ranks=2)
    lines = done.err.splitlines()
    assert done.status == 1
    assert lines[-1].startswith("failed: [rank ")
    assert lines[-1].endswith("ArithmeticError: this is the fault")
    assert any("prterun" in line for line in lines[:-1]), lines
    wrong = replace(openmpi, flags=(*openmpi.flags, "--no-such-option"))
    done = supervise(wrong, tmp_path, [], *words, num_ranks=2)
    assert done.status not in (0, 75)
    assert "this is the fault" not in done.err
