"""A fork server by `serve`: what differs from a cold start, and what ends it."""

from __future__ import annotations

import contextlib
import json
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from launcher import Mpi, environment, find, survivors, wait_until_gone
from run_scripts import write
from test_warm import server_variables, staying_job, warm

from mpitrain.warm import protocol
from mpitrain.watchdog.process import has_signal

IMPORTS = """
import os, statistics, xml, yaml, profile, json
print("warm" if "MPITRAIN_PROXY" in os.environ else "cold")
print(statistics.__file__, xml.name, yaml.name, profile.name, json.__file__)
"""


def set_by(mpi: Mpi) -> dict[str, str]:
    """What the mpirun adds to the variables of its ranks: the server would renew."""
    done = subprocess.run(
        [str(mpi.mpirun), "-np", "1", *mpi.flags, "env"],
        env=environment(mpi),
        capture_output=True,
        text=True,
        check=True,
    )
    lines = (it.partition("=") for it in done.stdout.splitlines())
    return {name: value for name, _, value in lines if name.startswith("LD_")}


@contextlib.contextmanager
def server_of_a_person(
    mpi: Mpi, folder: Path
) -> Iterator[tuple[subprocess.Popen[str], Path]]:
    """As `nohup python -m mpitrain serve`; it, and its socket."""
    variables = server_variables(folder) | set_by(mpi)
    with subprocess.Popen(
        [
            *("bash", "-c", "trap '' HUP; exec \"$@\"", "bash"),
            *(sys.executable, "-m", "mpitrain", "serve", "--idle-minutes", "10"),
        ],
        cwd=folder,
        env=environment(mpi, **variables),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        text=True,
        # As in a shell; in a session of its own nothing would stop it.
        process_group=0,
    ) as server:
        assert server.stdout is not None
        assert "ready" in server.stdout.readline()
        try:
            yield server, Path(variables["MPITRAIN_FORK_SERVER"])
        finally:
            server.kill()


