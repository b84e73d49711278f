"""Hangs have names: who did not arrive, where it was, and status 76 in time."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from launcher import Done, Mpi, children_of, environment, mpirun, slow, wait_until_gone

HANG_SECONDS = 3
GONE_SECONDS = HANG_SECONDS + 15

HEAD = """
import ctypes, os, signal, sys, time
from pathlib import Path
import mpitrain
"""

TRAINING = """
job = mpitrain.init(hang_timeout_seconds=3, start_timeout_seconds=60)
with job as world:
    import torch, torch.distributed as dist
    Path(f"pid-{world.rank}").write_text(str(os.getpid()))
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)

    def stuck_here():
        Path("time").write_text(str(time.time()))
        FAULT

    for step in range(1, 5):
        weight.grad = torch.ones(2)
        if step == 3 and world.rank == 1:
            stuck_here()
        dist.all_reduce(weight.grad)
        optimizer.step()
"""


def run(mpi: Mpi, script: str, folder: Path, num_ranks: int = 3) -> Done:
    (folder / "script.py").write_text(HEAD + script)
    return mpirun(mpi, num_ranks, "script.py", cwd=folder, timeout_seconds=90)


def check_gone(done: Done, folder: Path, seconds: float = GONE_SECONDS) -> None:
    pids = [int(file.read_text()) for file in folder.glob("pid-*")]
    assert done.ended - float((folder / "time").read_text()) < seconds
    wait_until_gone(pids)


@pytest.mark.parametrize(
    ("mpi", "fault", "where"),
    [
        slow("openmpi-5", "time.sleep(1000)", "script.py:15 in stuck_here"),
        ("openmpi-4.1", "while True: pass", "script.py:15 in stuck_here"),
        (
            "mpich",
            "os.kill(os.getpid(), signal.SIGSTOP)",
            "stopped by a signal (SIGSTOP)",
        ),
        # In C with the interpreter's lock held: no Python runs on this rank any more.
        (
            "mpich",
            "lock = ctypes.create_string_buffer(64)\n"
            "        for _ in range(2): ctypes.PyDLL(None).pthread_mutex_lock(lock)",
            "script.py:16 in stuck_here",
        ),
    ],
    ids=["sleep", "loop", "stopped", "locked"],
    indirect=["mpi"],
)
def test_a_rank_that_stands_still_is_named_and_the_job_ends_with_76(
    mpi: Mpi, fault: str, where: str, tmp_path: Path
) -> None:
    num_ranks = 3 if "sleep" in fault else 2
    done = run(mpi, TRAINING.replace("FAULT", fault), tmp_path, num_ranks)
    assert done.status == 76, done.err
    check_gone(done, tmp_path)
    (line,) = done.ours
    assert line.startswith(f"[rank 1/{num_ranks} ")
    assert "hang: no rank has made progress for" in line
    said = done.err + done.out
    arrived = said.partition("did not arrive:")[2]
    first, _, rest = arrived.partition("waiting for them:")
    assert re.search(
        rf"rank 1 \S+: training, 2 steps done, .*{re.escape(where)}", first
    )
    others = "ranks 0,2" if num_ranks == 3 else "rank 0"
    assert re.search(
        rf"{others} \S+: training, 2 steps done, .*script.py:2\d in .*, in all_reduce",
        rest,
    )


def test_alone_a_hang_ends_with_76(openmpi: Mpi, tmp_path: Path) -> None:
    """Of a script without a word of ours, where `run` is asked to watch it."""
    (tmp_path / "script.py").write_text(
        "import time, torch\n"
        "weight = torch.nn.Parameter(torch.ones(1))\n"
        "optimizer = torch.optim.SGD([weight])\n"
        "for step in range(2):\n"
        "    weight.square().sum().backward()\n"
        "    optimizer.step()\n"
        "time.sleep(1000)\n"
    )
    ours = ("-m", "mpitrain", "run", "--hang-timeout", str(HANG_SECONDS))
    done = subprocess.run(
        ["timeout", "-k", "5", "60", sys.executable, *ours, "script.py"],
        cwd=tmp_path,
        env=environment(openmpi),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 76, done.stderr
    assert "[rank 0/1 " in done.stderr
    assert "training, 2 steps done" in done.stderr


def test_a_rank_that_left_early_is_named(openmpi: Mpi, tmp_path: Path) -> None:
    script = TRAINING.replace("FAULT", "sys.exit(0)")
    done = run(openmpi, script, tmp_path, num_ranks=2)
    assert done.status == 76
    (line,) = done.ours
    assert line.startswith("[rank 1/2 ")
    assert "left with status 0 (last at: training)" in done.err


def test_a_hang_of_a_training_has_stacks_in_every_log(
    openmpi: Mpi, tmp_path: Path
) -> None:
    words = ("-m", "mpitrain", "--name", "r", "--model", "custom:Net")
    done = mpirun(
        openmpi,
        2,
        *(*words, "--hang-timeout", str(HANG_SECONDS)),
        cwd=tmp_path,
        timeout_seconds=90,
        FAULT="hang",
        FAULT_STEP="3",
        FAULTY_RANK="1",
        FAULT_TIME=str(tmp_path / "time"),
    )
    assert done.status == 76, done.err
    check_gone(done, tmp_path)
    (line,) = done.ours
    assert line.startswith("[rank 1/2 ")
    logs = [(tmp_path / f"runs/r/logs/rank-{r}.log").read_text() for r in range(2)]
    assert all("most recent call first" in log for log in logs)
    assert "in strike" in logs[1]
    result = json.loads((tmp_path / "runs/r/result.json").read_text())
    assert result["status"] == "failed"
    assert "hang: no rank has made progress" in result["error"]
    ends = []
    for file in sorted((tmp_path / "runs/r/times").glob("rank-*.jsonl")):
        ends.append(json.loads(file.read_text().splitlines()[-1]))
        assert isinstance(ends[-1], dict), f"{file.name} has no end"
    assert [end["phase"] for end in ends] == ["communication", "forward"]
    assert all(HANG_SECONDS <= end["seconds"] < 60 for end in ends)


def test_honest_work_that_tells_is_no_hang(openmpi: Mpi, tmp_path: Path) -> None:
    """One rank works for long and says so; the others wait for it."""
    fault = 'for _ in range(7): time.sleep(1); job.progress("writing")'
    done = run(openmpi, TRAINING.replace("FAULT", fault), tmp_path, num_ranks=2)
    assert done.status == 0, done.err
    assert done.ours == []


@pytest.mark.parametrize(
    ("mpi", "fault"),
    [
        ("openmpi-5", "os.kill(os.getpid(), 19)"),
        *(slow(name, "time.sleep(8)") for name in ("openmpi-4.1", "mpich")),
    ],
    indirect=["mpi"],
)
def test_usr1_to_mpirun_shows_where_all_are_and_changes_nothing(
    mpi: Mpi, fault: str, tmp_path: Path
) -> None:
    script = TRAINING.replace("FAULT", fault).replace("seconds=3", "seconds=300")
    (tmp_path / "script.py").write_text(HEAD + script)
    job = start(mpi, tmp_path)
    try:
        wait_for(tmp_path / "time")
        time.sleep(1)
        job.send_signal(signal.SIGUSR1)
        time.sleep(3)
        if "kill" in fault:
            os.kill(int((tmp_path / "pid-1").read_text()), signal.SIGCONT)
        out, _ = job.communicate(timeout=60)
    finally:
        job.kill()
    assert job.returncode == 0, out
    assert out.count("where the ranks are:") == 1
    assert re.search(r"rank 1 \S+: training, 2 steps done", out)
    assert re.search(
        r"rank 0 \S+: training, 2 steps done, .*script.py:2\d in .*, in all_reduce", out
    )


def start(mpi: Mpi, folder: Path) -> subprocess.Popen[str]:
    start = (str(mpi.mpirun), "-np", "2", *mpi.flags)
    return subprocess.Popen(
        [*start, sys.executable, "script.py"],
        cwd=folder,
        env=environment(mpi),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def wait_for(file: Path, seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not (file.exists() and file.read_text()):
        assert time.monotonic() < end, f"{file} did not come"
        time.sleep(0.05)


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_job_finishes_without_the_sidecar_of_rank_zero(
    openmpi: Mpi, number: int, tmp_path: Path
) -> None:
    """The kernel may have chosen it for lack of memory; that is no reason to end."""
    fault = 'Path("step").write_text("3")'
    script = TRAINING.replace("FAULT", fault).replace("range(1, 5)", "range(1, 100)")
    script = script.replace("optimizer.step()", "optimizer.step(); time.sleep(0.1)")
    (tmp_path / "script.py").write_text(HEAD + script)
    job = start(openmpi, tmp_path)
    try:
        wait_for(tmp_path / "step")
        (sidecar,) = children_of(int((tmp_path / "pid-0").read_text()))
        os.kill(sidecar, number)
        out, _ = job.communicate(timeout=60)
    finally:
        job.kill()
        with contextlib.suppress(ProcessLookupError):
            os.kill(sidecar, signal.SIGKILL)
    assert job.returncode == 0, out


@pytest.mark.parametrize(
    "sidecars_too", [slow(True), False], ids=["scheduler", "ctrl-z"]
)
def test_a_job_that_is_suspended_as_a_whole_goes_on(
    openmpi: Mpi, sidecars_too: bool, tmp_path: Path
) -> None:
    fault = 'Path("step").write_text("3")'
    script = TRAINING.replace("FAULT", fault).replace("range(1, 5)", "range(1, 60)")
    script = script.replace("optimizer.step()", "optimizer.step(); time.sleep(0.1)")
    (tmp_path / "script.py").write_text(HEAD + script)
    job = start(openmpi, tmp_path)
    try:
        wait_for(tmp_path / "step")
        pids = [int((tmp_path / f"pid-{rank}").read_text()) for rank in range(2)]
        if sidecars_too:
            pids += [pid for rank in pids for pid in children_of(rank)]
        for number in (signal.SIGSTOP, signal.SIGCONT):
            for pid in pids:
                os.kill(pid, number)
            time.sleep(HANG_SECONDS + 5)
        out, _ = job.communicate(timeout=60)
    finally:
        job.kill()
    assert job.returncode == 0, out
    assert "hang" not in out
