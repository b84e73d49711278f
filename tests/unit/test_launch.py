"""The pure parts of the start, as tables."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from mpitrain.errors import LaunchError
from mpitrain.launch.process_exit import error_message, exit_status


@pytest.mark.parametrize(
    ("error", "status", "words"),
    [
        (SystemExit(7), 7, "[rank 1/2 h] sys.exit(7)"),
        (SystemExit(256), 1, "sys.exit(256)"),
        (SystemExit(-1), 255, "sys.exit(-1)"),
        (SystemExit("no"), 1, "sys.exit('no')"),
        (KeyboardInterrupt(), 130, "interrupted by Ctrl-C"),
        (ValueError("bad"), 1, "[rank 1/2 h] ValueError: bad"),
        (LaunchError("worse"), 1, "[rank 1/2 h] LaunchError: worse"),
    ],
)
def test_every_way_out_has_a_status_and_words(
    error: BaseException, status: int, words: str
) -> None:
    assert exit_status(error) == status
    assert words in error_message(error, "rank 1/2 h")


def test_leaving_well_is_no_failure() -> None:
    assert exit_status(SystemExit()) == 0
    assert exit_status(SystemExit(0)) == 0


def test_a_worker_that_runs_the_script_again_is_told_so(tmp_path: Path) -> None:
    """As one of a fork server does, where a script has no `if __name__`."""
    code = (
        "import multiprocessing, mpitrain\n"
        "if __name__ == '__main__':\n"
        "    spawn = multiprocessing.get_context('spawn')\n"
        "    made = spawn.Process(target=mpitrain.init)\n"
        "    made.start()\n"
        "    made.join()\n"
    )
    script = tmp_path / "script.py"
    script.write_text(code)
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert "LaunchError: mpitrain.init() was called in a process that" in done.stderr


def test_a_thread_that_ends_the_job_is_not_stopped_by_a_failing_main_thread() -> None:
    """Such as by Ctrl-C while the monitor of early returns ends the job."""
    code = (
        "import os, threading, time\n"
        "from unittest import mock\n"
        "from mpitrain.launch.exit_guard import ExitGuard\n"
        "class Comm:\n"
        "    rank, size = 0, 2\n"
        "    def Abort(self, status): os._exit(status)\n"
        "has_begun = threading.Event()\n"
        "def claim():\n"
        "    has_begun.set()\n"
        "    time.sleep(0.5)\n"
        "    return True\n"
        "guard = ExitGuard(Comm(), mock.Mock(), claim, str)\n"
        "fail = lambda: guard.fail(SystemExit(7))\n"
        "threading.Thread(target=fail, daemon=True).start()\n"
        "has_begun.wait()\n"
        "with guard:\n"
        "    raise KeyboardInterrupt\n"
    )
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == 7, done.stderr
    assert "[rank 0/2 " in done.stderr


WRONG_ARGUMENTS = """
import math, mpitrain, torch.distributed as dist
for name, value in (
    *(("timeout_seconds", it) for it in (None, math.inf, "60", 0)),
    ("hang_timeout_seconds", "60"), ("start_timeout_seconds", "60"),
    ("device", "cuda:0"), ("backend", "NCCL"), ("group", None),
):
    if name == "group":
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mpitrain.init(**({} if name == "group" else {name: value}))
        print("started with", name, value)
    except Exception as error:
        print(f"{type(error).__name__}: {error}")
"""


def test_init_says_which_argument_cannot_be() -> None:
    command = [sys.executable, "-c", WRONG_ARGUMENTS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    lines = done.stdout.splitlines()
    assert len(lines) == 9, done.stdout + done.stderr
    values = ("None", "inf", "'60'", "0")
    for line, value in zip(lines, values, strict=False):
        assert line.startswith(f"UsageError: mpitrain.init(timeout_seconds={value}): ")
    for line, kind in zip(lines[4:6], ("hang", "start"), strict=True):
        name = f"{kind}_timeout_seconds"
        text = f"mpitrain.init(): {name}: found '60', expected a number."
        assert line == f"UsageError: {text}"
    for line, name in zip(lines[6:8], ("device", "backend"), strict=True):
        assert line.startswith(f"UsageError: mpitrain.init(): {name}: found ")
    assert lines[6].endswith("expected auto, cpu, cuda or xpu. Did you mean 'cuda'?")
    assert lines[7].endswith("gloo, nccl or xccl. Did you mean 'nccl'?")
    assert "torch.distributed has a process group already" in lines[8]


ODD_STREAMS = """
import os, sys
from mpitrain.launch.process_exit import LOST_OUTPUT, finish_mpi, flush_output

class Tee:
    def write(self, text): os.write(1, text.encode())
    def flush(self): pass

class Failing(Tee):
    def flush(self): raise OSError(116, "Stale file handle")

sys.stdout = {stdout}
print(LOST_OUTPUT if flush_output() else 0, file=Tee())
if {closes_stderr}:
    sys.stderr.close()
finish_mpi(0)
"""


@pytest.mark.parametrize(
    ("stdout", "closes_stderr", "status", "words"),
    [
        ("Tee()", False, 0, ""),
        ("None", False, 0, ""),
        ("Failing()", False, 120, "could not be written: Stale file handle; status"),
        ("Failing()", True, 120, ""),
    ],
)
def test_a_script_may_put_any_object_in_place_of_stdout(
    stdout: str, closes_stderr: bool, status: int, words: str
) -> None:
    code = ODD_STREAMS.format(stdout=stdout, closes_stderr=closes_stderr)
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert (done.returncode, done.stdout) == (status, f"{status}\n"), done.stderr
    assert words in done.stderr
    assert bool(done.stderr) == bool(words)


STORE = """
import resource, socket
from mpitrain.launch.rendezvous.reachability import listen
from mpitrain.launch.rendezvous.select import UNKNOWN, Rendezvous
from mpitrain.launch.rendezvous.store import open_store
from mpitrain.mpi.single_process import SingleProcess
from mpitrain.mpi.world import Node, World
resource.setrlimit(resource.RLIMIT_NOFILE, (200, 4096))
listener = listen(address := "127.0.0.1")
port = listener.getsockname()[1]
where = dict(address=address, port=port, own_address=address, interface=UNKNOWN)
rendezvous = Rendezvous(**where, why="", listener=listener)
place = dict(rank=0, local_rank=0, node_rank=0, local_world_size=1)
nodes = (Node(hostname="a", ranks=(0,)),)
world = World(**place, world_size=300, nodes=nodes, master_addr=address)
store = open_store(SingleProcess(), rendezvous, world, 20.0)
clients = [socket.create_connection(("127.0.0.1", port)) for _ in range(300)]
store.set("key", "value")
print(store.get("key"), resource.getrlimit(resource.RLIMIT_NOFILE))
"""


def test_rank_zero_has_a_descriptor_for_each_rank() -> None:
    done = subprocess.run(
        [sys.executable, "-c", STORE], capture_output=True, text=True, timeout=60
    )
    assert done.stdout == "b'value' (1324, 4096)\n", done.stderr
