"""Folders of checkpoints in memory: private, and gone with their job."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from single_process import LONE, lone_communicator

from mpitrain.checkpoint import memory_folder
from mpitrain.checkpoint.layout import Checkpoint
from mpitrain.checkpoint.memory_folder import LEFT_SECONDS, MemoryFolder
from mpitrain.checkpoint.memory_level import best_interval
from mpitrain.checkpoint.run_checkpoints import RunCheckpoints
from mpitrain.record.supervised import (
    Supervision,
    begin_start,
    read_memory_step,
    write_memory_step,
)
from mpitrain.watchdog import process

HOLD = """
import fcntl, sys, time
file = open(sys.argv[1], "r+b")
fcntl.lockf(file, fcntl.LOCK_EX)
print(flush=True)
time.sleep(60)
"""


@pytest.fixture(autouse=True)
def shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(memory_folder, "SHARED_MEMORY", tmp_path)
    return tmp_path


def opened(token: str) -> MemoryFolder:
    folder = MemoryFolder(LONE, token, "a")
    folder.open()
    return folder


def age(folder: MemoryFolder) -> None:
    then = time.time() - LEFT_SECONDS - 1
    os.utime(folder.path / "lock", (then, then))


def test_a_folder_of_a_dead_job_is_removed_by_the_next_job() -> None:
    dead, young = opened("dead"), opened("young")
    age(dead)
    opened("mine")
    assert not dead.path.exists()
    assert young.path.exists(), "it may be between two starts"


def test_a_folder_whose_ranks_live_stays() -> None:
    opened("mine")  # makes the folder of both
    other = MemoryFolder(LONE, "other", "a")
    other.path.mkdir()
    (other.path / "lock").touch()
    words = [sys.executable, "-c", HOLD, str(other.path / "lock")]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as job:
        assert job.stdout is not None
        job.stdout.readline()
        age(other)
        opened("mine")
        job.kill()
    assert other.path.exists()


def test_the_lock_is_ours_once_a_rank_of_before_has_ended() -> None:
    folder = opened("mine")
    lock = str(folder.path / "lock")
    words = [sys.executable, "-c", HOLD, lock]
    os.close(folder._lock)  # as a rank that ends
    with subprocess.Popen(words, stdout=subprocess.PIPE) as before:
        assert before.stdout is not None
        before.stdout.readline()
        folder = opened("mine")
        before.kill()
    folder.keep_only([])
    age(folder)
    code = "from test_memory_folder import *; memory_folder._remove_if_left(Path(ARG))"
    code = code.replace("ARG", repr(str(folder.path)))
    subprocess.run([sys.executable, "-c", code], check=True, cwd=Path(__file__).parent)
    assert folder.path.exists(), "another job has removed it"


def test_a_restart_says_that_memory_was_emptied(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    status = tmp_path / "status"
    monkeypatch.setenv("MPITRAIN_STATUS_FILE", str(status))
    checkpoints = RunCheckpoints(tmp_path / "run")

    def said(step: int, num_restarts: int = 1, *, is_removed: bool = False) -> bool:
        begin_start(
            os.environ, Supervision(token="t", seconds=1.0, num_restarts=num_restarts)
        )
        write_memory_step(step)
        if is_removed:
            MemoryFolder(LONE, "t", "a").remove()
            assert read_memory_step(os.environ) == step  # which counts as progress
        caplog.clear()
        checkpoints._find_in_memory(LONE, lone_communicator())
        return f"step {step} is no longer in memory" in caplog.text

    def empty() -> None:
        memory_folder.remove_all("t")

    assert not said(5, num_restarts=0)
    empty()
    assert not said(0)
    empty()
    assert said(5)
    assert not said(5), "the folder was there: what it had was of no use"
    empty()
    assert not said(5, is_removed=True)
    empty()
    path = tmp_path / "run/checkpoints/step-00000007"
    on_disk = Checkpoint(step=7, epoch=0, path=path)
    monkeypatch.setattr(checkpoints, "reader", SimpleNamespace(checkpoint=on_disk))
    assert not said(7)
    empty()
    assert said(8)


def test_the_last_job_leaves_nothing_behind(shared_memory: Path) -> None:
    first, second = opened("first"), opened("second")
    first.remove()
    assert second.path.exists()
    second.remove()
    assert not [*shared_memory.iterdir()]


def test_nobody_else_can_read_or_write_there(shared_memory: Path) -> None:
    folder = opened("mine")
    assert folder.path.stat().st_mode & 0o777 == 0o700
    folder.path.parent.chmod(0o777)
    with pytest.raises(OSError, match="is not a folder of this user alone"):
        opened("other")


def test_what_a_killed_job_has_half_written_is_removed() -> None:
    folder = opened("mine")
    half = folder.path / "checkpoints" / ".step-00000005.abc-1"
    half.mkdir()
    opened("mine")
    assert not half.exists()


def test_checkpoints_are_more_frequent_with_more_faults_and_never_too_dear() -> None:
    assert best_interval(0.01, 36000, 0) > best_interval(0.01, 36000, 60)
    for cost in (0.001, 0.1, 3.0):
        for num_faults in (0, 5, 1000):
            assert cost / best_interval(cost, 600, num_faults) <= 0.01


@pytest.mark.parametrize("version", [1, 2])
def test_the_memory_that_the_kernel_lets_the_job_have_is_the_limit(
    version: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is in a tmpfs counts for the cgroup; files that were read are given back."""
    names = ("max", "current") if version == 2 else ("limit_in_bytes", "usage_in_bytes")
    cache = "inactive_file" if version == 2 else "total_inactive_file"
    for number, limit in enumerate(("5000", "1000", "max")):
        (folder := tmp_path / f"{number}").mkdir()
        (folder / f"memory.{names[0]}").write_text(limit)
        (folder / f"memory.{names[1]}").write_text("700")
        (folder / "memory.stat").write_text(f"anon 500\n{cache} 200\n")
    folders = [*tmp_path.iterdir()]
    monkeypatch.setattr(process, "cgroups", lambda controller: folders)
    assert process.memory_left() == 1000 - 700 + 200
    assert opened("mine").free_bytes() == 1000 - 700 + 200
