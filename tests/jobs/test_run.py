"""Anybody's script: what it finds, and what works in it."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launcher import Mpi, environment, mpirun, slow
from run_scripts import SCRIPTS, check_all_done, run, write

pytestmark = pytest.mark.usefixtures("warm_starts")

ROOT = Path(__file__).parents[2]

AGENTS_OWN = {"TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_SIGNALS_TO_HANDLE"}
"""What torchrun's agent tells itself and its workers; here is no agent."""

OURS = {
    "GLOO_SOCKET_IFNAME",
    "MPITRAIN_PROXY",  # of a warm rank
    "MPITRAIN_RANK_PID",
    "NCCL_SOCKET_IFNAME",
    "OMPI_MCA_btl",
    "TORCH_CPP_LOG_LEVEL",
}
"""What docs/reference/environment.md lists besides torchrun's."""


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return int(server.getsockname()[1])


# --- what works unchanged -----------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "needs", "num_ranks"),
    [
        slow("ddp.py", "torch", 2),
        ("ddp.py", "torch", 3),
        ("fsdp2.py", "torch", 2),
        ("with_accelerate.py", "accelerate", 2),
        slow("with_lightning.py", "lightning", 3),
        slow("with_transformers.py", "transformers", 2),
    ],
)
def test_a_script_written_for_torchrun_runs_unchanged(
    openmpi: Mpi, name: str, needs: str, num_ranks: int, tmp_path: Path
) -> None:
    pytest.importorskip(needs)
    done = run(openmpi, num_ranks, str(SCRIPTS / name), "out", cwd=tmp_path)
    check_all_done(done, num_ranks)


def test_the_script_of_the_page_goes_on_in_the_next_job(
    openmpi: Mpi, tmp_path: Path
) -> None:
    """As job scripts do: USR2 to mpirun before the end, and a start after status 75."""
    page = (ROOT / "docs/howto/torchrun-scripts.md").read_text()
    script = page.partition("```python\n")[2].partition("```")[0]
    loop = "for step in range(first, 5000):"
    assert script.count(loop) == 1
    fewer = loop.replace("5000", "1000")
    write(tmp_path, script.replace(loop, f"open('begun', 'w')\n{fewer}"))
    start = (str(openmpi.mpirun), "-np", "2", *openmpi.flags, sys.executable)
    job = subprocess.Popen(
        [*start, "-m", "mpitrain", "run", "script.py"],
        cwd=tmp_path,
        env=environment(openmpi),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
    )
    while not (tmp_path / "begun").exists():
        assert job.poll() is None
        time.sleep(0.1)
    job.send_signal(signal.SIGUSR2)
    out, _ = job.communicate(timeout=60)
    assert job.returncode == 75, out
    stopped = re.search(r"stopped after step (\d+)\n", out)
    assert stopped is not None
    assert 0 < int(stopped[1]) < 1000
    done = run(openmpi, 2, "script.py", cwd=tmp_path)
    assert done.status == 0, done.err
    assert done.out.count("finished") == 2


@pytest.mark.parametrize("method", [slow("spawn"), "forkserver", slow("fork")])
def test_data_workers_find_the_classes_of_the_script(
    openmpi: Mpi, method: str, tmp_path: Path
) -> None:
    done = run(openmpi, 2, str(SCRIPTS / "loaders.py"), method, cwd=tmp_path)
    check_all_done(done, 2)


@pytest.mark.parametrize("words", [slow(()), ("destroy",)], ids=["left", "destroyed"])
def test_a_process_group_left_or_destroyed_ends_well_every_time(
    mpi: Mpi, words: tuple, tmp_path: Path
) -> None:
    """Ten of ten were tried by hand, under each MPI."""
    for _ in range(2):
        done = run(mpi, 2, str(SCRIPTS / "ddp.py"), *words, cwd=tmp_path)
        check_all_done(done, 2)


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


def test_mpi4py_works_in_a_script(mpi: Mpi, tmp_path: Path) -> None:
    body = """
import mpi4py
mpi4py.rc.initialize = False
from mpi4py import MPI
MPI.Init()  # MPI runs already: nothing happens
assert MPI.Init_thread(MPI.THREAD_FUNNELED) == MPI.Query_thread()
comm = MPI.COMM_WORLD
assert comm.allreduce(1) == comm.size
print(f"done {comm.rank}/{comm.size}", flush=True)
MPI.Finalize()  # as it may, and others need not
"""
    check_all_done(run(mpi, 2, write(tmp_path, body), cwd=tmp_path), 2)


