"""One name, one training: gone on with, refused, begun anew; broken checkpoints."""

from __future__ import annotations

import os
import re
import shutil
import signal
import time
from pathlib import Path

import pytest
from launcher import Mpi, slow
from resume_jobs import Runs

pytestmark = pytest.mark.usefixtures("warm_starts")

CAN_GO_ON = 75
ALL = ("--checkpoint-every-steps", "6", "--keep-checkpoints", "None")


@pytest.fixture(scope="module")
def runs(openmpi: Mpi, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """A folder with one finished training of 2 ranks, `plain`; it took 8 s."""
    made = Runs(mpi=openmpi, folder=tmp_path_factory.mktemp("runs"))
    done = made.run("plain", 2, *ALL, STEP_SECONDS="0.3")
    assert done.status == 0, done.out + done.err
    return made


def unfinished(runs: Runs, name: str) -> Path:
    """A copy of `plain` whose job ended before its last step."""
    folder = runs.dir(name)
    shutil.copytree(runs.dir("plain"), folder)
    (folder / "result.json").write_text('{"status": "failed"}')
    for path in (folder / "checkpoints").glob("step-00000024*"):
        shutil.rmtree(path)
    return folder


def test_a_finished_run_says_so(runs: Runs) -> None:
    before = {path: path.stat().st_mtime for path in runs.dir("plain").rglob("*")}
    done = runs.run("plain", 3)
    assert done.status == 0
    assert re.match(r"finished: val_accuracy .*Nothing to do", done.out)
    after = {path: path.stat().st_mtime for path in runs.dir("plain").rglob("*")}
    after[runs.dir("plain") / ".lock"] = before[runs.dir("plain") / ".lock"]
    assert after == before


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--lr", "0.1"), r"lr: 0\.05 -> 0\.1"),
        slow(("--epochs", "5", "--seed", "2"), r"epochs: 4 -> 5; seed: 1 -> 2"),
        slow(("--model", "custom:Marking"), r"model: custom:Learner -> custom:Marking"),
        slow(("--data", "custom:few"), r"data: custom:numbered -> custom:few"),
        slow(("--global-batch-size", "8"), r"global_batch_size: 16 -> 8"),
    ],
)
def test_another_training_of_that_name_is_refused(
    flags: tuple[str, ...], words: str, runs: Runs
) -> None:
    done = runs.run("plain", 2, *flags)
    assert done.status == 2
    said = done.out + done.err
    assert (
        len(
            re.findall(
                rf"run plain was begun with another configuration: {words}", said
            )
        )
        == 1
    )
    assert "--new-run" in said
    assert "Traceback" not in said


def test_never_and_anew(runs: Runs) -> None:
    before = (runs.dir("plain") / "result.json").read_bytes()
    done = runs.run("plain", 2, "--resume", "never")
    assert done.status == 2
    assert (done.out + done.err).count("runs/plain exists") == 1
    assert (runs.dir("plain") / "result.json").read_bytes() == before
    done = runs.run("plain", 2, "--new-run", "--lr", "0.1")
    assert done.status == 0, done.out + done.err
    assert (runs.dir("plain-2") / "model.pt").exists()
    assert runs.resumed_at("plain-2") == []


def test_another_run_may_begin_where_this_one_is(runs: Runs) -> None:
    chosen = runs.checkpoints("plain")[2]
    flags = ("--resume", str(chosen), "--epochs", "5")
    done = runs.run("longer", 2, *flags)
    assert done.status == 0, done.out + done.err
    assert f"resuming from runs/plain/checkpoints/{chosen.name}" in done.out
    assert "changed since then: epochs: 4 -> 5" in done.out
    assert runs.resumed_at("longer") == [int(chosen.name.split("-")[1])]
    assert runs.rows("longer")[-1]["step"] == 30
    done = runs.run("longer", 2, *flags)  # itself, not the other one again
    assert (done.status, "Nothing to do" in done.out) == (0, True)


