"""`watch` shows a running job's view in another shell, from its files alone."""

from __future__ import annotations

import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from launcher import Mpi, environment, rows, send_signal
from resume_jobs import Job, Runs

from mpitrain.record.runs import is_held

pytestmark = pytest.mark.usefixtures("warm_starts")

FLAGS = ("--model", "slow_loop:SlowModel", "--device", "cpu", "--epochs", "6")
FLAGS += ("--lr", "0.01")
"""23 steps an epoch."""


@pytest.fixture
def runs(openmpi: Mpi, tmp_path: Path) -> Runs:
    return Runs(mpi=openmpi, folder=tmp_path, flags=FLAGS, variables={"PACE": "0.05"})


def watch(run_dir: Path, *flags: str) -> subprocess.Popen[str]:
    """Begin to watch."""
    return subprocess.Popen(
        [sys.executable, "-m", "mpitrain", "watch", str(run_dir), *flags],
        env=environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def end_of(watching: subprocess.Popen[str], seconds: float = 60) -> list[str]:
    """What it has said when it ends by itself, with 0."""
    try:
        out, _ = watching.communicate(timeout=seconds)
    finally:
        watching.kill()
    assert watching.returncode == 0, out
    return out.splitlines()


def epochs_of(lines: list[str]) -> list[str]:
    return [
        line
        for line in lines
        if re.match(r"epoch +\d+/\d+ \| step \d+ \| .*val_", line)
    ]


def has_epochs(job: Job, num: int) -> Any:
    return lambda: len(epochs_of(job.said().splitlines())) >= num


@pytest.mark.slow
def test_it_says_what_the_job_says(runs: Runs) -> None:
    job = runs.start("a", 2, PACE="0.1")
    job.wait_until(has_epochs(job, 2))
    watching = watch(job.run_dir)
    assert job.end() == 0
    lines = end_of(watching)
    assert re.fullmatch(r"run a, running, last line 0:0\d ago", lines[0])
    assert re.fullmatch(r"node 0: \S+, ranks 0-1 on cpu, \d+ cores?", lines[1])
    assert epochs_of(lines) == epochs_of(job.said().splitlines())
    assert lines[-1].startswith("finished: val_accuracy ")


@pytest.mark.slow
def test_it_says_once_how_a_run_stands(runs: Runs) -> None:
    job = runs.start("a", 2, PACE="0.1")
    job.wait_until(has_epochs(job, 1))
    lines = end_of(watch(job.run_dir, "--once"), 20)
    assert re.fullmatch(
        r"epoch \d/6, step \d+/138 \| train_loss .* \| done in .*", lines[-1]
    )
    assert job.end() == 0
    lines = end_of(watch(job.run_dir, "--once"), 20)
    assert lines[-1].startswith("finished: ")


def test_it_notices_a_job_that_was_killed(runs: Runs) -> None:
    job = runs.start("a", 2)
    job.wait_until(has_epochs(job, 1))
    watching = watch(job.run_dir)
    time.sleep(2)
    pids = [job.process.pid, *job.ranks()]
    send_signal(pids)
    lines = end_of(watching, 30)
    assert lines[-1].startswith("no job writes into it any more")
    assert end_of(watch(job.run_dir, "--once"), 20)[-1] == lines[-1]
    job.end()


@pytest.mark.slow
def test_a_job_that_is_about_to_begin_has_not_ended(runs: Runs) -> None:
    job = runs.start("a", 2, PACE="0.1")
    job.wait_until(has_epochs(job, 1))
    (job.run_dir / "stop").touch()
    assert job.end() == 75
    (job.run_dir / "stop").unlink()
    again = runs.start("a", 2, PACE="0.05")
    again.wait_until(lambda: is_held(again.run_dir))
    watching = watch(job.run_dir)
    assert again.end() == 0
    assert end_of(watching)[-1].startswith("finished: ")


@pytest.mark.slow
def test_the_time_limit_is_seen(runs: Runs) -> None:
    job = runs.start("a", 2, "--time-limit", "5:00", PACE="0.1")
    job.wait_until(has_epochs(job, 2))
    lines = end_of(watch(job.run_dir, "--once"), 20)
    assert "done in" in lines[-1]
    left = [row["seconds_left"] for row in rows(job.run_dir, "throughput")]
    assert 100 < left[-1] <= left[0] < 300
    assert job.end() == 0


@pytest.mark.slow
def test_it_stays_for_the_next_job_if_it_is_to(runs: Runs) -> None:
    job = runs.start("a", 2, PACE="0.1")
    job.wait_until(has_epochs(job, 1))
    short = watch(job.run_dir)
    long = watch(job.run_dir, "--keep")
    time.sleep(2)
    (job.run_dir / "stop").touch()
    assert job.end() == 75
    assert "a file named stop" in end_of(short, 30)[-1]
    (job.run_dir / "stop").unlink()
    again = runs.start("a", 3, PACE="0.01")
    assert again.end() == 0
    lines = end_of(long, 30)
    assert sum("a file named stop" in line for line in lines) == 1
    assert any(line.startswith("resumed from ") for line in lines)
    assert lines[-1].startswith("finished: ")
    epochs = [int(line.split("/")[0].split()[1]) for line in epochs_of(lines)]
    assert epochs == [1, 2, 3, 4, 5, 6]


def test_it_refuses_what_is_no_run(tmp_path: Path) -> None:
    watching = watch(tmp_path / "nowhere")
    out, _ = watching.communicate(timeout=20)
    assert watching.returncode == 2
    assert "nowhere is not a run folder; expected one with run.json in it" in out


@pytest.mark.slow
def test_a_slow_rank_and_a_slow_loader_are_named_once(runs: Runs) -> None:
    job = runs.start(
        *("a", 3, "--data", "slow_loop:slow_digits", "--epochs", "7"),
        *("--device", "cpu"),
        PACE="0.02",
        SLOW="0.08",
        SLOW_RANK="2",
        DRIP="0.002",
    )
    assert job.end(120) == 0
    said = job.said()
    late = re.findall(r"warning: \[rank 2/3 \S+\] is the last in (\d+) % of", said)
    assert late, said
    assert int(late[0]) > 60
    assert said.count("warning: data loading takes") == 1, said
    assert "--num-workers" in said
