"""Faults at random moments: the job is gone in time, every time.

A few tries here; `make soak` makes a hundred. The seed is printed; SOAK_SEED=n repeats.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launcher import (
    MPIS,
    Mpi,
    children_of,
    environment,
    find,
    send_signal,
    slow,
    survivors,
)

TRIES = int(os.environ.get("SOAK_TRIES", "4"))
SEED = int(os.environ.get("SOAK_SEED", str(random.SystemRandom().randrange(10**6))))
GONE_SECONDS = 10.0
NUM_RANKS = 3

SCRIPT = """
import os, signal, sys, time
from pathlib import Path
rank = int(os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("PMI_RANK", "0")))

class Fault(BaseException):
    pass  # libraries that are being imported swallow an Exception now and then

def strike(number, frame):
    raise Fault("this is the fault")

signal.signal(signal.SIGUSR2, strike)
Path(f"pid-{rank}").write_text(str(os.getpid()))
from mpitrain.launch.job import start_job
import mpitrain

job = start_job()
with job.guard:
    Path(f"stands-{rank}").touch()
    with mpitrain.init(device="cpu", job=job) as world:
        import torch, torch.distributed as dist
        Path(f"ready-{rank}").touch()
        for _ in range(6000):
            dist.all_reduce(torch.ones(1000))
            time.sleep(0.01)
"""


@pytest.mark.parametrize("number", [0, *map(slow, range(1, TRIES))])
def test_a_fault_at_a_random_moment_ends_the_job(number: int, tmp_path: Path) -> None:
    chance = random.Random(f"{SEED}/{number}")
    mpi = find(MPIS[number % len(MPIS)])
    fault = chance.choice([signal.SIGKILL, signal.SIGUSR2, signal.SIGSEGV])
    rank = chance.randrange(NUM_RANKS)
    moment = chance.uniform(0.0, 6.0)
    told = f"SOAK_SEED={SEED}, try {number}: {mpi.name}, {fault.name} to rank {rank} "
    told += f"{moment:.2f} s after it started"
    print(told)
    job, out = start(mpi, tmp_path)
    pids = [wait_for_pid(tmp_path / f"pid-{r}", told) for r in range(NUM_RANKS)]
    time.sleep(moment)
    stood = (tmp_path / f"stands-{rank}").exists()
    beside = [pid for rank in pids for pid in children_of(rank)]
    os.kill(pids[rank], fault)
    struck = time.monotonic()
    try:
        while job.poll() is None or survivors(pids + beside):
            assert time.monotonic() - struck < GONE_SECONDS, (
                told + "\n" + out.read_text()
            )
            time.sleep(0.05)
    finally:
        job.kill()
        job.wait()
        send_signal(survivors(pids + beside))
    said = out.read_text()
    assert job.returncode != 0, told + "\n" + said
    ours = [line for line in said.splitlines() if line.startswith("[rank ")]
    assert len(ours) <= 1, told + "\n" + said
    if stood:
        assert len(ours) == 1, told + "\n" + said
        assert ours[0].startswith(f"[rank {rank}/{NUM_RANKS} "), told + "\n" + said


def start(mpi: Mpi, folder: Path) -> tuple[subprocess.Popen[bytes], Path]:
    (folder / "script.py").write_text(SCRIPT)
    out = folder / "out"
    with out.open("w") as file:
        job = subprocess.Popen(
            [
                *(str(mpi.mpirun), "-np", str(NUM_RANKS), *mpi.flags),
                *(sys.executable, "script.py"),
            ],
            cwd=folder,
            env=environment(mpi),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    return job, out


def wait_for_pid(file: Path, told: str) -> int:
    end = time.monotonic() + 60
    while not (file.exists() and file.read_text()):
        assert time.monotonic() < end, f"{told}: {file} did not come"
        time.sleep(0.01)
    return int(file.read_text())
