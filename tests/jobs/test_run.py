"""Anybody's script: what it finds, what works in it, and how it ends."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launcher import Done, Mpi, environment, mpirun, survivors

SCRIPTS = Path(__file__).parent / "torchrun_scripts"

AGENTS_OWN = {"TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_SIGNALS_TO_HANDLE"}
"""What torchrun's agent tells itself and its workers; here is no agent."""

OURS = {
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
    "OMPI_MCA_btl",
    "TORCH_CPP_LOG_LEVEL",
}
"""What docs/run.md lists besides torchrun's."""


def run(mpi: Mpi, num_ranks: int, *words: str, cwd: Path, **variables: str) -> Done:
    """Run ``mpirun -np N python -m mpitrain run WORDS``."""
    words = ("-m", "mpitrain", "run", *words)
    return mpirun(mpi, num_ranks, *words, cwd=cwd, timeout_seconds=120, **variables)


def write(tmp_path: Path, body: str) -> str:
    (tmp_path / "script.py").write_text(body)
    return "script.py"


def check_all_done(done: Done, num_ranks: int) -> None:
    assert done.status == 0, done.out + done.err
    # Not whole lines: with PYTHONUNBUFFERED the ends of lines come apart.
    said = sorted(re.findall(r"done (\d)/(\d)", done.out))
    assert said == [(str(rank), str(num_ranks)) for rank in range(num_ranks)]
    assert "Traceback" not in done.err


# --- what works unchanged -----------------------------------------------------------


@pytest.mark.parametrize("num_ranks", [2, 3])
@pytest.mark.parametrize(
    ("name", "needs"),
    [
        ("ddp.py", "torch"),
        ("fsdp2.py", "torch"),
        ("with_accelerate.py", "accelerate"),
        ("with_lightning.py", "lightning"),
        ("with_transformers.py", "transformers"),
    ],
)
def test_a_script_written_for_torchrun_runs_unchanged(
    openmpi: Mpi, name: str, needs: str, num_ranks: int, tmp_path: Path
) -> None:
    pytest.importorskip(needs)
    done = run(openmpi, num_ranks, str(SCRIPTS / name), "out", cwd=tmp_path)
    check_all_done(done, num_ranks)


@pytest.mark.parametrize("method", ["spawn", "forkserver", "fork"])
def test_data_workers_find_the_classes_of_the_script(
    openmpi: Mpi, method: str, tmp_path: Path
) -> None:
    done = run(openmpi, 2, str(SCRIPTS / "loaders.py"), method, cwd=tmp_path)
    check_all_done(done, 2)


@pytest.mark.parametrize("words", [(), ("destroy",)], ids=["left", "destroyed"])
def test_a_process_group_left_or_destroyed_ends_well_every_time(
    mpi: Mpi, words: tuple, tmp_path: Path
) -> None:
    """Ten of ten were tried by hand, under each MPI."""
    for _ in range(3):
        done = run(mpi, 3, str(SCRIPTS / "ddp.py"), *words, cwd=tmp_path)
        check_all_done(done, 3)


def test_mpi4py_works_in_a_script(mpi: Mpi, tmp_path: Path) -> None:
    body = """
from mpi4py import MPI
comm = MPI.COMM_WORLD
assert comm.allreduce(1) == comm.size
print(f"done {comm.rank}/{comm.size}", flush=True)
"""
    check_all_done(run(mpi, 2, write(tmp_path, body), cwd=tmp_path), 2)


def test_init_in_a_script_takes_the_job_that_stands(
    openmpi: Mpi, tmp_path: Path
) -> None:
    body = """
import os
import mpitrain, torch, torch.distributed as dist
port, run_id = os.environ["MASTER_PORT"], os.environ["TORCHELASTIC_RUN_ID"]
with mpitrain.init() as world:
    assert str(world.master_port) == port
    dist.all_reduce(torch.ones(1))
assert not dist.is_initialized()
assert os.environ["MASTER_PORT"] == port, "what run has set stays"
with mpitrain.init() as world:  # a second one is a start of its own
    assert str(world.master_port) != port
    dist.all_reduce(torch.ones(1))
assert os.environ["TORCHELASTIC_RUN_ID"] == run_id
dist.init_process_group("gloo")  # and the store of run still stands
dist.all_reduce(torch.ones(1))
print(f"done {world.rank}/{world.world_size}", flush=True)
"""
    check_all_done(run(openmpi, 2, write(tmp_path, body), cwd=tmp_path), 2)


