"""The watchdog's judgement: told what is heard and when, it decides."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import mpitrain
from mpitrain.watchdog import process
from mpitrain.watchdog.coordinator import Coordinator
from mpitrain.watchdog.heartbeat import Heartbeat, Position, State, memory_file
from mpitrain.watchdog.report import (
    WAITING_FILES,
    RankStatus,
    describe_call,
    is_waiting,
    main_stack,
    position_lines,
)
from mpitrain.watchdog.sidecar import Sidecar

WAITING = """Thread 0x1 (most recent call first):
  File "/usr/lib/python3.11/threading.py", line 1 in wait

Current thread 0x2 (most recent call first):
  File "/v/lib/python3.11/site-packages/torch/distributed/c10d.py", line 8 in all_reduce
  File "/home/me/mine.py", line 21 in <module>
"""
WORKING = """Current thread 0x2 (most recent call first):
  File "/home/me/mine.py", line 15 in stuck
  File "/home/me/mine.py", line 21 in <module>
"""


def said(**more: Any) -> dict[str, Any]:
    return {
        "state": int(State.RUNNING),
        "phase": "training",
        "step": 7,
        "age_seconds": 0.0,
        "limit_seconds": 10.0,
        "hostname": "gpu01",
        **more,
    }


def coordinator_of(
    *messages: dict[str, Any], world_size: int | None = None
) -> Coordinator:
    coordinator = Coordinator(world_size or len(messages), 0.0)
    look(coordinator, 0, 100)
    for rank, message in enumerate(messages):
        coordinator.receive(rank, message, 100.0)
    return coordinator


def look(coordinator: Coordinator, begin: float, end: float) -> list[dict[str, Any]]:
    """Let the coordinator look once a second, as long as nothing is to be done."""
    while begin < end:
        actions = coordinator.decide(begin)
        if actions.commands:
            return actions.commands
        begin += 1.0
    return []


def stuck(**more: Any) -> dict[str, Any]:
    return said(age_seconds=11.0, **more)


def end_of(
    coordinator: Coordinator, now: float = 100.1
) -> tuple[str, dict[str, Any] | None]:
    """Let the coordinator decide until it ends the job or has nothing more to do."""
    text = ""
    for tick in range(60):
        actions = coordinator.decide(now + tick * 0.1)
        text += "\n".join(actions.messages)
        for command in actions.commands:
            if command["command"] == "abort":
                return text, command
    return text, None


@pytest.mark.parametrize(
    "messages",
    [
        [said(), said()],
        [stuck(), said(phase="checkpoint")],  # one still moves
        [stuck(), stuck(limit_seconds=0.0)],  # one has no limit
        [stuck(), stuck(limit_seconds=600.0)],  # one may take longer
        [stuck(state=int(State.LEFT))] * 2,  # all are done
        [stuck(state=int(State.FAILING)), said()],
        [stuck(process_state="T")],  # Ctrl-Z at a world of one
        [stuck(process_state="T"), stuck(process_state="T", state=int(State.LEFT))],
        [stuck(process_state="T"), stuck(state=int(State.DONE))],  # one is left
    ],
)
def test_this_is_no_hang(messages: list) -> None:
    assert coordinator_of(*messages).decide(100.1).commands == []


@pytest.mark.parametrize("state", [State.RUNNING, State.LEFT, State.IDLE])
def test_a_stopped_rank_beside_one_that_is_not_is_a_hang(state: State) -> None:
    other = stuck(process_state="S", state=int(state))
    coordinator = coordinator_of(stuck(process_state="T"), other)
    assert coordinator.decide(100.1).commands == [{"command": "dump_stacks"}]


def test_a_hang_is_judged_by_the_stacks() -> None:
    coordinator = coordinator_of(stuck(), stuck(), stuck())
    (command,) = coordinator.decide(100.1).commands
    assert command == {"command": "dump_stacks"}
    for rank, stack in enumerate([WAITING, WORKING, WAITING]):
        coordinator.receive(rank, stuck(stack=stack, process_state="S"), 100.2)
    text, end = end_of(coordinator, 100.3)
    assert end is not None
    assert (end["status"], end["reporting_rank"]) == (76, 0)
    lines = text.splitlines()
    assert lines[0] == ("[rank 1/3 gpu01] hang: no rank has made progress for 11 s")
    assert lines[1] == "did not arrive:"
    assert lines[2] == "  rank 1 gpu01: training, 7 steps done, me/mine.py:15 in stuck"
    assert lines[4] == (
        "  ranks 0,2 gpu01: training, 7 steps done, me/mine.py:21 in <module>, in "
        "all_reduce"
    )


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"process_state": "T", "stack": ""}, "stopped by a signal (SIGSTOP)"),
        (
            {"process_state": "D", "stack": ""},
            "gives no stack (in the kernel, waits for a",
        ),
        ({"process_state": "S", "stack": ""}, "gives no stack"),
        ({"state": int(State.LEFT)}, "left with status 0 (last at: training)"),
    ],
)
def test_a_rank_without_a_stack_is_blamed_with_its_reason(
    more: dict, words: str
) -> None:
    coordinator = coordinator_of(stuck(), stuck())
    coordinator.decide(100.1)
    coordinator.receive(0, stuck(stack=WAITING, process_state="S"), 100.2)
    coordinator.receive(1, stuck(**more), 100.2)
    text, end = end_of(coordinator, 100.3)
    assert end is not None
    assert text.startswith("[rank 1/2 gpu01] hang")
    assert words in text.partition("waiting for them")[0]


def test_where_all_wait_the_rank_with_fewer_steps_is_missing() -> None:
    coordinator = coordinator_of(stuck(), stuck(step=6))
    coordinator.decide(100.1)
    for rank, step in enumerate([7, 6]):
        coordinator.receive(
            rank, stuck(stack=WAITING, process_state="S", step=step), 100.2
        )
    text, _ = end_of(coordinator, 100.3)
    assert text.startswith("[rank 1/2 gpu01] hang")


def test_a_rank_that_left_waits_for_one_that_works() -> None:
    """It is done; the other writes its weights, or loops for ever."""
    coordinator = coordinator_of(stuck(), stuck(state=int(State.LEFT)))
    coordinator.decide(100.1)
    coordinator.receive(0, stuck(stack=WORKING, process_state="S"), 100.2)
    text, _ = end_of(coordinator, 100.3)
    assert text.startswith("[rank 0/2 gpu01] hang")
    assert "rank 1 gpu01: left with status 0" in text.partition("waiting for them")[2]


def test_nobody_waits_for_those_that_sleep_while_others_work() -> None:
    """They have fewer steps, and wait as well."""
    idle = stuck(state=int(State.IDLE), step=2)
    coordinator = coordinator_of(stuck(), stuck(step=6), idle)
    coordinator.decide(100.1)
    for rank, step in enumerate([7, 6]):
        coordinator.receive(
            rank, stuck(stack=WAITING, process_state="S", step=step), 100.2
        )
    coordinator.receive(2, {**idle, "stack": WAITING, "process_state": "S"}, 100.2)
    text, _ = end_of(coordinator, 100.3)
    assert text.startswith("[rank 1/3 gpu01] hang")
    missing, waiting = text.split("waiting for them")
    assert "rank 2" not in missing
    assert "rank 2 gpu01: asleep until others have done their part" in waiting


def test_those_that_sleep_do_not_keep_a_hang_from_being_seen() -> None:
    idle = said(state=int(State.IDLE), limit_seconds=0.0)
    assert coordinator_of(stuck(), stuck(), idle).decide(100.1).commands
    assert not coordinator_of(said(), stuck(), idle).decide(100.1).commands


def test_where_all_work_alike_nobody_is_waiting() -> None:
    coordinator = coordinator_of(stuck(), stuck())
    coordinator.decide(100.1)
    for rank in range(2):
        coordinator.receive(rank, stuck(stack=WORKING, process_state="S"), 100.2)
    text, _ = end_of(coordinator, 100.3)
    assert "no rank waits for another; all run their own code" in text


def test_where_all_wait_alike_nobody_is_blamed() -> None:
    coordinator = coordinator_of(stuck(), stuck())
    coordinator.decide(100.1)
    for rank in range(2):
        coordinator.receive(rank, stuck(stack=WAITING, process_state="S"), 100.2)
    text, _ = end_of(coordinator, 100.3)
    assert "every rank waits for another" in text


def test_a_host_that_is_silent_counts_by_the_limits_of_the_others() -> None:
    """It was heard last before its first step, which may take ten minutes."""
    coordinator = coordinator_of(said(), said(hostname="gpu02", limit_seconds=600.0))
    for second in range(11):
        coordinator.receive(0, said(age_seconds=float(second)), 100.0 + second)
        actions = coordinator.decide(100.1 + second)
    assert actions.commands == [{"command": "dump_stacks"}]
    coordinator.receive(
        0, said(age_seconds=10.3, stack=WAITING, process_state="S"), 110.3
    )
    text, end = end_of(coordinator, 110.4)
    assert end is not None
    assert text.startswith("[rank 1/2 gpu02] hang")
    assert "no word from that host" in text


def test_ranks_of_a_host_that_fell_silent_are_told_in_one_line() -> None:
    """Their last words came within a second, and round to other numbers."""
    position = Position(
        state=State.RUNNING,
        phase="training",
        step=2,
        age_seconds=9.0,
        limit_seconds=6.0,
    )
    reports = [
        RankStatus(rank=rank, hostname=hostname, position=position, heard_at=heard_at)
        for rank, hostname, heard_at in (
            (0, "gpu01", 119.9),
            (1, "gpu02", 111.4),
            (2, "gpu02", 111.6),
        )
    ]
    lines = position_lines(reports, {1, 2}, now=120.0)
    assert lines == ["  ranks 1-2 gpu02: no word from that host for 8 s"]


def test_a_rank_that_was_never_heard_is_named_when_the_start_takes_too_long() -> None:
    coordinator = coordinator_of(stuck(), world_size=2)
    coordinator.decide(100.1)
    text, end = end_of(coordinator)
    assert end is not None
    assert "never connected: rank 1" in text


def test_what_goes_on_after_all_is_no_hang() -> None:
    coordinator = coordinator_of(stuck(), stuck())
    assert coordinator.decide(100.1).commands == [{"command": "dump_stacks"}]
    coordinator.receive(0, said(), 100.5)
    assert end_of(coordinator, 100.6)[1] is None


def test_a_job_that_was_suspended_and_goes_on_is_no_hang() -> None:
    coordinator = coordinator_of(said(), said())
    coordinator.decide(100.1)
    for rank in range(2):
        coordinator.receive(rank, said(age_seconds=3600.0), 3700.0)
    assert look(coordinator, 3700.1, 3710.0) == []
    for rank in range(2):
        coordinator.receive(rank, said(age_seconds=3611.0), 3711.0)
    assert look(coordinator, 3711.1, 3720.0) == [{"command": "dump_stacks"}]


def test_ranks_that_are_all_stopped_are_suspended_and_not_stuck() -> None:
    coordinator = coordinator_of(stuck(process_state="T"), stuck(process_state="T"))
    assert coordinator.decide(100.1).commands == []


def test_the_first_rank_that_is_gone_is_blamed_and_recorded_by_another() -> None:
    coordinator = coordinator_of(said(), said(), said())
    for rank, how in ((2, "terminated"), (0, "killed"), (1, "terminated")):
        coordinator.receive(rank, said(gone=how), 100.0)
    actions = coordinator.decide(100.2).commands
    assert [(o["command"], o["reporting_rank"]) for o in actions] == [("record", 0)]
    text, end = end_of(coordinator, 100.4)
    assert text.startswith("[rank 0/3 gpu01] died without an error message")
    assert end is not None
    assert end["status"] == 1


def test_a_rank_that_is_gone_after_another_told_why_stays_unsaid() -> None:
    coordinator = coordinator_of(said(state=int(State.FAILING)), said())
    coordinator.receive(1, said(gone="killed"), 100.0)
    text, _ = end_of(coordinator, 100.2)
    assert text == ""


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("killed for lack of memory", "] killed for lack of memory; it was at: "),
        ("terminated", "ended by SIGTERM"),
        ("orphaned", "the launcher is gone"),
    ],
)
def test_how_a_rank_went_is_told(how: str, words: str) -> None:
    coordinator = coordinator_of(said(), said())
    coordinator.receive(1, said(gone=how), 100.0)
    assert words in end_of(coordinator, 100.2)[0]


def test_positions_are_shown_once_to_whoever_asks() -> None:
    coordinator = coordinator_of(said(), said())
    coordinator.receive(0, said(show=True, stack=WAITING, process_state="S"), 100.0)
    coordinator.receive(1, said(show=True, stack=WORKING, process_state="S"), 100.1)
    texts = [
        t for tick in range(40) for t in coordinator.decide(100 + tick / 10).messages
    ]
    (text,) = texts
    assert text.startswith("where the ranks are:\n  rank 0 gpu01: training")


def test_a_heartbeat_is_read_as_it_was_written() -> None:
    descriptor = memory_file()
    try:
        ours, theirs = Heartbeat(descriptor), Heartbeat(descriptor)
        ours.beat("evaluation, with ü", 12, 30.0)
        ours.set_state(State.LEFT)
        found = theirs.read()
        assert (found.phase, found.step, found.limit_seconds, found.state) == (
            *("evaluation, with ü", 12, 30.0),
            State.LEFT,
        )
        assert 0 <= found.age_seconds < 5
        ours.beat("x" * 500)
        assert theirs.read().phase == "x" * 96
        assert theirs.read().state is State.LEFT
    finally:
        os.close(descriptor)


def test_the_main_threads_stack_is_the_last() -> None:
    frames = main_stack(WAITING)
    assert [f.line for f in frames] == [8, 21]
    assert is_waiting(frames)
    assert not is_waiting(main_stack(WORKING))
    assert main_stack("") == []
    assert describe_call(frames) == "me/mine.py:21 in <module>, in all_reduce"


def test_the_files_in_which_ranks_wait_for_others_are_there() -> None:
    folder = Path(mpitrain.__file__).parents[1]
    own = [name for name in WAITING_FILES if name.startswith("mpitrain/")]
    assert own
    assert all((folder / name).exists() for name in own)


DUMPS = """
import os, socket, threading
from mpitrain.watchdog.client import Watchdog

