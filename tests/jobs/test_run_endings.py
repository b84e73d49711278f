"""Anybody's script: how it ends."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from launcher import (
    ON_ONE_CORE,
    Mpi,
    children_of,
    environment,
    send_signal,
    session_of,
    slow,
    wait_until_gone,
)
from run_scripts import check_all_done, run, write

FAULTY = """
import os, signal, sys, time
from pathlib import Path
import torch, torch.distributed as dist

def strike():
    Path(f"time").write_text(str(time.time()))
    match sys.argv[1]:
        case "raise": raise ArithmeticError("this is the fault")
        case "exit": sys.exit(3)
        case "exit-hard": os._exit(5)
        case "interrupt":
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(1)
        case "abort":
            from mpi4py import MPI
            MPI.COMM_WORLD.Abort(7)
        case "kill": os.kill(os.getpid(), signal.SIGKILL)

rank = os.environ["RANK"]
Path(f"pid-{rank}").write_text(str(os.getpid()))
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
if rank == "1":
    strike()
dist.all_reduce(torch.ones(1))
"""


@pytest.mark.parametrize(
    ("mpi", "fault", "status", "words"),
    [
        ("openmpi-5", "raise", 1, "ArithmeticError: this is the fault"),
        slow("mpich", "exit", 3, "sys.exit(3)"),
        ("openmpi-4.1", "interrupt", 130, "interrupted by Ctrl-C (SIGINT)"),
        ("openmpi-5", "exit-hard", None, "os._exit); it was at: in the script"),
        slow("mpich", "exit-hard", None, "os._exit); it was at: in the script"),
        slow("openmpi-4.1", "kill", None, "in the script"),
        ("openmpi-5", "abort", 7, None),  # MPI says it
    ],
    indirect=["mpi"],
)
def test_every_way_out_of_a_script_ends_the_job(
    mpi: Mpi, fault: str, status: int | None, words: str | None, tmp_path: Path
) -> None:
    done = run(mpi, 2, write(tmp_path, FAULTY), fault, cwd=tmp_path)
    assert done.ended - float((tmp_path / "time").read_text()) < 10
    pids = [int((tmp_path / f"pid-{rank}").read_text()) for rank in range(2)]
    wait_until_gone(pids)
    assert done.status == status if status is not None else done.status != 0
    if words is None:
        assert not done.ours
        return
    (line,) = done.ours
    assert line.startswith("[rank 1/2 ")
    assert words in line


@pytest.mark.parametrize("num_ranks", [slow(1), 2])
def test_the_traceback_begins_with_the_script(
    openmpi: Mpi, num_ranks: int, tmp_path: Path
) -> None:
    body = """
import os
def inner():
    raise ArithmeticError("this is the fault")
if os.environ["RANK"] == str(int(os.environ["WORLD_SIZE"]) - 1):
    inner()
"""
    done = run(openmpi, num_ranks, write(tmp_path, body), cwd=tmp_path)
    assert done.status == 1
    frames = re.findall(r'File "(.*)", line \d+, in (.*)', done.err)
    script = str(tmp_path / "script.py")
    assert frames == [(script, "<module>"), (script, "inner")]
    assert len(done.ours) == 1


def test_a_rank_that_is_done_waits_asleep_for_the_others(
    openmpi: Mpi, tmp_path: Path
) -> None:
    body = """
import os, sys, time
rank = int(os.environ["RANK"])
if rank > 0:
    open(f"pid-{rank}", "w").write(f"{os.getpid()}")
    sys.exit(0)
time.sleep(4)
for other in (1, 2):
    pid = open(f"pid-{other}").read()
    ticks = lambda: sum(map(int, open(f"/proc/{pid}/stat").read().split()[13:15]))
    before = ticks()
    time.sleep(1)
    assert ticks() - before < 40, "it spins"
print("rank zero is through", flush=True)
"""
    done = run(openmpi, 3, write(tmp_path, body), cwd=tmp_path)
    assert done.status == 0, done.err
    assert "rank zero is through" in done.out


def test_a_rank_that_leaves_by_os_exit_with_0_waits_for_the_others(
    mpi: Mpi, tmp_path: Path
) -> None:
    body = """
import atexit, os, time
rank = int(os.environ["RANK"])
atexit.register(print, "atexit", rank)
if rank != 1:
    time.sleep(3)