def test_init_that_asks_for_another_start_is_refused_once(
    openmpi: Mpi, tmp_path: Path
) -> None:
    body = "import mpitrain\nmpitrain.init(device='cpu')\n"
    script = write(tmp_path, body)
    done = run(openmpi, 2, script, cwd=tmp_path)
    assert done.status == 2
    assert done.err.count("python -m mpitrain run --device cpu") == 1
    done = run(openmpi, 2, "--device", "cpu", script, cwd=tmp_path)
    assert done.status == 0, done.err


# --- what it finds ------------------------------------------------------------------


def found(tmp_path: Path, num_ranks: int) -> list[dict]:
    files = [tmp_path / f"found-{rank}.json" for rank in range(num_ranks)]
    return [json.loads(file.read_text()) for file in files]


def test_the_environment_is_what_torchrun_sets(openmpi: Mpi, tmp_path: Path) -> None:
    script = str(SCRIPTS / "environment.py")
    for name in ("torchrun", "ours", "bare"):
        (tmp_path / name).mkdir()
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    subprocess.run(
        [sys.executable, *torchrun, script],
        cwd=tmp_path / "torchrun",
        env=environment(),
        check=True,
        capture_output=True,
    )
    mpirun(openmpi, 1, script, cwd=tmp_path / "bare", RANK="0")
    done = run(openmpi, 2, script, cwd=tmp_path / "ours")
    assert done.status == 0, done.err
    before = set(found(tmp_path / "bare", 1)[0]["variables"]) - {"RANK"}
    pairs = zip(
        found(tmp_path / "torchrun", 2), found(tmp_path / "ours", 2), strict=True
    )
    for theirs, ours in ((a["variables"], b["variables"]) for a, b in pairs):
        names = set(theirs) - before - AGENTS_OWN
        assert names == set(ours) - before - OURS
        names -= {"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"}
        assert {n: theirs[n] for n in names} == {n: ours[n] for n in names}
    shared = ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID")
    zero, one = (each["variables"] for each in found(tmp_path / "ours", 2))
    assert [zero[name] for name in shared] == [one[name] for name in shared]


def test_what_the_user_has_set_stays(openmpi: Mpi, tmp_path: Path) -> None:
    script = str(SCRIPTS / "environment.py")
    given = {"OMP_NUM_THREADS": "2", "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3"}
    done = run(openmpi, 1, script, cwd=tmp_path, **given)
    assert done.status == 0, done.err
    (ours,) = found(tmp_path, 1)
    assert given.items() <= ours["variables"].items()


@pytest.mark.parametrize("form", ["script", "module", "package"])
def test_it_sees_itself_as_python_would_show_it(
    openmpi: Mpi, form: str, tmp_path: Path
) -> None:
    """The same words with plain python and with `run` find the same."""
    folder = tmp_path / "pack"
    folder.mkdir()
    text = (SCRIPTS / "environment.py").read_text()
    for name in ("tool.py", "__main__.py", "__init__.py"):
        (folder / name).write_text(text if name != "__init__.py" else "")
    words = {
        "script": ("pack/tool.py", "-x", "a b"),
        "module": ("-m", "pack.tool", "-x", "a b"),
        "package": ("-m", "pack", "-x", "a b"),
    }[form]
    (tmp_path / "plain").mkdir()
    subprocess.run(
        [sys.executable, *words], cwd=tmp_path, env=environment(RANK="0"), check=True
    )
    (plain,) = found(tmp_path, 1)
    done = run(openmpi, 1, *words, cwd=tmp_path)
    assert done.status == 0, done.err
    (ours,) = found(tmp_path, 1)
    assert ours["main"]
    del plain["variables"], ours["variables"]
    assert ours == plain