def busy():
    while True:
        exec("def f(n):\\n  return n if n == 0 else f(n - 1)\\nf(40)", {})

for _ in range(2):
    threading.Thread(target=busy, daemon=True).start()
ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
client = object.__new__(Watchdog)
client._control, client._dump = ours, os.memfd_create("stacks")
reader = threading.Thread(target=client._receive)
reader.start()
for _ in range(500):
    theirs.send(b'{"dump": true}')
theirs.close()
reader.join()
text = os.pread(client._dump, 1 << 24, 0).decode()
assert text.count("in busy") == 1000, text[-2000:]
os._exit(0)
"""


def test_stacks_beside_busy_threads_are_written_without_a_crash() -> None:
    """A signal's handler crashes there: 3 of 3 in Python 3.11, SIGSEGV."""
    done = subprocess.run([sys.executable, "-c", DUMPS], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


WITHOUT_MEMFD = """
import os, sys
del os.memfd_create
from mpitrain.mpi.shared_memory import share_memory
from mpitrain.watchdog.heartbeat import memory_file
file = memory_file()
os.write(file, b"mine")
memory, errors = share_memory(lambda it: [it], 0, [0], 4096, "x", is_allocated=True)
print(os.pread(file, 4, 0), os.get_inheritable(file), len(memory), errors)
"""


def test_a_python_without_memfd_create_has_memory_files() -> None:
    """As uv installs it: built with an old C library, on a system with a new one."""
    command = [sys.executable, "-c", WITHOUT_MEMFD]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.stdout == "b'mine' False 4096 ['']\n", done.stderr


HIDING = """
mount -o remount,hidepid=1 /proc || exit 77
# In a shell of its own, which is not process 1, and not replaced by its last command.
(PMI_RANK=0 "$1" -c '
import ctypes, os
from mpitrain.watchdog.process import launcher_name, launchers_of
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
ctypes.CDLL(None).prctl(4, 1)  # PR_SET_DUMPABLE: it may read of itself, as others may
try:
    open("/proc/1/stat").close()
except PermissionError:
    print(launchers_of(os.getpid()), launcher_name({"PMI_RANK": "0"}))
'; exit $?)
"""


def test_a_launcher_of_another_user_that_proc_hides_is_none() -> None:
    """As mpirun's daemon, where root has mounted /proc with hidepid=1."""
    unshare = ["unshare", "--mount", "--pid", "--fork", "--mount-proc"]
    command = [*unshare, "sh", "-c", HIDING, "sh", sys.executable]
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        pytest.skip("needs root, and unshare")
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode == 77 or "unshare:" in done.stderr:
        pytest.skip("needs namespaces")
    assert done.stdout == "[] \n", done.stderr


NO_THREAD = """
import os, threading
from mpitrain.launch.job import _start_watchdog
threading.stack_size(1 << 47)  # more than there can be; root has no limit of processes
try:
    _start_watchdog(60.0)
except Exception as error:
    print(type(error).__name__, error)
os._exit(0)
"""


def test_a_system_that_starts_no_thread_is_one_error() -> None:
    command = [sys.executable, "-c", NO_THREAD]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.stdout.startswith("LaunchError the watchdog's process did not start: ")
    assert "can't start new thread" in done.stdout
    assert "(ulimit -u)" in done.stdout


def test_a_kill_for_lack_of_memory_is_the_cause_of_a_death_soon_after_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "cgroups", lambda _: [tmp_path])
    events = tmp_path / "memory.events"
    events.write_text("oom_kill 0\n")
    ours, theirs = socket.socketpair()
    heartbeat, terminated = memory_file(), memory_file()
    with ours, theirs:
        sidecar = Sidecar(ours, Heartbeat(heartbeat), terminated, terminated, {})
        now = sidecar.oom_at
        events.write_text("oom_kill 1\n")  # of another process
        assert "lack of memory" in sidecar._cause_of_death(now)
        for tick in range(60):
            sidecar._count_oom_kills(now + tick * 0.25)
        assert "lack of memory" not in sidecar._cause_of_death(now + 15)
