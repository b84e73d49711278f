"""Data that is broken, missing or not the same for all: one clear error, in time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from data_files import write_spoilt
from launcher import (
    Done,
    Mpi,
    children_of,
    environment,
    mpirun,
    rows,
    send_signal,
    survivors,
)

pytestmark = pytest.mark.usefixtures("warm_starts")

TRAIN = ("-m", "mpitrain", "--name", "r", "--image-size", "16")
NO_INTERNET = {f"{kind}_proxy": "http://127.0.0.1:9" for kind in ("http", "https")}
GONE_SECONDS = 15.0


def train(mpi: Mpi, folder: Path, *flags: str, num_ranks: int = 3) -> Done:
    return mpirun(
        mpi, num_ranks, *TRAIN, *flags, cwd=folder, timeout_seconds=120, **NO_INTERNET
    )


def assert_failed(done: Done, folder: Path, *words: str) -> str:
    """Check that a job failed, said why once, and wrote it down; return the words."""
    said = done.out + done.err
    assert done.status in (1, 2), said
    assert "finished:" not in said
    result = json.loads((folder / "runs/r/result.json").read_text())
    assert result["status"] == "failed"
    for word in words:
        assert said.count(word) == 1, said
        assert word in result["error"]
    return said


# --- one sample that cannot be read ---------------------------------------------------


def test_a_bad_sample_ends_the_job_and_is_named(openmpi: Mpi, tmp_path: Path) -> None:
    write_spoilt(tmp_path)
    flags = ("--data", "shards", "--data-dir", "shards", "--num-workers", "2")
    done = train(openmpi, tmp_path, *flags, "--hang-timeout", "60")
    words = ("shards/train/0.tar, sample 1", "--on-bad-sample skip")
    said = assert_failed(done, tmp_path, *words)
    assert "Traceback" not in said
    (line,) = done.ours
    assert "] BadSample: " in line


SKIP = ("--on-bad-sample", "skip", "--precision", "fp64", "--epochs", "2", "--lr")
SKIP += ("0.05", "--num-workers", "0")


@pytest.mark.slow
def test_what_an_evaluation_leaves_out_that_is_stopped_counts_once(
    openmpi: Mpi, tmp_path: Path
) -> None:
    words = ("--data", "custom_data:stopping", *SKIP, "--micro-batch-size", "2")
    for status in (75, 0):
        done = train(openmpi, tmp_path, *words, num_ranks=1)
        assert done.status == status, done.err
    found = rows(tmp_path / "runs/r", "epoch")
    assert [(row["val_samples"], row["skipped_samples"]) for row in found] == [
        (199, 1)
    ] * 2


# --- custom data sets -----------------------------------------------------------------


def test_an_error_in_a_custom_set_ends_the_job(openmpi: Mpi, tmp_path: Path) -> None:
    flags = ("--data", "custom_data:faulty", "--num-workers", "2")
    done = train(openmpi, tmp_path, *flags, "--hang-timeout", "60")
    said = assert_failed(done, tmp_path)
    assert "custom_data.py" in said  # where it was raised
    (line,) = done.ours
    assert "ArithmeticError: " in line
    assert "this is the fault" in said


# --- processes that are killed --------------------------------------------------------


@pytest.mark.parametrize("victim", ["rank", "worker"])
def test_a_killed_process_ends_the_job_and_leaves_no_worker(
    openmpi: Mpi, tmp_path: Path, victim: str
) -> None:
    out = tmp_path / "out"
    with out.open("w") as file:
        job = subprocess.Popen(
            [
                *(str(openmpi.mpirun), "-np", "3", *openmpi.flags, sys.executable),
                *(*TRAIN, "--data", "custom_data:slow", "--num-workers", "2"),
            ],
            cwd=tmp_path,
            env=environment(openmpi, NOTES=str(tmp_path), MPITRAIN_FORK_SERVER="none"),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    everybody: list[int] = []
    try:
        wait_until(lambda: len(list(tmp_path.glob("worker-*"))) == 6, 120, out)
        notes = [path.name.split("-") for path in tmp_path.glob("worker-*")]
        workers = {(int(rank), int(number)): int(pid) for _, rank, number, pid in notes}
        logs = (tmp_path / f"runs/r/logs/rank-{rank}.log" for rank in range(3))
        ranks = [int(log.read_text().split()[1]) for log in logs]
        everybody = sorted({*ranks, *(pid for rank in ranks for pid in tree(rank))})
        assert set(workers.values()) < set(everybody)
        time.sleep(1)
        os.kill(ranks[1] if victim == "rank" else workers[1, 0], signal.SIGKILL)
        struck = time.monotonic()
        wait_until(lambda: job.poll() is not None and not survivors(everybody), 60, out)
        took = time.monotonic() - struck
    finally:
        job.kill()
        job.wait()
        send_signal(survivors(everybody))
    said = out.read_text()
    assert took < GONE_SECONDS, said
    assert job.returncode != 0
    (line,) = [line for line in said.splitlines() if line.startswith("[rank ")]
    assert line.startswith("[rank 1/3 "), said
    of_rank, of_worker = "died without an error message", "DataLoader worker (pid"
    assert (of_rank if victim == "rank" else of_worker) in line


def tree(pid: int) -> list[int]:
    """All processes below one."""
    below = children_of(pid)
    return below + [other for child in below for other in tree(child)]


def wait_until(condition: Callable[[], bool], seconds: float, out: Path) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, out.read_text()
        time.sleep(0.05)
