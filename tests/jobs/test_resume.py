"""A training that was cut, and its command typed again, ends as if it had not been."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
from launcher import Mpi, find, slow
from resume_jobs import FLAGS, NUM_STEPS, Runs, jobs_of, steps_of

pytestmark = pytest.mark.usefixtures("warm_starts")

CAN_GO_ON = 75
LIMIT_SECONDS = 20
OFTEN = ("--checkpoint-every-steps", "4")
FSDP = ("--strategy", "fsdp")
DROPOUT = {"DROPOUT": "0.2", "NORM": "1"}


@pytest.fixture(scope="module")
def runs(openmpi: Mpi, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """A folder with one training of 2 ranks that was never cut: `plain`."""
    made = Runs(mpi=openmpi, folder=tmp_path_factory.mktemp("runs"), variables=DROPOUT)
    # Cold: forks of one server would have one hash seed with those that are compared.
    cold = {"MPITRAIN_FORK_SERVER": "none"}
    done = made.run("plain", 2, "--checkpoint-every-epochs", "None", **cold)
    assert done.status == 0, done.out + done.err
    return made


@pytest.mark.slow
def test_a_clock_that_is_set_changes_nothing(runs: Runs) -> None:
    flags = ("--checkpoint-every-minutes", "30", "--time-limit", "1:00:00")
    often = ("--checkpoint-every-epochs", "None", *flags)
    done = runs.run("clock", 2, *often, CLOCK_STEPS="3 8 13", STEP_SECONDS="0.2")
    assert done.status == 0, done.out + done.err
    runs.assert_same_bits("clock", "plain")
    assert len(runs.checkpoints("clock")) == 1  # the last one


@pytest.mark.parametrize("fault", ["kill", *map(slow, ("segv", "raise", "exit"))])
def test_after_a_fault_the_same_command_finishes(fault: str, runs: Runs) -> None:
    name = f"fault-{fault}"
    done = runs.run(
        name,
        2,
        *OFTEN,
        FAULT=fault,
        FAULTY_RANK="1",
        FAULT_STEP="15",
        FAULT_TIME=str(runs.folder / "time"),
        STEP_SECONDS="0.1",
    )
    assert done.status not in (0, CAN_GO_ON), done.out + done.err
    done = runs.run(name, 2, *OFTEN)
    assert done.status == 0, done.out + done.err
    runs.assert_same_bits(name, "plain")
    assert 4 <= runs.resumed_at(name)[0] < 15, done.out
    assert "resuming from " in done.out


@pytest.mark.parametrize(
    ("how", "mpi_name"),
    [
        ("TERM", "openmpi-5"),
        slow("TERM", "openmpi-4.1"),
        ("TERM", "mpich"),
        # MPICH's mpiexec dies of USR2 (tried): docs/howto/resume.md says so.
        *(slow("USR2", name) for name in ("openmpi-5", "openmpi-4.1")),
        ("file", "openmpi-5"),  # of these two an MPI knows nothing
        slow("time", "openmpi-5"),
    ],
)
def test_it_stops_in_time_and_goes_on(how: str, mpi_name: str, runs: Runs) -> None:
    mine = Runs(mpi=find(mpi_name), folder=runs.folder, variables=DROPOUT)
    name = f"stop-{how}-{mpi_name}"
    more = ("--time-limit", str(LIMIT_SECONDS)) if how == "time" else ()
    slow = "1.0" if how == "time" else "0.2"
    started = time.time()
    job = mine.start(name, 2, *more, STEP_SECONDS=slow)
    job.wait_for_checkpoint()
    if how == "USR2":
        job.process.send_signal(signal.SIGUSR2)
    elif how == "TERM":
        os.kill(job.ranks()[1], signal.SIGTERM)
    elif how == "file":
        (mine.dir(name) / "stop").touch()
    assert job.end() == CAN_GO_ON, job.said()
    written = mine.dir(name) / "result.json"
    if how == "time":
        assert written.stat().st_mtime - started < LIMIT_SECONDS
    result = json.loads(written.read_text())
    assert result["status"] == "stopped"
    assert "the same command resumes from here" in job.said()
    assert "stopped, not failed: the exit status is 75" in job.said()
    if how == "file":  # touched after the stop, it is for the next job
        os.utime(mine.dir(name) / "stop", (time.time() + 1,) * 2)
        done = mine.run(name, 2)
        assert (done.status, "remove it" in done.out) == (CAN_GO_ON, True)
        os.utime(mine.dir(name) / "stop", (started,) * 2)
    done = mine.run(name, 2)
    assert done.status == 0, done.out + done.err
    assert len(mine.resumed_at(name)) == 1
    assert 1 <= mine.resumed_at(name)[0] < NUM_STEPS
    runs.assert_same_bits(name, "plain")


def test_a_training_that_was_stopped_with_all_done_is_finished(runs: Runs) -> None:
    """Its signal came at the last step, or it was killed while it finished."""
    shutil.copytree(runs.dir("plain"), runs.dir("all-done"))
    file = runs.dir("all-done") / "result.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"status": "stopped"}))
    (runs.dir("all-done") / "model.pt").unlink()
    done = runs.run("all-done", 2)
    assert done.status == 0, done.out + done.err
    assert json.loads(file.read_text())["status"] == "finished"
    assert runs.resumed_at("all-done") == [NUM_STEPS]
    runs.assert_same_bits("all-done", "plain")


def test_mpirun_may_be_killed_in_any_way(runs: Runs) -> None:
    """Open MPI's gives ranks a quarter of a second on TERM: nothing is lost by that."""
    for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGINT):
        before = runs.newest("launcher")
        job = runs.start("launcher", 2, *OFTEN, STEP_SECONDS="0.1")
        job.wait_until(
            lambda: runs.newest("launcher") > before  # noqa: B023
        )
        job.process.send_signal(number)
        assert job.end() != 0
    done = runs.run("launcher", 2)
    assert done.status == 0, done.out + done.err
    runs.assert_same_bits("launcher", "plain")


