"""Warm ranks: forks that differ in nothing from what mpirun would have started."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from launcher import (
    ON_ONE_CORE,
    Done,
    Mpi,
    environment,
    find,
    mpirun,
    send_signal,
    slow,
    supervise,
    survivors,
    wait_until_gone,
)
from run_scripts import write
from test_restarts import SCRIPT

FORK = "MPITRAIN_PROXY"  # a warm rank has it
EACH_IMPORTS = {"MPITRAIN_FORK_SERVER": "none"}

SHOWS = """
import json, os, random, resource, signal, sys
from pathlib import Path
import numpy, torch, torch.distributed as dist
from threadpoolctl import threadpool_info

rank, size = int(os.environ["RANK"]), os.environ["WORLD_SIZE"]
dist.init_process_group()
total = torch.ones(1)
dist.all_reduce(total)
found = {
    "variables": dict(os.environ), "folder": os.getcwd(), "argv": sys.argv,
    "umask": os.umask(0o22), "cores": sorted(os.sched_getaffinity(0)),
    "limits": [resource.getrlimit(it) for it in (resource.RLIMIT_NOFILE,
                                                 resource.RLIMIT_CORE)],
    "nice": os.nice(0), "path": sys.path, "flags": list(sys.flags),
    "ignored": [it for it in signal.valid_signals()
                if signal.getsignal(it) == signal.SIG_IGN],
    "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
    "kinds": [os.fstat(it).st_mode for it in range(3)],
    "stdin": sys.stdin.readline() if rank == 0 else "",
    "stdout": [sys.stdout.line_buffering, sys.stdout.isatty(), sys.stdout.encoding],
    "threads": [torch.get_num_threads(), torch.get_num_interop_threads(),
                *(it["num_threads"] for it in threadpool_info()
                  if it["user_api"] == "blas")],
    "total": total.item(),
    "main": sys.modules["__main__"].__file__,
}
chance = [random.random(), float(numpy.random.rand()), torch.initial_seed()]
Path(sys.argv[1] + f"-{rank}").write_text(json.dumps([found, chance]))
print(f"done {rank}/{size}")
"""

OF_A_START = re.compile(
    "PMI|OMPI_|PRTE|HYD|MASTER_PORT|TORCHELASTIC_RUN_ID|MPITRAIN_(RANK_PID|PROXY)|"
    "KMP_DUPLICATE_LIB_OK"  # set by the import of threadpoolctl, which SHOWS makes
)
"""Variables whose values no two starts have in common."""


def server_variables(folder: Path) -> dict[str, str]:
    return {"MPITRAIN_FORK_SERVER": str(folder / "private" / "socket")}


@contextlib.contextmanager
def fork_server(
    mpi: Mpi, folder: Path, *words: str, **variables: str
) -> Iterator[subprocess.Popen[str]]:
    """A fork server that the mpirun started, which sets variables of its own."""
    variables |= server_variables(folder)
    command = [
        *("timeout", "-k", "5", "170", str(mpi.mpirun), "-np", "1", *mpi.flags),
        *(sys.executable, "-m", "mpitrain", "serve", *words),
    ]
    with subprocess.Popen(
        command,
        cwd=folder,
        env=environment(mpi, **variables),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as server:
        assert server.stdout is not None
        assert "ready" in server.stdout.readline()
        try:
            yield server
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(server.pid, signal.SIGINT)


def server_pid(folder: Path) -> int:
    """The process that listens: its forks have its command line, too."""
    socket = server_variables(folder)["MPITRAIN_FORK_SERVER"].encode()
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            words = (entry / "cmdline").read_bytes().split(b"\0")
            is_ours = socket in (entry / "environ").read_bytes()
            if is_ours and words[1:4] == [b"-m", b"mpitrain", b"serve"]:
                found.append(int(entry.name))
    return min(found)


def warm(mpi: Mpi, folder: Path, num_ranks: int, *words: str, **variables: str) -> Done:
    variables |= server_variables(folder)
    return mpirun(
        mpi,
        num_ranks,
        "-m",
        "mpitrain",
        *words,
        cwd=folder,
        timeout_seconds=90,
        **variables,
    )


under_two = pytest.mark.parametrize(
    "mpi", ["openmpi-5", slow("openmpi-4.1"), "mpich"], indirect=True
)
under_one = pytest.mark.parametrize(
    "mpi", ["openmpi-5", slow("openmpi-4.1"), slow("mpich")], indirect=True
)


@under_one
def test_a_warm_rank_has_what_a_cold_one_has(mpi: Mpi, tmp_path: Path) -> None:
    script = write(tmp_path, SHOWS)
    launch = [str(mpi.mpirun), "-np", "2", *mpi.flags, sys.executable]
    launch += ["-m", "mpitrain", "run", script]
    shell = (
        "trap '' HUP; umask 027; ulimit -n 700; ulimit -S -c 0; exec nice -n 3 \"$@\""
    )
    own = {"OPENBLAS_NUM_THREADS": "2"} if mpi.name == "mpich" else {}
    with fork_server(mpi, tmp_path, **own):
        for name in ("cold", "warm"):
            (tmp_path / name).mkdir()
            more = server_variables(tmp_path) if name == "warm" else EACH_IMPORTS
            done = subprocess.run(
                ["bash", "-c", shell, "bash", *launch, str(tmp_path / name)],
                cwd=tmp_path,
                env=environment(mpi, A_VARIABLE="ä\n=", **own, **more),
                input="what rank zero reads\n",
                capture_output=True,
                text=True,
                timeout=120,
            )
            assert done.returncode == 0, done.stdout + done.stderr
            assert "cold start" not in done.stderr, done.stderr
    for rank in (0, 1):
        cold, warm = (
            json.loads((tmp_path / f"{name}-{rank}").read_text())
            for name in ("cold", "warm")
        )
        assert FORK in warm[0]["variables"]
        assert FORK not in cold[0]["variables"]
        for found in (cold[0], warm[0]):
            found["variables"] = {
                name: value
                for name, value in found["variables"].items()
                if not OF_A_START.match(name)
            }
            found["variables"].pop("MPITRAIN_FORK_SERVER", None)
            found["argv"].pop()
        assert warm[0] == cold[0]
        assert cold[0]["variables"]["A_VARIABLE"] == "ä\n="
        assert cold[0]["umask"] == 0o27
        assert cold[0]["stdin"] == ("" if rank else "what rank zero reads\n")
    chances = [json.loads((tmp_path / f"warm-{it}").read_text())[1] for it in (0, 1)]
    assert not set(chances[0]) & set(chances[1])


TRAINING = ("--epochs", "2", "--global-batch-size", "50")


def test_a_warm_training_has_the_bits_of_a_cold_one(mpi: Mpi, tmp_path: Path) -> None:
    with fork_server(mpi, tmp_path):
        results = []
        for name in ("cold", "warm"):
            words = ("--name", name, *TRAINING)
            if name == "cold":
                words = ("-m", "mpitrain", *words)
                done = mpirun(mpi, 3, *words, cwd=tmp_path, **EACH_IMPORTS)
            else:
                done = warm(mpi, tmp_path, 3, *words)
            assert done.status == 0, done.out + done.err
            results.append((tmp_path / "runs" / name / "model.pt").read_bytes())
    assert results[0] == results[1]


STAYS = """
import os, signal, sys, time
from pathlib import Path
import torch.distributed as dist
import mpitrain