DIES_AFTER_STEPS = """
import os
import torch
import torch.distributed as dist
import mpitrain

with mpitrain.init() as world:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(3))], lr=0.1)
    for _ in range(12):
        optimizer.step()
    dist.barrier()
    if world.rank == 1:
        os._exit(9)
    dist.barrier()
"""


def test_each_step_is_counted_once(openmpi: Mpi, tmp_path: Path) -> None:
    done = run(openmpi, 2, write(tmp_path, DIES_AFTER_STEPS), cwd=tmp_path)
    assert "it was at: training, 12 steps done" in done.err


STARTS_ANOTHER = """
import os, subprocess, sys, time
import torch, torch.distributed as dist

code = "import os, time; print(os.environ['RANK'], os.environ['WORLD_SIZE'])"
open("child.py", "w").write(f"{code}; time.sleep(60)")
if os.environ["RANK"] == "1":
    words = [sys.executable, "-um", "mpitrain", "run", "child.py"]
    child = subprocess.Popen(words, stdout=subprocess.PIPE, text=True)
    assert child.stdout.readline() == "0 1\\n"
    child.kill()
    child.wait()
    time.sleep(4)
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
print(f"done {dist.get_rank()}/{dist.get_world_size()}", flush=True)
"""


def test_a_script_that_a_rank_runs_is_alone(mpi: Mpi, tmp_path: Path) -> None:
    """And may be killed; tests/mpi/test_start.py starts other programs."""
    done = run(mpi, 2, write(tmp_path, STARTS_ANOTHER), cwd=tmp_path)
    check_all_done(done, 2)


def test_init_in_a_script_takes_the_job_that_stands(
    openmpi: Mpi, tmp_path: Path
) -> None:
    body = """
import os
import re
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


@pytest.mark.slow
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


def test_a_script_may_name_a_port_of_its_own_and_read_stdin_to_its_end(
    openmpi: Mpi, tmp_path: Path
) -> None:
    body = """
import os, sys
from datetime import timedelta
import torch, torch.distributed as dist
assert sys.stdin.read() == "", "mpirun's is /dev/null"
ours = os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"]
own = "localhost", sys.argv[1]
for address, port in (ours, own):
    os.environ["MASTER_ADDR"], os.environ["MASTER_PORT"] = address, port
    dist.init_process_group("gloo", timeout=timedelta(seconds=20))
    dist.all_reduce(torch.ones(1))
    dist.destroy_process_group()
