"""What differs for a script under `run` from a plain start, and is said or mended."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from launcher import Mpi, environment, mpirun
from run_scripts import check_all_done, run, write

EXECUTE = """
import os, sys
import torch.distributed as dist
dist.init_process_group()
if "AGAIN" not in os.environ:
    os.environ["AGAIN"] = "1"
    {call}
"""


@pytest.mark.parametrize(
    "call",
    [
        "os.execv(sys.executable, [sys.executable, *sys.argv])",
        "os.execlp('python', 'python', *sys.argv)",
        "os.execve(path=sys.executable, argv=sys.argv, env={})",
    ],
    ids=["execv", "execlp", "execve"],
)
def test_a_script_that_executes_itself_is_refused_by_name(
    openmpi: Mpi, call: str, tmp_path: Path
) -> None:
    script = write(tmp_path, EXECUTE.format(call=call))
    done = run(openmpi, 2, script, cwd=tmp_path)
    assert done.status == 1
    assert len(done.ours) == 1
    assert "run --no-python python script.py" in done.ours[0]


def test_a_script_may_execute_a_program_in_a_child_and_alone(
    openmpi: Mpi, tmp_path: Path
) -> None:
    child = "if os.fork() == 0: os.execlp('true', 'true')\n    os.wait()"
    end = "print('done', f'{dist.get_rank()}/{dist.get_world_size()}')"
    script = write(tmp_path, EXECUTE.format(call=child) + end)
    check_all_done(run(openmpi, 2, script, cwd=tmp_path), 2)
    named = "path='/bin/echo', argv=['echo', 'done 0/1'], env=os.environ"
    write(tmp_path, f"import os; os.execve({named})")
    command = [sys.executable, "-m", "mpitrain", "run", "script.py"]
    words = {"cwd": tmp_path, "env": environment(openmpi), "capture_output": True}
    alone = subprocess.run(command, **words, text=True, timeout=150)  # type: ignore[call-overload]
    assert alone.stdout == "done 0/1\n", alone.stderr


def test_the_communicator_of_all_ranks_can_be_pickled(
    openmpi: Mpi, tmp_path: Path
) -> None:
    body = """
import pickle
from mpi4py import MPI
comm = pickle.loads(pickle.dumps({"comm": MPI.COMM_WORLD}))["comm"]
assert comm is MPI.COMM_WORLD
print("done", f"{comm.rank}/{comm.size}")
"""
    check_all_done(run(openmpi, 2, write(tmp_path, body), cwd=tmp_path), 2)


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ("print('result')", 120),  # as with Python itself
        ("import atexit; atexit.register(lambda: print('result'))", 120),
        ("print('result')\nraise SystemExit(3)", 3),
    ],
)
def test_a_lost_end_of_stdout_and_a_failure_alone_are_no_success(
    openmpi: Mpi, body: str, status: int, tmp_path: Path
) -> None:
    write(tmp_path, body)
    told = tmp_path / "status"
    buffered = {"PYTHONUNBUFFERED": "", "MPITRAIN_STATUS_FILE": str(told)}
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "mpitrain", "run", "script.py"],
            cwd=tmp_path,
            env=environment(openmpi, **buffered),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            timeout=150,
        )
    assert (done.returncode, told.read_text()) == (status, f"{status}\n"), done.stderr
    words = "could not be written: No space left on device"
    assert done.stderr.count(words) == (status == 120)


def test_a_script_may_put_its_own_object_in_place_of_stdout(
    openmpi: Mpi, tmp_path: Path
) -> None:
    body = """
import sys
class Tee:
    def write(self, text): sys.__stdout__.write(text)
    def flush(self): sys.__stdout__.flush()
sys.stdout = Tee()
print("done", f"{dist.get_rank()}/{dist.get_world_size()}")
"""
    script = write(tmp_path, EXECUTE.format(call="") + body)
    check_all_done(run(openmpi, 2, script, cwd=tmp_path), 2)


BELOW = """
import subprocess, sys
import mpitrain
code = "from mpi4py import MPI; print('alone:', MPI.COMM_WORLD.size)"
with mpitrain.init() as world:
    subprocess.run([sys.executable, "-c", code], check=True, timeout=150)
    print("done", f"{world.rank}/{world.world_size}")
"""


def test_a_rank_of_prterun_is_a_rank_and_its_child_is_none(
    openmpi: Mpi, tmp_path: Path
) -> None:
    """It has PMIX_RANK alone; the child of rank 0 waited in MPI_Init for ever."""
    prterun = openmpi.mpirun.with_name("prterun")
    if not prterun.exists():
        pytest.skip("this MPI has no prterun")
    write(tmp_path, BELOW)
    flags = ("--allow-run-as-root", "--map-by", ":OVERSUBSCRIBE")
    launcher = replace(openmpi, mpirun=prterun, flags=flags)
    done = mpirun(launcher, 2, "script.py", cwd=tmp_path)
    assert done.status == 0, done.out + done.err
    assert done.out.count("alone: 1") == 2
    assert done.out.count("done ") == 2