rank = os.environ["RANK"]
dist.init_process_group()
dist.barrier()
signal.signal(signal.SIGTERM, lambda *_: Path(f"told-{rank}").touch())
Path(f"pids-{rank}").write_text(os.environ.get("MPITRAIN_PROXY", str(os.getpid())))
ACT
for _ in range(1200):
    time.sleep(0.05)
"""


@contextlib.contextmanager
def staying_job(
    mpi: Mpi, folder: Path, act: str = "", *, of_start: bool = False
) -> Iterator[tuple[subprocess.Popen[str], list[int], list[int]]]:
    """A warm job of two ranks, the process ids of its forks, and of their proxies.

    ``of_start``: on one core, so that the start has a fork server of its own.
    """
    script = write(folder, STAYS.replace("ACT", act))
    with subprocess.Popen(
        [
            *(ON_ONE_CORE if of_start else ()),
            *(str(mpi.mpirun), "-np", "2", *mpi.flags, sys.executable),
            *("-m", "mpitrain", "run", script),
        ],
        cwd=folder,
        env=environment(mpi, **({} if of_start else server_variables(folder))),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as job:
        end = time.monotonic() + 60
        files = [folder / f"pids-{rank}" for rank in (0, 1)]
        while not all(file.exists() and file.read_text() for file in files):
            assert time.monotonic() < end
            assert job.poll() is None, job.communicate()[0]
            time.sleep(0.05)
        pids = [file.read_text().split() for file in files]
        assert all(len(it) == 2 for it in pids), "it started cold"
        forks, proxies = ([int(pair[i]) for pair in pids] for i in (0, 1))
        try:
            yield job, forks, proxies
        finally:
            send_signal([*survivors(forks), *survivors(proxies), job.pid])


def on_one_core(
    mpi: Mpi, folder: Path, num_ranks: int, *words: str, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run mpitrain where two ranks outnumber the cores."""
    return subprocess.run(
        [
            *(*ON_ONE_CORE, str(mpi.mpirun), "-np", str(num_ranks), *mpi.flags),
            *(sys.executable, "-m", "mpitrain", *words),
        ],
        cwd=folder,
        env=environment(mpi, **variables),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


@under_one
def test_the_death_of_each_process_ends_the_others(mpi: Mpi, tmp_path: Path) -> None:
    with fork_server(mpi, tmp_path):
        server = server_pid(tmp_path)
        for victim in ("fork", "proxy", "server"):
            with staying_job(mpi, tmp_path) as (job, forks, proxies):
                pid = {"fork": forks[1], "proxy": proxies[1], "server": server}[victim]
                os.kill(pid, signal.SIGKILL)
                wait_until_gone([*forks, *proxies])
                assert job.wait(30) != 0
            for file in tmp_path.glob("pids-*"):
                file.unlink()


@under_two
def test_signals_and_the_status_are_passed_on(mpi: Mpi, tmp_path: Path) -> None:
    act = "while not Path(f'told-{rank}').exists(): time.sleep(0.02)\nsys.exit(7)"
    with (
        fork_server(mpi, tmp_path),
        staying_job(mpi, tmp_path, act) as (job, forks, proxies),
    ):
        send_signal(proxies, signal.SIGTERM)
        assert job.wait(30) == 7
        wait_until_gone([*forks, *proxies])
        assert all((tmp_path / f"told-{rank}").exists() for rank in (0, 1))


def test_what_cannot_be_handed_on_begins_cold(tmp_path: Path) -> None:
    mpi = find("openmpi-5")
    script = write(
        tmp_path,
        "import os; print('warm' if 'MPITRAIN_PROXY' in os.environ else 'cold')",
    )
    words = ("run", script)
    other = {"OMP_NUM_THREADS": "2"}
    with fork_server(mpi, tmp_path):
        for said in (b"", b"{}\n", b"no JSON\n", b"{"):
            with socket.socket(socket.AF_UNIX) as stranger:
                stranger.connect(server_variables(tmp_path)["MPITRAIN_FORK_SERVER"])
                stranger.sendall(said)
        done = warm(mpi, tmp_path, 1, *words)
        assert done.out.split() == ["warm"], done.out + done.err
        pid = server_pid(tmp_path)
        os.kill(pid, signal.SIGSTOP)
        done = warm(mpi, tmp_path, 1, *words)
        os.kill(pid, signal.SIGCONT)
        assert done.out.split() == ["cold"], done.out + done.err
        assert "cold start: no answer of the fork server: timed out" in done.err
        # A variable that libraries read at their import: the server restarts.
        done = warm(mpi, tmp_path, 1, *words, **other)
        assert done.out.split() == ["cold"], done.out + done.err
        expected = "cold start: OMP_NUM_THREADS is '2', and None in the fork server"
        assert done.err.count(expected) == 1, done.err
        end = time.monotonic() + 60
        while done.out.split() != ["warm"]:
            assert time.monotonic() < end, done.out + done.err
            done = warm(mpi, tmp_path, 1, *words, **other)
        # Others could put code into a socket of theirs.
        (tmp_path / "private").chmod(0o777)
        done = warm(mpi, tmp_path, 1, *words, **other)
        assert done.out.split() == ["cold"], done.out + done.err
        assert "not a folder of this user alone" in done.err


def test_a_server_ends_when_nothing_comes_and_there_is_one(tmp_path: Path) -> None:
    mpi = find("openmpi-5")
    with fork_server(mpi, tmp_path, "--idle-minutes", "0.1") as server:
        second = mpirun(
            mpi,
            1,
            "-m",
            "mpitrain",
            "serve",
            cwd=tmp_path,
            **server_variables(tmp_path),
        )
        assert second.status == 2, second.out + second.err
        assert "another fork server listens" in second.err
        assert server.wait(60) == 0
    assert not list((tmp_path / "private").iterdir())


RUN = ("-m", "mpitrain", "run", "--device", "cpu", "--backend", "gloo", "train.py")


def test_restarts_under_supervise_are_warm(mpi: Mpi, tmp_path: Path) -> None:
    """And it has the weights of a training whose ranks nobody killed."""
    strike = (
        "end = time.monotonic() + 60\n"
        "            socket = socket_path(os.environ)\n"
        "            while not socket.exists() and time.monotonic() < end:\n"
        "                time.sleep(0.1)\n"
        "            os.kill(os.getpid(), signal.SIGKILL)"
    )
    text = SCRIPT.replace("RESUME", '"never"')
    (whole := tmp_path / "whole").mkdir()
    (whole / "train.py").write_text(text.replace("FAULT", "..."))
    expected = mpirun(mpi, 3, *RUN, cwd=whole)
    assert expected.status == 0, expected.out + expected.err
    text = text.replace("FAULT", strike).replace(
        "def main():",
        "def main():\n    print('warm' if 'MPITRAIN_PROXY' in os.environ else 'cold')\n"
        "    print('socket', socket_path(os.environ))",
    )
    head = "import time\nfrom mpitrain.warm.protocol import socket_path\n"
    (tmp_path / "train.py").write_text(head + text)
    options = ["--restarts", "3", "--warm"]
    done = supervise(mpi, tmp_path, options, *RUN)
    assert done.status == 0, done.out + done.err
    starts = re.findall("warm|cold", done.out)
    assert starts[-6:] == ["warm"] * 6, done.out + done.err
    restarts = re.findall("supervise: restart (.*)", done.err)
    assert len(restarts) == 2, done.err
    for number, line in enumerate(restarts, 1):
        assert re.match(rf"{number} of 3 at step \d+: \[rank 1/3 .* died", line)
    weights = [re.findall("weights .*", it.out) for it in (expected, done)]
    assert len(weights[0]) == 1
    assert weights[0] == weights[1]
    assert json.loads((tmp_path / "mine/result.json").read_text())["steps"] == 8
    sockets = set(re.findall(r"socket (\S+)", done.out))
    assert sockets
    assert not [path for path in sockets if Path(path).exists()]


@under_two
def test_ranks_that_outnumber_the_cores_import_once(mpi: Mpi, tmp_path: Path) -> None:
    # Other jobs have such files meanwhile: only those of its own servers shall be gone.
    show = """
import os
from pathlib import Path
print('fork' if 'MPITRAIN_PROXY' in os.environ else 'itself')
for file in Path(f"/proc/{os.getppid()}/fd").iterdir():
    if (path := str(file.readlink())).endswith(".lock"):
        print(f"<{path}>")
"""
    script, locks = write(tmp_path, show), set[str]()
    for expected, variables, num_ranks in (
        (["fork", "fork"], {}, 2),
        (["itself", "itself"], EACH_IMPORTS, 2),
        (["itself"], {}, 1),  # it has a core
    ):
        done = on_one_core(mpi, tmp_path, num_ranks, "run", script, **variables)
        # Two lines may be printed as one.
        found = re.findall("fork|itself", done.stdout)
        assert found == expected, done.stdout + done.stderr
        assert "cold start" not in done.stderr, done.stderr
        locks |= {*re.findall("<(/[^>]*start-[^>]*)>", done.stdout)}
    assert len(locks) == 1
    end = time.monotonic() + 10
    while left := [it for it in locks if Path(it).exists()]:
        assert time.monotonic() < end, left
        time.sleep(0.1)


@under_one
def test_a_server_of_a_start_ends_with_its_ranks(mpi: Mpi, tmp_path: Path) -> None:
    for victim in ("fork", "proxy", "server", "mpirun"):
        (folder := tmp_path / victim).mkdir()
        with staying_job(mpi, folder, of_start=True) as (job, forks, proxies):
            server = int(Path(f"/proc/{forks[0]}/stat").read_text().split()[3])
            pids = {"fork": forks[1], "proxy": proxies[0], "server": server}
            os.kill(pids.get(victim, job.pid), signal.SIGKILL)
            wait_until_gone([*forks, *proxies, server])
            assert job.wait(30) != 0


CHANGES = """
import os, sys
from pathlib import Path
from mpitrain.warm import fork_server

if "mpitrain" in sys.orig_argv:
    with open(Path(__file__).with_name("begun"), "a") as file:
        file.write("once\\n")

def listen(path, begin=fork_server._listen):
    os.utime(__file__)
    return begin(path)

fork_server._listen = listen
"""


def test_a_server_of_a_start_whose_files_change_begins_nothing(tmp_path: Path) -> None:
    """Its command line is that of a rank: begun anew it would train once more."""
    mpi = find("openmpi-5")
    (tmp_path / "sitecustomize.py").write_text(CHANGES)
    script = write(tmp_path, "import time; time.sleep(3); print('ran', flush=True)")
    done = on_one_core(mpi, tmp_path, 2, "run", script, PYTHONPATH=str(tmp_path))
    assert done.stdout.split() == ["ran", "ran"], done.stdout + done.stderr
    assert done.stderr.count("cold start: ") == 1, done.stderr
    assert (tmp_path / "begun").read_text().split() == ["once", "once"]
    assert done.returncode == 0, done.stderr


def test_a_server_of_a_start_that_cannot_import_is_no_error(tmp_path: Path) -> None:
    """What torch's import raises is told by the ranks, and files of the killed go."""
    mpi = find("openmpi-5")
    (tmp_path / "torch.py").write_text(
        "open('imported', 'w').close(); raise ImportError('torch is broken here')"
    )
    folder = Path(f"/tmp/mpitrain-{os.getuid()}")
    for stale in (folder / "start-1.1-0-a", folder / "start-1.1-0-a.lock"):
        folder.mkdir(mode=0o700, exist_ok=True)
        stale.touch()
    for words in (("--help",), TRAINING):
        assert not (tmp_path / "imported").exists()  # help needs no torch
        done = on_one_core(mpi, tmp_path, 2, *words, PYTHONPATH=str(tmp_path))
    assert done.returncode == 1, done.stdout + done.stderr
    assert "cold start: no fork server: torch is broken here" in done.stderr
    assert done.stderr.count("torch is broken here") > 1, done.stderr
    assert not list(folder.glob("start-1.1-0-a*"))