def answer(path: Path, request: dict[str, Any]) -> str:
    """What the server says to a process that is such."""
    with socket.socket(socket.AF_UNIX) as proxy:
        proxy.settimeout(60)
        proxy.connect(str(path))
        proxy.sendall(json.dumps(request).encode() + b"\n")
        return str(json.loads(proxy.makefile().readline()).get("cold", ""))


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def wait_until(is_so: Callable[[], bool], what: str, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < end, what
        time.sleep(0.05)


def request_of_a_rank(mpi: Mpi, folder: Path, **variables: str) -> dict[str, Any]:
    """What a proxy would send that mpirun starts here."""
    code = (
        "import json, os, sys\n"
        "sys.path[0] = os.path.dirname(sys.executable)\n"
        "from mpitrain.warm.process_state import ProcessState, identity\n"
        "state = vars(ProcessState.of_this_process())\n"
        "print(json.dumps({'identity': identity(), 'state': state}))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env=environment(mpi, **server_variables(folder), **set_by(mpi), **variables),
        capture_output=True,
        text=True,
        check=True,
    )
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_one_server_of_a_person_from_its_start_to_its_end(tmp_path: Path) -> None:
    mpi = find("openmpi-5")
    own = tmp_path / "own"
    for name in ("xml", "yaml"):
        (own / name).mkdir(parents=True)
        (own / name / "__init__.py").write_text("name = 'mine'")
    (own / "profile.py").write_text("name = 'mine'")
    (own / "statistics.py").touch()
    (own / "json.py").touch()  # torch itself imports it: nobody's own
    with server_of_a_person(mpi, tmp_path) as (server, path):
        # Who logs out, and Ctrl-Z in its shell. It says that it is ready, and then is.
        is_ready = partial(has_signal, server.pid, "SigIgn", signal.SIGTSTP)
        wait_until(is_ready, "Ctrl-Z stops it")
        for number in (signal.SIGHUP, signal.SIGTSTP):
            server.send_signal(number)
        time.sleep(0.3)
        assert server.poll() is None
        assert state_of(server.pid) not in "Tt"

        done = warm(mpi, tmp_path, 1, "run", str(own / write(own, IMPORTS)))
        assert done.out.startswith("warm"), done.out + done.err
        words = done.out.split()
        assert words[1] == str(own / "statistics.py"), done.out
        assert words[2:5] == ["mine"] * 3, done.out
        assert words[5] == json.__file__, done.out

        other = request_of_a_rank(mpi, tmp_path, SLURM_JOB_ID="7")
        text = answer(path, other)
        assert text == "job of the scheduler is '7', and 'None' in the fork server"

        check_while_ranks_run(mpi, tmp_path, server, path)
    assert not path.exists() or survivors([server.pid]) == []


def check_that_ctrl_z_stops(
    job: subprocess.Popen[str], forks: list[int], proxies: list[int]
) -> None:
    """Open MPI's mpirun sends STOP to its ranks, and CONT."""
    job.send_signal(signal.SIGTSTP)
    wait_until(lambda: all(state_of(it) == "T" for it in proxies), "proxies go on")
    wait_until(lambda: all(state_of(it) == "T" for it in forks), "forks go on")
    job.send_signal(signal.SIGCONT)
    wait_until(lambda: all(state_of(it) != "T" for it in forks), "forks stay")


def test_ctrl_z_stops_the_forks_of_a_server_of_a_start(tmp_path: Path) -> None:
    """It is a child of a rank, whose process group mpirun stops."""
    with staying_job(find("openmpi-5"), tmp_path, of_start=True) as started:
        check_that_ctrl_z_stops(*started)


def check_while_ranks_run(
    mpi: Mpi, folder: Path, server: subprocess.Popen[str], path: Path
) -> None:
    with staying_job(mpi, folder) as (job, forks, proxies):
        check_that_ctrl_z_stops(job, forks, proxies)
        other = request_of_a_rank(mpi, folder, TORCHINDUCTOR_MAX_AUTOTUNE="1")
        text = answer(path, other)
        assert text.startswith("TORCHINDUCTOR_MAX_AUTOTUNE is '1', and None"), text
        assert text.endswith("which restarts when its 2 ranks have ended"), text

        server.send_signal(signal.SIGINT)
        assert server.stdout is not None
        line = server.stdout.readline()
        assert "ranks that still run: 2" in line
        assert "a second Ctrl-C ends them" in line

        server.kill()
        wait_until_gone([*forks, *proxies])
        printed = job.communicate(timeout=60)[0]
        found = re.findall(r"\[rank \d/2 \S+\] the fork server of this host", printed)
        assert len(found) == 1, printed
        assert "memory (see dmesg). Start again" in printed
        assert job.returncode != 0
        assert not protocol.lock_file(path).exists()


def test_a_second_ctrl_c_at_serve_is_no_lack_of_memory(tmp_path: Path) -> None:
    mpi = find("openmpi-5")
    with (
        server_of_a_person(mpi, tmp_path) as (server, path),
        staying_job(mpi, tmp_path) as (job, forks, proxies),
    ):
        server.send_signal(signal.SIGINT)
        assert server.stdout is not None
        assert "ranks that still run: 2" in server.stdout.readline()
        server.send_signal(signal.SIGINT)
        wait_until_gone([*forks, *proxies])
        printed = job.communicate(timeout=60)[0]
        assert "dmesg" not in printed
        assert job.returncode != 0
        assert not protocol.lock_file(path).exists()


def test_a_server_that_begins_anew_has_no_socket_meanwhile(tmp_path: Path) -> None:
    mpi = find("openmpi-5")
    with server_of_a_person(mpi, tmp_path) as (server, path):
        other = request_of_a_rank(mpi, tmp_path, TRITON_DEBUG="1")
        assert "which restarts" in answer(path, other)
        wait_until(lambda: not path.exists(), "the socket stays")
        server.terminate()
        server.wait(60)
        assert not path.exists()
