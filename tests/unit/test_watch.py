"""What `watch` makes of a run's files."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from run_folders import Part, make_run

from mpitrain.record.supervised import Restart, record_restart
from mpitrain.tools.jobs.supervisor import LINGER_SECONDS
from mpitrain.tools.sweep.config import SETTINGS
from mpitrain.tools.watch import GONE_SECONDS, View, WatchConfig, watch


def begin(at: float) -> dict[str, Any]:
    return {
        "event": "begin", "time": at, "world_size": 2, "num_nodes": 1,
        "start_seconds": 2.0, "total_steps": 1_000_000, "num_epochs": 4,
        "steps_per_epoch": 250_000, "global_batch_size": 64,
    }  # fmt: skip


def done(step: int, at: float, **more: float) -> list[dict[str, Any]]:
    """A step that took a second, and its pace."""
    pace = {
        "event": "throughput", "time": at, "epoch": 1, "step": step, "num_steps": 1,
        "num_samples": 64, "seconds": 1.0, "data_seconds": 0.1,
        "compute_seconds": 0.5, "communication_seconds": 0.2, "wait_seconds": 0.1,
        "slowest_rank": 0, "slowest_steps": 1, "late_seconds": 0.0, **more,
    }  # fmt: skip
    row = {"event": "step", "epoch": 1, "step": step, "train_loss": 1.0, "lr": 0.1}
    return [row | {"gradient_norm": 1.0}, pace]


def test_the_limit_of_a_job_is_not_that_of_the_next(tmp_path: Path) -> None:
    now = time.time()
    first = [begin(now - 60), *done(1, now - 50, seconds_left=3600.0)]
    second = [begin(now - 10), *done(2, now - 5)]

    def standing(view: View, *lines: dict[str, Any]) -> str:
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
        view.update()
        return view.state_line()

    view = View(tmp_path)
    assert "limit in" in standing(view, *first)
    assert "limit in" not in standing(view, second[0])
    assert "limit in" not in standing(view, *second[1:])
    assert "limit in" not in standing(View(tmp_path))  # that starts late


def test_a_job_is_timed_from_its_own_resume_and_not_from_an_earlier_one(
    tmp_path: Path,
) -> None:
    now = time.time()

    def resume(step: int, at: float) -> dict[str, Any]:
        return {
            "event": "resume", "time": at, "step": step, "epoch": 1,
            "world_size": 2, "checkpoint": f"step-{step}",
        }  # fmt: skip

    def first_step(view: View, *lines: dict[str, Any]) -> int:
        with (tmp_path / "metrics.jsonl").open("a") as file:
            file.writelines(json.dumps(line) + "\n" for line in lines)
        view.update()
        return view._lines._done

    view = View(tmp_path)
    assert first_step(view, begin(now - 60), resume(100, now - 60)) == 100
    assert first_step(view, begin(now - 10)) == 0  # its own is not there yet
    assert first_step(view, resume(200, now - 9)) == 200
    assert first_step(view, *done(201, now - 5)) == 200


def test_a_second_resume_from_a_checkpoint_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    now = time.time()
    kept = [begin(now - 60), *done(50, now - 50)]

    def resumed(view: View, at: float) -> int:
        resume = {"event": "resume", "time": at, "step": 50, "epoch": 1}
        rows = [*kept, begin(at), resume]
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / "metrics.jsonl").write_text(text)
        view.update()
        return capsys.readouterr().out.count("resumed from step 50")

    view = View(tmp_path)
    times = (now - 40, now - 40, now - 20)
    assert [resumed(view, at) for at in times] == [1, 0, 1]


def test_restarts_are_told_once_each(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    now = time.time()

    def restart(step: int) -> None:
        record_restart(
            tmp_path, Restart(time=now, step=step, error="rank 1 was killed")
        )

    lines = [begin(now - 60), *done(1, now - 50)]
    (tmp_path / "metrics.jsonl").write_text(
        "".join(json.dumps(it) + "\n" for it in lines)
    )
    restart(1)
    restart(4)
    view = View(tmp_path)
    view.introduce()
    line = "restarts: 2, the last after step 4: rank 1 was killed"
    assert line in capsys.readouterr().out
    view.update()
    assert "killed" not in capsys.readouterr().out
    restart(9)
    view.update()
    assert "restart 3 after step 9: rank 1 was killed" in capsys.readouterr().out
    view.update()
    assert "killed" not in capsys.readouterr().out


def test_a_failure_ends_it_unless_the_job_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    now, error = time.time(), "rank 1 was killed"
    result = tmp_path / "result.json"
    result.write_text(json.dumps({"status": "failed", "error": error}))
    (tmp_path / ".lock").touch()  # that nobody holds

    def end(ended: float, *, at_once: bool = False) -> str | None:
        os.utime(result, (ended, ended))
        view.update()
        return view.end_line(at_once=at_once)

    def restart(at: float) -> None:
        # The time in it is of another clock than those of the file server.
        record_restart(tmp_path, Restart(time=now - 900, step=4, error=error))
        os.utime(tmp_path / "restarts.jsonl", (at, at))

    view = View(tmp_path)
    assert end(now) is None  # `supervise` has not written of a restart yet
    assert end(now, at_once=True) == f"failed: {error}"
    with monkeypatch.context() as no_wait:
        no_wait.setattr("mpitrain.tools.watch.GONE_SECONDS", 0.0)
        assert end(now) == f"failed: {error}"
        restart(now)
        assert end(now - 1) is None
        assert end(now - 1, at_once=True) is None
        assert end(now + 1) == f"failed: {error}"  # the job that was started, too
    # It waits anew for what follows that one.
    assert end(now - 1) is None
    later = time.monotonic() + GONE_SECONDS
    monkeypatch.setattr(time, "monotonic", lambda: later)
    assert end(now + 1) is None
    # A restart that has not opened the run for so long does so no more.
    monkeypatch.setattr("mpitrain.tools.watch.GONE_SECONDS", 0.0)
    restart(now - 310)
    assert end(now - 320) == f"failed: {error}"


def test_it_waits_longer_than_supervise_for_the_end_of_mpirun() -> None:
    assert GONE_SECONDS > LINGER_SECONDS


def test_a_sweep_whose_lock_nobody_can_see_is_over_by_its_status(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As on a file system without locks."""
    (tmp_path / SETTINGS).write_text("{}")
    result = tmp_path / "result.json"
    result.write_text('{"status": "running"}')

    def end(_: float) -> None:
        result.write_text('{"status": "stopped", "stopped": "stopped: a signal"}')

    monkeypatch.setattr("mpitrain.tools.watch.is_held", lambda path: None)
    monkeypatch.setattr(time, "sleep", end)
    watch(WatchConfig(run=tmp_path))
    assert capsys.readouterr().out == "stopped: a signal\n"


def test_it_ends_in_silence_when_its_reader_has_gone(tmp_path: Path) -> None:
    """As in ``watch runs/NAME | head -1``."""
    run_dir = make_run(tmp_path / "run", (Part(world_size=2),))
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-m", "mpitrain", "watch", str(run_dir)],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
    )
    os.close(write)
    assert (done.stderr, done.returncode) == ("", -signal.SIGPIPE)