def test_without_mpirun_it_is_a_world_of_one(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mpitrain", "run", str(SCRIPTS / "ddp.py")],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout == "done 0/1\n"


# --- how it ends --------------------------------------------------------------------

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
    ("fault", "status", "words"),
    [
        ("raise", 1, "ArithmeticError: this is the fault"),
        ("exit", 3, "sys.exit(3)"),
        ("interrupt", 130, "interrupted by Ctrl-C (SIGINT)"),
        ("exit-hard", None, "by os._exit; it was at: in the script"),
        ("kill", None, "in the script"),
    ],
)
def test_every_way_out_of_a_script_ends_the_job(
    mpi: Mpi, fault: str, status: int | None, words: str, tmp_path: Path
) -> None:
    done = run(mpi, 3, write(tmp_path, FAULTY), fault, cwd=tmp_path)
    assert done.ended - float((tmp_path / "time").read_text()) < 10
    time.sleep(0.5)  # mpirun may leave a moment before the ranks it has killed
    pids = [int((tmp_path / f"pid-{rank}").read_text()) for rank in range(3)]
    assert not survivors(pids)
    assert done.status == status if status is not None else done.status != 0
    line, *others = done.ours
    # MPICH does not end the others when a rank leaves by os._exit: they lose their
    # peer, and one of them may say so after it.
    assert not others or (mpi.name == "mpich" and fault == "exit-hard")
    assert line.startswith("[rank 1/3 ")
    assert line.endswith(words)


@pytest.mark.parametrize("num_ranks", [1, 2])
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


@pytest.mark.parametrize(("flags", "status"), [((), 0), (("--hang-timeout", "4"), 76)])
def test_a_hang_is_named_when_asked_for(
    openmpi: Mpi, flags: tuple, status: int, tmp_path: Path
) -> None:
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


def test_a_process_that_the_script_forks_is_no_rank(
    openmpi: Mpi, tmp_path: Path
) -> None:
    body = """
import os
child = os.fork()
if child:
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    print(f"done {os.environ['RANK']}/{os.environ['WORLD_SIZE']}", flush=True)
"""
    check_all_done(run(openmpi, 2, write(tmp_path, body), cwd=tmp_path), 2)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("nothing.py",), "'nothing.py' cannot be read as a script"),
        (("wrong.py",), "'wrong.py' is no Python"),
        (("-m", "nothing.tool"), "-m nothing.tool: there is no such module"),
        (("--no-python", "nothing"), "--no-python nothing: expected a program"),
        (("--devise", "cpu", "wrong.py"), "--devise"),
        ((), "nothing to run is named"),
    ],
)
def test_what_cannot_run_is_told_once(
    openmpi: Mpi, words: tuple, said: str, tmp_path: Path
) -> None:
    (tmp_path / "wrong.py").write_text("x = = 1\n")
    done = run(openmpi, 3, *words, cwd=tmp_path)
    assert done.status == 2
    assert (done.out + done.err).count(said) == 1
    assert "Traceback" not in done.err


# --- programs -----------------------------------------------------------------------


def test_a_program_finds_the_environment_and_the_store(
    openmpi: Mpi, tmp_path: Path
) -> None:
    done = run(
        openmpi,
        *(2, "--no-python", sys.executable, str(SCRIPTS / "ddp.py"), "destroy"),
        cwd=tmp_path,
    )
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
        ("kill -KILL $$", 137, "was killed by SIGKILL"),
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
    time.sleep(0.5)
    assert not survivors([int(pid) for pid in (tmp_path / "pids").read_text().split()])


def test_a_program_ends_with_its_rank(openmpi: Mpi, tmp_path: Path) -> None:
    body = f"{PROGRAM}[ $RANK = 1 ] && kill -KILL $PPID\nsleep 300\n"
    (tmp_path / "program.sh").write_text(body)
    done = run(openmpi, 2, "--no-python", "sh", "program.sh", cwd=tmp_path)
    assert done.status != 0
    time.sleep(0.5)
    assert not survivors([int(pid) for pid in (tmp_path / "pids").read_text().split()])


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM])
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
