"""Endings that go wrong themselves, and still end the job with its reason."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from launcher import Done, Mpi, environment, mpirun, slow, under_each_mpi

HEAD = """
import sys, time
import mpitrain
from mpitrain.launch.job import start_job
"""


def run(mpi: Mpi, body: str, tmp_path: Path, num_ranks: int = 2) -> Done:
    script = tmp_path / "script.py"
    script.write_text(HEAD + body)
    return mpirun(mpi, num_ranks, str(script), cwd=tmp_path, timeout_seconds=40)


def test_an_error_that_cannot_be_printed_ends_the_job(mpi: Mpi, tmp_path: Path) -> None:
    body = """
class Bad(Exception):
    def __str__(self): raise ValueError("no words")

job = start_job()
with job.guard:
    if job.comm.rank == 1:
        raise Bad
    job.comm.Barrier()
"""
    done = run(mpi, body, tmp_path)
    assert done.status == 1
    (line,) = done.ours
    assert line.startswith("[rank 1/2 ")
    assert "Bad" in line


@under_each_mpi
def test_a_dead_file_server_neither_silences_nor_holds_up_the_end(
    mpi: Mpi, tmp_path: Path
) -> None:
    # Each launcher ends such a rank in its way. By the store, ranks agree who reports.
    is_first = mpi.name == "openmpi-5"
    start = "mpitrain.init(job=job)" if is_first else "job.comm.rank or job.comm.recv()"
    body = f"""
job = start_job()
with job.guard:
    job.guard.on_failure.append(lambda text: time.sleep(1000))
    {start}
    raise ArithmeticError("all of us")
"""
    done = run(mpi, body, tmp_path)
    assert done.status == 1
    (line,) = done.ours
    assert line.endswith("ArithmeticError: all of us")


def test_a_child_that_dies_does_not_break_in_on_the_last_words(
    mpi: Mpi, tmp_path: Path
) -> None:
    """As torch has it, when a worker of DataLoader is killed."""
    body = """
import os, signal

def break_in(*_):
    raise RuntimeError("a worker is killed")

class Slow(Exception):
    def __str__(self):
        if os.fork() == 0:
            os._exit(1)
        time.sleep(0.5)
        return "this is the fault"

job = start_job()
with job.guard:
    job.guard.on_failure.append(lambda text: print("kept", file=sys.stderr, flush=True))
    with mpitrain.init(job=job) as world:
        import torch.distributed as dist
        if world.rank == 1:
            signal.signal(signal.SIGCHLD, break_in)
            raise Slow
        dist.barrier()
"""
    done = run(mpi, body, tmp_path)
    assert done.status == 1
    (line,) = done.ours
    assert line.endswith("Slow: this is the fault")
    assert "kept" in done.err
    assert "a worker is killed" not in done.err


def test_errors_without_a_store_are_told_once(mpi: Mpi, tmp_path: Path) -> None:
    body = """
job = start_job()
with job.guard:
    with mpitrain.init(job=job):
        pass
    raise ArithmeticError("after the end")
"""
    done = run(mpi, body, tmp_path)
    assert done.status == 1
    (line,) = done.ours
    assert line.startswith("[rank 0/2 ")


def test_close_in_a_finally_does_not_hide_the_error(mpi: Mpi, tmp_path: Path) -> None:
    body = """
job = mpitrain.init()
try:
    import torch.distributed as dist
    if job.world.rank == 1:
        raise ArithmeticError("this is the fault")
    dist.barrier()
finally:
    job.close()
"""
    done = run(mpi, body, tmp_path)
    assert done.status == 1
    (line,) = done.ours
    assert line.endswith("ArithmeticError: this is the fault")


def test_the_environment_is_as_before_when_the_job_is_over(
    openmpi: Mpi, tmp_path: Path
) -> None:
    body = """
import os
job = start_job()
with job.guard:
    before = dict(os.environ)
    with mpitrain.init(job=job):
        assert os.environ["WORLD_SIZE"] == "1"
    assert dict(os.environ) == before, set(os.environ.items()) ^ set(before.items())