print(f"done {rank}/3", flush=True)
if rank != 2:
    os._exit(0)
"""
    done = run(mpi, 3, write(tmp_path, body), cwd=tmp_path)
    check_all_done(done, 3)
    assert re.findall(r"atexit (\d)", done.out) == ["2"], "os._exit skips it"
    assert not done.ours


@pytest.mark.parametrize("backend", [slow("gloo"), "mpi4py"])
def test_a_rank_that_returns_while_others_wait_for_it_is_named(
    openmpi: Mpi, backend: str, tmp_path: Path
) -> None:
    body = """
import os, sys, time
import torch, torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group(sys.argv[1])
rank = dist.get_rank()
some = dist.new_group([0, 2])
model = DistributedDataParallel(torch.nn.Linear(2, 2))
model(torch.ones(2)).sum().backward()
if rank == 1:
    dist.destroy_process_group()  # the model still has it
    sys.exit(0)
time.sleep(8 if rank == 0 else 0)  # nobody waits for rank 1 yet
dist.all_reduce(torch.ones(1), group=some)
open("time", "w").write(str(time.time()))
dist.all_reduce(torch.ones(1))
"""
    done = run(openmpi, 3, write(tmp_path, body), backend, cwd=tmp_path)
    assert done.status == 1, done.out + done.err
    assert done.ended - float((tmp_path / "time").read_text()) < 15
    assert re.search(r"\[rank [02]/3 .*", done.err)
    assert "rank 1 has returned with status 0, and others wait" in done.err
    assert re.search(r"rank 0, rank 2: .*script.py:16 in <module>", done.err)


MONITORED = """
import time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
group = dist.new_group()
dist.monitored_barrier(group=group)
if dist.get_rank() == 0:
    time.sleep(9)
print(f"done {dist.get_rank()}/{dist.get_world_size()}", flush=True)
"""

SEPARATE = """
import os, time
import torch, torch.distributed as dist
rank = int(os.environ["RANK"])
dist.init_process_group("gloo")
dist.barrier()
dist.destroy_process_group()
fold, mine = divmod(rank, 2)
file = f"file://{os.getcwd()}/fold-{fold}"
dist.init_process_group("gloo", init_method=file, rank=mine, world_size=2)
for _ in range(1 if fold else 9):
    dist.all_reduce(torch.ones(1))
if fold == 0:
    time.sleep(9)
dist.barrier()
dist.destroy_process_group()
if rank == 0:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    for _ in range(19):
        dist.all_reduce(torch.ones(1))
    time.sleep(9)
print(f"done {rank}/4", flush=True)
"""


@pytest.mark.parametrize(
    ("body", "num_ranks"),
    [(MONITORED, 2), slow(SEPARATE, 4)],
    ids=["monitored", "separate"],
)
def test_a_rank_that_waits_for_nobody_is_not_ended(
    openmpi: Mpi, body: str, num_ranks: int, tmp_path: Path
) -> None:
    """Nor one in a world of some ranks, or alone: torch gives all groups one name."""
    done = run(openmpi, num_ranks, write(tmp_path, body), cwd=tmp_path)
    check_all_done(done, num_ranks)


@pytest.mark.parametrize(
    ("flags", "status"), [slow((), 0), slow(("--hang-timeout", "4"), 76)]
)
def test_a_hang_is_named_when_asked_for(
    openmpi: Mpi, flags: tuple, status: int, tmp_path: Path
) -> None:
    """In CI one rank alone is asked: see test_hangs.py."""
    body = """
import os, time
import torch
weight = torch.nn.Parameter(torch.ones(1))
optimizer = torch.optim.SGD([weight])
for step in range(2):
    weight.square().sum().backward()
    optimizer.step()
time.sleep(20)
"""
    done = run(openmpi, 2, *flags, write(tmp_path, body), cwd=tmp_path)
    assert done.status == status, done.err


def test_threads_and_atexit_functions_may_still_communicate(
    openmpi: Mpi, tmp_path: Path
) -> None:
    body = """
import atexit, threading, time
import torch, torch.distributed as dist
dist.init_process_group("gloo")
@atexit.register
def end():
    dist.all_reduce(torch.ones(1))
    print(f"done {dist.get_rank()}/{dist.get_world_size()}", flush=True)
    dist.destroy_process_group()
