"""Anybody's program, that is no Python: `run --no-python`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launcher import Mpi, environment, slow, wait_until_gone
from run_scripts import check_all_done, run, write

OTHER_PROGRAM = """
from torch.distributed import rendezvous

store, rank, world_size = next(rendezvous("env://"))
store.set(str(rank), "here")
store.wait([str(other) for other in range(world_size)])
print(f"done {rank}/{world_size}", flush=True)
"""


def test_a_program_finds_the_environment_and_the_store(
    openmpi: Mpi, tmp_path: Path
) -> None:
    """No process group: gloo can abort a process that ends by itself (torch 2.15)."""
    (tmp_path / "program.py").write_text(OTHER_PROGRAM)
    done = run(openmpi, 2, "--no-python", sys.executable, "program.py", cwd=tmp_path)
    check_all_done(done, 2)


PROGRAM = """
echo $$ >> pids
sleep 300 & echo $! >> pids
while [ $(wc -l < pids) -lt 4 ]; do sleep 0.1; done
"""


@pytest.mark.parametrize(
    ("end", "status", "said"),
    [
        ("exit 3", 3, "ended with status 3"),
        slow("kill -KILL $$", 137, "was killed by SIGKILL"),  # unit/test_target.py
    ],
)
def test_a_program_that_fails_ends_the_job_and_all_it_started(
    mpi: Mpi, end: str, status: int, said: str, tmp_path: Path
) -> None:
    body = f"{PROGRAM}[ $RANK = 1 ] && {{ sleep 1; {end}; }}\nsleep 300\n"
    (tmp_path / "program.sh").write_text(body)
    done = run(mpi, 2, "--no-python", "sh", "program.sh", cwd=tmp_path)
    assert done.status == status
    (line,) = done.ours
    assert line.startswith("[rank 1/2 ")
    assert line.endswith(f"sh {said}")
    wait_until_gone([int(pid) for pid in (tmp_path / "pids").read_text().split()])


def test_a_program_ends_with_its_rank(openmpi: Mpi, tmp_path: Path) -> None:
    body = f"{PROGRAM}[ $RANK = 1 ] && kill -KILL $PPID\nsleep 300\n"
    (tmp_path / "program.sh").write_text(body)
    done = run(openmpi, 2, "--no-python", "sh", "program.sh", cwd=tmp_path)
    assert done.status != 0
    wait_until_gone([int(pid) for pid in (tmp_path / "pids").read_text().split()])


@pytest.mark.parametrize(
    "number", [slow(signal.SIGUSR1), signal.SIGUSR2, slow(signal.SIGTERM)]
)
def test_a_signal_reaches_the_program_once(
    openmpi: Mpi, number: signal.Signals, tmp_path: Path
) -> None:
    body = f"""
import os, signal, time
from pathlib import Path
got = []
signal.signal({number}, lambda *_: got.append(1))
here = Path("here-" + os.environ["RANK"])
here.write_text(str(os.getppid()))
while not got:
    time.sleep(0.1)
time.sleep(0.5)
assert len(got) == 1
Path("got-" + os.environ["RANK"]).touch()
"""
    script = write(tmp_path, body)
    started = subprocess.Popen(
        [
            *(str(openmpi.mpirun), "-np", "2", *openmpi.flags, sys.executable),
            *("-m", "mpitrain", "run", "--no-python", sys.executable, script),
        ],
        cwd=tmp_path,
        env=environment(openmpi),
    )
    try:
        files = [tmp_path / f"here-{rank}" for rank in range(2)]
        end = time.monotonic() + 60
        while not all(f.exists() and f.read_text() for f in files):
            assert time.monotonic() < end
            time.sleep(0.1)
        if number == signal.SIGTERM:  # mpirun would kill the ranks soon after
            for file in files:
                os.kill(int(file.read_text()), number)
        else:
            started.send_signal(number)
        assert started.wait(60) == 0
    finally:
        started.kill()
        started.wait()
    assert (tmp_path / "got-0").exists()
    assert (tmp_path / "got-1").exists()


def test_a_program_runs_without_mpirun(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mpitrain", "run", "--no-python", "/bin/true"],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