print(f"done {os.environ['RANK']}/{os.environ['WORLD_SIZE']}", flush=True)
"""
    words = write(tmp_path, body), str(free_port())
    check_all_done(run(openmpi, 2, *words, cwd=tmp_path), 2)


# --- each rank's own words ----------------------------------------------------------

TELLS = """
import os, sys
rank, world_size = os.environ["RANK"], os.environ["WORLD_SIZE"]
print(f"done {rank}/{world_size} {' '.join(map(str, sys.argv[1:]))}.", flush=True)
"""


def next_app(*words: str) -> tuple[str, ...]:
    """A further app context of mpirun, with one rank."""
    return (":", "-np", "1", sys.executable, "-m", "mpitrain", *words)


def test_each_rank_runs_what_it_was_given(mpi: Mpi, tmp_path: Path) -> None:
    """As plain mpirun does, with a wrapper or with app contexts."""
    for name in ("learner.py", "actor.py", "program.py"):
        (tmp_path / name).write_text(TELLS)
    words = (
        *("learner.py", "--shard", "0"),
        *next_app("run", "learner.py", "--shard", "1"),
        *next_app("run", "-m", "actor", "a b"),
        *next_app("run", "--no-python", sys.executable, "program.py", "3"),
    )
    done = run(mpi, 1, *words, cwd=tmp_path)
    check_all_done(done, 4)
    own = ("0/4 --shard 0.", "1/4 --shard 1.", "2/4 a b.", "3/4 3.")
    assert all(f"done {text}" in done.out for text in own), done.out


@pytest.mark.parametrize(
    ("words", "status", "said"),
    [
        (("nothing.py",), 2, "'nothing.py' cannot be read as a script"),
        (("--device", "cpu", "script.py"), 1, "device: 'auto' on rank 0; 'cpu' on"),
    ],
)
def test_what_cannot_run_on_one_rank_ends_all(
    openmpi: Mpi, words: tuple, status: int, said: str, tmp_path: Path
) -> None:
    done = run(
        openmpi, 1, write(tmp_path, TELLS), *next_app("run", *words), cwd=tmp_path
    )
    assert done.status == status
    assert (done.out + done.err).count(said) == 1
    assert "done" not in done.out
    assert "Traceback" not in done.err


def test_the_port_of_our_store_leads_to_it_under_any_name(
    openmpi: Mpi, tmp_path: Path
) -> None:
    """A host's own name or address does not lead to a loopback address (ezpz)."""
    body = """
import os
from datetime import timedelta
import torch, torch.distributed as dist
from torch.distributed import rendezvous
rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
own, port = "192.0.2.99", int(os.environ["MASTER_PORT"])  # reaches nobody
seconds = timedelta(seconds=15)
direct = dist.TCPStore(own, port, is_master=False, timeout=seconds)
by_url, *_ = next(rendezvous(f"tcp://{own}:{port}", rank, size, timeout=seconds))
for store in (direct, by_url):
    store.set(f"here-{rank}", "x")
    store.wait([f"here-{other}" for other in range(size)])
os.environ["MASTER_ADDR"] = own
dist.init_process_group("gloo", timeout=seconds)
dist.all_reduce(torch.ones(1))
print(f"done {rank}/{size}", flush=True)
"""
    check_all_done(run(openmpi, 2, write(tmp_path, body), cwd=tmp_path), 2)


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
    given = {
        "OMP_NUM_THREADS": "2",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "3",
        "TORCHELASTIC_RUN_ID": "17",
    }
    done = run(openmpi, 1, script, cwd=tmp_path, **given)
    assert done.status == 0, done.err
    (ours,) = found(tmp_path, 1)
    assert given.items() <= ours["variables"].items()


@pytest.mark.parametrize("form", ["script", "module", slow("package"), slow("folder")])
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
        "folder": ("pack", "-x", "a b"),
    }[form]
    (tmp_path / "plain").mkdir()
    subprocess.run(
        [sys.executable, *words], cwd=tmp_path, env=environment(RANK="0"), check=True
    )
    (plain,) = found(tmp_path, 1)
    cold = {"MPITRAIN_FORK_SERVER": "none"}
    done = run(openmpi, 1, *words, cwd=tmp_path, **cold)
    assert done.status == 0, done.err
    (ours,) = found(tmp_path, 1)
    assert ours["main"]
    del plain["variables"], ours["variables"]
    assert ours == plain


def test_without_mpirun_it_is_a_world_of_one(tmp_path: Path) -> None:
    for name in ("numbers", "queue", "random", "statistics", "tempfile"):
        # In the current folder, and not in the script's: nobody asks for them.
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('own {name}')")
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


SPAWNS = """
import os, sys, time
from datetime import timedelta
import torch, torch.distributed as dist, torch.multiprocessing as mp

def work(rank):
    dist.init_process_group(
        "gloo", rank=rank, world_size=2, timeout=timedelta(seconds=20)
    )
    dist.all_reduce(torch.ones(1))
    print(f"done {rank}/2", flush=True)
    time.sleep(0.1)  # gloo's thread may still hold the tensor
    dist.destroy_process_group()

if __name__ == "__main__":
    os.environ["MASTER_ADDR"] = "localhost"
    os.environ["MASTER_PORT"] = sys.argv[1]
    mp.spawn(work, nprocs=2)
"""


@pytest.mark.slow
def test_what_a_world_of_one_spawns_may_be_a_world(tmp_path: Path) -> None:
    words = [write(tmp_path, SPAWNS), str(free_port())]
    done = subprocess.run(
        [sys.executable, "-m", "mpitrain", "run", *words],
        cwd=tmp_path,
        env=environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    # Not whole lines: those of two processes may come in one.
    assert sorted(re.findall(r"done \d/\d", done.stdout)) == ["done 0/2", "done 1/2"]