print("all is well", flush=True)
"""
    done = run(openmpi, body, tmp_path, num_ranks=1)
    assert done.status == 0, done.err
    assert done.out.count("all is well") == 1


@pytest.mark.slow
def test_a_second_job_of_the_same_processes_is_watched_and_lives(
    openmpi: Mpi, tmp_path: Path
) -> None:
    body = """
for seconds in (0, 9):
    with mpitrain.init() as world:
        time.sleep(seconds)
print("all is well", flush=True)
"""
    done = run(openmpi, body, tmp_path)
    assert done.status == 0, done.err
    assert done.out.count("all is well") == 2


def test_who_is_alone_and_catches_an_error_goes_on(
    openmpi: Mpi, tmp_path: Path
) -> None:
    body = """
try:
    with mpitrain.init():
        raise ArithmeticError("caught")
except ArithmeticError:
    time.sleep(9)
print("all is well", flush=True)
"""
    done = run(openmpi, body, tmp_path, num_ranks=1)
    assert done.status == 0, done.err
    assert "all is well" in done.out


def test_who_becomes_another_program_is_not_dead(openmpi: Mpi, tmp_path: Path) -> None:
    body = """
import os
mpitrain.init(hang_timeout_seconds=30)
os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(8)"])
"""
    (tmp_path / "script.py").write_text(HEAD + body)
    done = subprocess.run(
        [sys.executable, "script.py"],
        cwd=tmp_path,
        env=environment(openmpi),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0
    assert "died without an error message" not in done.stderr


@pytest.mark.slow
def test_an_optimizer_may_step_after_the_job(openmpi: Mpi, tmp_path: Path) -> None:
    body = """
with mpitrain.init(hang_timeout_seconds=2):
    import torch
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    optimizer.step()
optimizer.step()
time.sleep(6)
print("all is well", flush=True)
"""
    done = run(openmpi, body, tmp_path)
    assert done.status == 0, done.err
    assert done.out.count("all is well") == 2


def test_a_forked_child_is_not_a_rank(mpi: Mpi, tmp_path: Path) -> None:
    body = """
import os
rank_itself = os.getpid()
with mpitrain.init() as world:
    child = os.fork()
    if child == 0:
        sys.exit(7)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
if os.getpid() == rank_itself:
    print("all is well", flush=True)
"""
    done = run(mpi, body, tmp_path)
    assert done.status == 0, done.err
    assert done.out.count("all is well") == 2


@pytest.mark.parametrize("rank", [slow(0), 1])
def test_a_rank_without_an_mpi_library_says_so(
    openmpi: Mpi, rank: int, tmp_path: Path
) -> None:
    body = f"""
import os
if os.environ["OMPI_COMM_WORLD_RANK"] == "{rank}":
    os.environ["MPI4PY_LIBMPI"] = "/nowhere/libmpi.so"
from mpitrain import cli
sys.argv = ["mpitrain", "--name", "r"]
cli.console()
"""
    done = run(openmpi, body, tmp_path)
    assert done.status != 0
    (line,) = done.ours
    assert line.startswith(f"[rank {rank}/2 ")
    assert "could not load an MPI library" in line


@under_each_mpi
def test_the_end_of_our_own_command_is_a_good_one_every_time(
    mpi: Mpi, tmp_path: Path
) -> None:
    """Without torch, so that ranks end at the same moment; 4 in 10 failed on MPICH."""
    body = """
import gc
from mpitrain.launch.process_exit import exit_now
job = start_job()
with job.guard:
    notes = open(f"notes-{job.comm.rank}", "w")
    notes.write("written")
    gc.freeze()  # as our own command does after its imports
    job.leave(30)
exit_now(0)
"""
    for _ in range(8 if mpi.name == "mpich" else 3):
        done = run(mpi, body, tmp_path, num_ranks=3)
        assert done.status == 0, done.out + done.err
        found = list(tmp_path.glob("notes-*"))
        assert len(found) > 1
        assert {path.read_text() for path in found} == {"written"}
        for path in found:
            path.unlink()