def late():
    time.sleep(1)
    dist.all_reduce(torch.ones(1))
threading.Thread(target=late).start()
"""
    check_all_done(run(openmpi, 2, write(tmp_path, body), cwd=tmp_path), 2)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("wrong.py",), "'wrong.py' is no Python"),
        slow(("-m", "nothing.tool"), "-m nothing.tool: there is no such module"),
    ],
)
def test_what_cannot_run_is_told_once(
    openmpi: Mpi, words: tuple, said: str, tmp_path: Path
) -> None:
    """Before the start, and after the imports; tests/unit has the other messages."""
    (tmp_path / "wrong.py").write_text("x = = 1\n")
    done = run(openmpi, 2, *words, cwd=tmp_path)
    assert done.status == 2
    assert (done.out + done.err).count(said) == 1
    assert "Traceback" not in done.err


SAVES_AT_TERM = """
import os, signal, sys, time
from pathlib import Path
import torch, torch.distributed as dist

came = []
signal.signal(signal.SIGTERM, lambda *_: came.append(1))
dist.init_process_group("gloo")
rank = dist.get_rank()
print("ready", flush=True)
while True:
    time.sleep(0.1)
    stop = torch.tensor([float(bool(came))])
    dist.all_reduce(stop)
    if stop.item():
        break
time.sleep(3)  # mpirun alone would kill the ranks by now
Path(f"saved-{rank}").write_text(str(len(came)))
sys.exit(75)
"""


@pytest.mark.parametrize(
    ("who", "where"),
    [
        ("all processes", ()),
        # A fork of one import for both is the rank; in CI test_term.py signals a fork.
        slow("all processes", ON_ONE_CORE),
        ("the script alone", ()),
    ],
)
def test_a_script_in_a_job_script_gets_term_once_and_time_to_save(
    who: str, where: tuple[str, ...], openmpi: Mpi, tmp_path: Path
) -> None:
    """Schedulers send it to all of a node; PBS not to the ranks of other nodes."""
    script = write(tmp_path, SAVES_AT_TERM)
    (tmp_path / ".venv").symlink_to(sys.prefix)
    words = ("--nodes", "1", "--slots-per-node", "2", "--gpus-per-node", "0")
    words += ("--launcher-flag=--oversubscribe",)
    job = subprocess.run(
        [
            sys.executable,
            "-m",
            "mpitrain",
            "jobscript",
            "slurm",
            *words,
            "--",
            "run",
            script,
        ],
        check=True,
        capture_output=True,
        cwd=tmp_path,
    )
    (tmp_path / "job.sh").write_bytes(job.stdout)
    with subprocess.Popen(
        ["timeout", "-k", "5", "120", *where, "bash", "job.sh"],
        cwd=tmp_path,
        env=environment(openmpi, SLURM_SUBMIT_DIR=str(tmp_path)),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as started:
        assert started.stdout is not None
        ready = (line for line in started.stdout if "ready" in line)
        assert next(ready, None), "the script did not start"
        (supervisor,) = children_of(started.pid)
        others = [pid for pid in session_of(started.pid) if pid != started.pid]
        told = others if who == "all processes" else [supervisor]
        send_signal(told, signal.SIGTERM)
        output = started.stdout.read()
    assert started.returncode == 75, output
    saved = [(tmp_path / f"saved-{rank}").read_text() for rank in (0, 1)]
    assert saved == ["1", "1"]


@pytest.mark.parametrize(
    ("ending", "expected"),
    [
        ("if rank: time.sleep(1); raise ArithmeticError('late')", ""),
        ("raise mpitrain.Stopped('enough')", "75\n"),
        slow("", "0\n"),
    ],
)
def test_a_job_script_is_told_the_status_of_all_ranks(
    ending: str, expected: str, openmpi: Mpi, tmp_path: Path
) -> None:
    """Launchers that have a status of their own are asked no more than this file."""
    body = f"import os, time, mpitrain\nrank = int(os.environ['RANK'])\n{ending}\n"
    file = tmp_path / "status"
    script = write(tmp_path, body)
    done = run(openmpi, 2, script, cwd=tmp_path, MPITRAIN_STATUS_FILE=str(file))
    assert (done.status == 0) == (expected == "0\n"), done.err
    assert (file.read_text() if file.exists() else "") == expected
