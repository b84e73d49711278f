"""Disks that fill, that may only be read, that answer late, that are gone."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from launcher import Mpi
from resume_jobs import NUM_STEPS, Job, Runs

pytestmark = pytest.mark.usefixtures("warm_starts")

ALL = ("--checkpoint-every-steps", "6", "--keep-checkpoints", "None")
OFTEN = ("--checkpoint-every-steps", "2", "--keep-checkpoints", "None")


@pytest.fixture(scope="module")
def plain(openmpi: Mpi, tmp_path_factory: pytest.TempPathFactory) -> Runs:
    """A folder with one finished training of 2 ranks, `plain`, on a good disk."""
    made = Runs(mpi=openmpi, folder=tmp_path_factory.mktemp("plain"))
    done = made.run("plain", 2)
    assert done.status == 0, done.out + done.err
    return made


def assert_same_bits_as_plain(runs: Runs, name: str, plain: Runs) -> None:
    shutil.copytree(plain.dir("plain"), runs.dir("plain"))
    runs.assert_same_bits(name, "plain")


def mount(*words: str) -> None:
    """Mount something; where this user may not, the test is skipped."""
    done = subprocess.run(["mount", *words], check=False, capture_output=True)
    if done.returncode:
        if os.environ.get("CI") == "true":
            pytest.fail(f"mount {' '.join(words)}: {done.stderr!r}")
        pytest.skip("to mount is for root")


def umount(folder: Path) -> None:
    subprocess.run(["umount", "-l", str(folder)], check=True)


@contextlib.contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """A file system in memory, of that size; it goes with the test."""
    folder.mkdir()
    mount("-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder))
    try:
        yield folder
    finally:
        umount(folder)


def make_disk(image: Path) -> None:
    """Make a file system in a file."""
    with image.open("wb") as file:
        file.truncate(64 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], check=True)


def fill(folder: Path) -> Path:
    """Leave no room there; return the file that takes it. Called anew, it grows."""
    ballast = folder / "ballast"
    with ballast.open("ab", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(1024))
    return ballast


def test_a_full_disk_ends_no_training(openmpi: Mpi, tmp_path: Path) -> None:
    """A file system that fills, and has room again."""
    with small_disk(tmp_path / "runs", "512k") as disk:
        runs = Runs(mpi=openmpi, folder=tmp_path)
        job = runs.start("full", 2, *ALL, STEP_SECONDS="0.3")
        job.wait_for_checkpoint()
        ballast = fill(disk)
        job.wait_until(lambda: "training goes on, the next try" in job.said())
        assert "No space left on device" in job.said()
        ballast.unlink()
        assert job.end(120) == 0, job.said()
        assert job.said().count("the next try is in 30 s") == 1
        assert runs.rows("full")[-1]["step"] == NUM_STEPS
        assert [row["step"] for row in runs.rows("full") if row["event"] == "step"] == [
            *range(1, NUM_STEPS + 1)
        ]
        assert not list((disk / "full/checkpoints").glob(".step-*"))
        assert runs.checkpoints("full")[0].name == "step-00000024-epoch-4"


def test_a_disk_that_stays_full_is_an_error_at_the_end(
    openmpi: Mpi, tmp_path: Path
) -> None:
    with small_disk(tmp_path / "runs", "200k") as disk:
        runs = Runs(mpi=openmpi, folder=tmp_path)
        job = runs.start("full", 2, *ALL, STEP_SECONDS="0.2")
        job.wait_for_checkpoint()
        ballast = fill(disk)
        assert job.end(120) == 1, job.said()
        assert job.said().count("the last checkpoint could not be written") == 1
        assert "Traceback" not in job.said()
        newest = runs.checkpoints("full")[0]
        ballast.unlink()
        subprocess.run(
            ["mount", "-o", "remount,size=4m", str(disk)],
            check=True,
            capture_output=True,
        )
        done = runs.run("full", 2)
        assert done.status == 0, done.out + done.err
        assert f"resuming from runs/full/checkpoints/{newest.name}" in done.out


def steps_seen(runs: Runs, name: str) -> int:
    """How many steps rank zero has noted, on another disk."""
    notes = (runs.folder / f"notes-{name}").glob("*-0")
    return sum(len(file.read_text().splitlines()) for file in notes)


def wait_for_steps(runs: Runs, name: str, job: Job, num: int) -> None:
    before = steps_seen(runs, name)
    job.wait_until(lambda: steps_seen(runs, name) >= before + num)


@pytest.mark.slow
def test_a_disk_that_may_only_be_read_for_a_while_ends_no_training(
    openmpi: Mpi, tmp_path: Path, plain: Runs
) -> None:
    runs = Runs(mpi=openmpi, folder=tmp_path)
    job = runs.start("read", 2, *OFTEN, STEP_SECONDS="0.3")
    job.wait_for_checkpoint()
    folder = str(runs.dir("read") / "checkpoints")
    mount("--bind", folder, folder)
    try:
        mount("-o", "remount,bind,ro", folder)
        job.wait_until(lambda: "training goes on, the next try" in job.said())
        assert "Read-only file system" in job.said()
    finally:
        umount(Path(folder))
    assert job.end(120) == 0, job.said()
    assert runs.newest("read") == NUM_STEPS
    assert_same_bits_as_plain(runs, "read", plain)


def test_a_disk_that_answers_late_holds_up_no_step(
    openmpi: Mpi, tmp_path: Path, plain: Runs
) -> None:
    runs = Runs(mpi=openmpi, folder=tmp_path)
    make_disk(tmp_path / "image")
    (tmp_path / "runs").mkdir()
    mount("-o", "loop", str(tmp_path / "image"), str(tmp_path / "runs"))
    try:
        job = runs.start("late", 2, *OFTEN, STEP_SECONDS="0.4")
        job.wait_for_checkpoint()
        # Whoever writes there now waits.
        subprocess.run(["fsfreeze", "-f", str(tmp_path / "runs")], check=True)
        try:
            before = runs.newest("late")
            wait_for_steps(runs, "late", job, 8)
            assert runs.newest("late") <= before + 2
        finally:
            subprocess.run(["fsfreeze", "-u", str(tmp_path / "runs")], check=True)
        assert job.end(120) == 0, job.said()
        assert "could not be written" not in job.said()
        assert_same_bits_as_plain(runs, "late", plain)
    finally:
        umount(tmp_path / "runs")


@pytest.mark.slow
def test_a_disk_that_is_gone_ends_no_training_before_its_end(
    openmpi: Mpi, tmp_path: Path, plain: Runs
) -> None:
    """What was on it is whole, nothing is written where it was, and it goes on."""
    runs = Runs(mpi=openmpi, folder=tmp_path)
    folder, image = tmp_path / "runs", str(tmp_path / "image")
    make_disk(tmp_path / "image")
    folder.mkdir()
    mount("-o", "loop", image, str(folder))
    try:
        job = runs.start("gone", 2, *OFTEN, STEP_SECONDS="0.2")
        job.wait_for_checkpoint()
    finally:
        umount(folder)
    wait_for_steps(runs, "gone", job, 6)
    assert "training goes on, the next try" in job.said()
    assert job.end(120) == 1, job.said()
    assert job.said().count("the last checkpoint could not be written") == 1
    assert "Traceback" not in job.said()
    assert list(folder.iterdir()) == []
    time.sleep(1)  # the kernel lets go of the disk when its last user has
    mount("-o", "loop", image, str(folder))
    try:
        done = runs.run("gone", 2, *OFTEN)
        assert done.status == 0, done.out + done.err
        assert "resuming from runs/gone/checkpoints/step-" in done.out
        assert_same_bits_as_plain(runs, "gone", plain)
    finally:
        umount(folder)