def test_a_training_passes_through_2_3_and_1_ranks(
    openmpi: Mpi, tmp_path: Path
) -> None:
    """Each sample of an epoch once, along the steps that the weights descend from."""
    runs = Runs(mpi=openmpi, folder=tmp_path, flags=(*FLAGS, "--precision", "fp64"))
    assert runs.run("plain", 1).status == 0
    expected = steps_of(tmp_path / "notes-plain", "*")
    assert len(expected) == NUM_STEPS
    for size, strategy in ((2, "ddp"), (3, "fsdp"), (1, "single")):
        notes = tmp_path / "notes-cut"
        began = len(jobs_of(notes)) if notes.exists() else 0
        job = runs.start("cut", size, "--strategy", strategy, STEP_SECONDS="0.1")
        job.wait_until(
            lambda: (
                len(jobs_of(tmp_path / "notes-cut")) > began  # noqa: B023
            )
        )
        time.sleep(0.3)
        job.process.send_signal(signal.SIGUSR2)
        assert job.end() == CAN_GO_ON, job.said()
    done = runs.run("cut", 2, "--strategy", "fsdp")
    assert done.status == 0, done.out + done.err
    runs.assert_close("cut", "plain")
    marks = [0, *runs.resumed_at("cut"), NUM_STEPS]
    assert len(marks) == 5
    for job, start, stop in zip(
        jobs_of(tmp_path / "notes-cut"), marks[:-1], marks[1:], strict=True
    ):
        assert stop > start
        steps = steps_of(tmp_path / "notes-cut", job)
        assert steps[: stop - start] == expected[start:stop]


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        ("--strategy", "fsdp", "--optimizer", "adamw", "--ema-decay", "0.9"),
        # The same names and shapes, first whole, then sharded.
        ("--probe-epochs", "1", "--epochs", "3", "--momentum", "0", *FSDP),
        ("--precision", "fp16", "--strategy", "fsdp"),
        ("--shard-optimizer", "--optimizer", "adam", "--micro-batch-size", "3"),
        ("--precision", "bf16", "--optimizer", "nadam", "--clip-grad-norm", "1"),
        ("--probe-epochs", "2", "--epochs", "2", "--ema-decay", "0.9"),
    ],
    ids=" ".join,
)
def test_whatever_learns_goes_on(flags: tuple[str, ...], runs: Runs) -> None:
    """Optimizers, averages, scales and stages, sharded or not."""
    mine = Runs(mpi=runs.mpi, folder=runs.folder, flags=(*FLAGS, *flags))
    names = [f"{what}-{abs(hash(flags))}" for what in ("plain", "cut")]
    done = mine.run(names[0], 2)
    assert done.status == 0, done.out + done.err
    job = mine.start(names[1], 2, *OFTEN, STEP_SECONDS="0.3")
    job.wait_until(lambda: mine.newest(names[1]) > 0)
    time.sleep(0.3)
    (mine.dir(names[1]) / "stop").touch()
    assert job.end() == CAN_GO_ON, job.said()
    (mine.dir(names[1]) / "stop").unlink()
    done = mine.run(names[1], 2)
    assert done.status == 0, done.out + done.err
    assert mine.resumed_at(names[1])
    mine.assert_same_bits(names[1], names[0])


@pytest.mark.parametrize(
    ("data", "workers"),
    [slow("series", "2"), ("cut_series", "2"), slow("cut_series", "0")],
)
def test_a_stream_goes_on_where_it_was(
    data: str, workers: str, openmpi: Mpi, tmp_path: Path
) -> None:
    """In the middle of an epoch; a set that ranks read in parts, too."""
    flags = (*FLAGS, "--precision", "fp64", "--epochs", "2")
    flags = (*flags, "--data", f"custom:{data}", "--num-workers", workers)
    runs = Runs(mpi=openmpi, folder=tmp_path, flags=flags)
    job = runs.start("cut", 3, STEP_SECONDS="0.4")
    job.wait_until(lambda: jobs_of(tmp_path / "notes-cut"))
    time.sleep(0.5)
    (runs.dir("cut") / "stop").touch()
    assert job.end() == CAN_GO_ON, job.said()
    (runs.dir("cut") / "stop").unlink()
    done = runs.run("cut", 2)
    assert done.status == 0, done.out + done.err
    epochs = [row for row in runs.rows("cut") if row["event"] == "epoch"]
    marks = [0, *runs.resumed_at("cut"), epochs[-1]["step"]]
    assert any(mark % epochs[0]["step"] for mark in marks[1:-1])
    seen: list[int] = []
    for job_id, start, stop in zip(
        jobs_of(tmp_path / "notes-cut"), marks[:-1], marks[1:], strict=True
    ):
        for step in steps_of(tmp_path / "notes-cut", job_id)[: stop - start]:
            seen += step
    # A rank that is dry walks along with sample 0, at weight zero.
    assert sorted(filter(None, seen)) == sorted([*range(1, 96), *range(1, 96)])
    assert [row["train_samples"] for row in epochs] == [96, 96]
    if data == "series":
        assert runs.run("plain", 2).status == 0
        runs.assert_close("cut", "plain")