def test_another_run_may_learn_otherwise_from_there(runs: Runs) -> None:
    chosen = runs.checkpoints("plain")[2]
    flags = ("--optimizer", "adamw", "--ema-decay", "0.9", "--precision", "bf16")
    done = runs.run("otherwise", 2, "--resume", str(chosen), *flags)
    assert done.status == 0, done.out + done.err
    assert "changed since then: optimizer: sgd -> adamw" in done.out


def test_one_may_go_back(runs: Runs) -> None:
    folder = unfinished(runs, "back")
    chosen = runs.checkpoints(folder.name)[-1]
    newer = [path.name for path in runs.checkpoints(folder.name) if path != chosen]
    done = runs.run("back", 2, "--resume", str(chosen))
    assert done.status == 0, done.out + done.err
    runs.assert_same_bits("back", "plain")
    assert runs.resumed_at("back") == [int(chosen.name.split("-")[1])]
    for name in newer:
        assert (folder / "checkpoints" / f"{name}.left").is_dir()


@pytest.mark.slow  # tests/unit/test_checkpoints.py has the message
@pytest.mark.parametrize("path", ["nowhere", "runs", "runs/plain/logs"])
def test_a_path_that_is_no_checkpoint_is_told(path: str, runs: Runs) -> None:
    done = runs.run("plain", 2, "--new-run", "--resume", path)
    assert done.status == 2
    assert "is no checkpoint" in done.out + done.err
    assert "Traceback" not in done.out + done.err


@pytest.mark.parametrize("num_ranks", [slow(1), 3])
def test_a_broken_checkpoint_is_named_and_the_one_before_used(
    num_ranks: int, runs: Runs
) -> None:
    """Each of the newest has another of its files damaged in another way."""
    name = f"broken-{num_ranks}"
    folder = unfinished(runs, name)
    newest = runs.checkpoints(folder.name)
    broken = {
        "rank-0.bin": newest[0] / "rank-0.bin",
        "rank-1.bin": newest[1] / "rank-1.bin",
        "metadata.json": newest[2] / "metadata.json",
    }
    data = bytearray(broken["rank-0.bin"].read_bytes())
    data[len(data) // 3] ^= 1
    broken["rank-0.bin"].write_bytes(data)
    broken["rank-1.bin"].unlink()
    os.truncate(broken["metadata.json"], 10)
    done = runs.run(name, num_ranks)
    assert done.status == 0, done.out + done.err
    warnings = [line for line in done.err.splitlines() if "is not used" in line]
    assert len(warnings) == 3, done.err
    for (file, path), line in zip(broken.items(), warnings, strict=True):
        assert path.parent.name in line
        assert file in line
        assert path.parent.with_name(path.parent.name + ".broken").is_dir()
    assert runs.resumed_at(name) == [int(newest[3].name.split("-")[1])]
    if num_ranks == 3:
        runs.assert_close(name, "plain", 1e-4)


def test_a_second_job_of_that_name_is_refused(runs: Runs) -> None:
    # Cold: what holds the folder is stopped, and killed.
    job = runs.start("twice", 2, STEP_SECONDS="0.5", MPITRAIN_FORK_SERVER="none")
    job.wait_for_checkpoint()
    # Its holder is stopped: it still holds it. And dead: it does not.
    for pid in job.ranks():
        os.kill(pid, signal.SIGSTOP)
    started = time.monotonic()
    done = runs.run("twice", 1)
    assert done.status == 2, done.out + done.err
    assert f"in use: process {job.ranks()[0]} on " in done.out + done.err
    assert time.monotonic() - started < 40
    for pid in job.ranks():
        os.kill(pid, signal.SIGKILL)
    assert job.end() != 0
    done = runs.run("twice", 2)
    assert done.status == 0, done.out + done.err
    runs.assert_same_bits("twice", "plain")
