"""Data that is broken, missing or not the same for all: one clear error, in time."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from data_files import picture, write_folder, write_mnist, write_tar
from launcher import (
    Done,
    Mpi,
    children_of,
    environment,
    mpirun,
    rows,
    send_signal,
    survivors,
)

pytestmark = pytest.mark.xdist_group("broken_data")  # a fixture that trains, once

MANY_TRAININGS = Path(__file__).parent / "many_trainings.py"
TRAIN = ("-m", "mpitrain", "--name", "r", "--image-size", "16")
NO_INTERNET = {f"{kind}_proxy": "http://127.0.0.1:9" for kind in ("http", "https")}
GONE_SECONDS = 15.0


def train(mpi: Mpi, folder: Path, *flags: str, num_ranks: int = 3) -> Done:
    return mpirun(
        mpi, num_ranks, *TRAIN, *flags, cwd=folder, timeout_seconds=120, **NO_INTERNET
    )


def assert_failed(done: Done, folder: Path, *words: str) -> str:
    """Check that a job failed, said why once, and wrote it down; return the words."""
    said = done.out + done.err
    assert done.status in (1, 2), said
    assert "finished:" not in said
    result = json.loads((folder / "runs/r/result.json").read_text())
    assert result["status"] == "failed"
    for word in words:
        assert said.count(word) == 1, said
        assert word in result["error"]
    return said


def cut(path: Path, *, num_bytes: int) -> None:
    """Take bytes away at a file's end."""
    path.write_bytes(path.read_bytes()[:-num_bytes])


# --- what is broken as a whole --------------------------------------------------------


def test_a_broken_set_is_told_once(openmpi: Mpi, tmp_path: Path) -> None:
    write_mnist(tmp_path / "set/MNIST/raw")
    cut(tmp_path / "set/MNIST/raw/train-images-idx3-ubyte", num_bytes=100)
    done = train(openmpi, tmp_path, "--data", "mnist", "--data-dir", "set")
    words = (
        "set/MNIST/raw: torchvision cannot read mnist",
        "fetch mnist --data-dir set",
    )
    said = assert_failed(done, tmp_path, *words)
    assert "Traceback" not in said
    # All ranks know it from rank zero: it is no single rank's matter.
    assert done.ours == []
    assert len([line for line in said.splitlines() if "DataError: " in line]) == 1


# --- one sample that cannot be read ---------------------------------------------------


def write_spoilt(folder: Path) -> None:
    """Write sets with two bad samples of 20 to train on, and one of 7 to validate."""
    photos = write_folder(folder / "photos")
    cut(photos / "train/b/10.jpg", num_bytes=300)
    (photos / "train/c/11.jpg").write_text("not an image")
    (photos / "val/a/03.jpg").write_bytes(b"")
    members = {"train": [], "val": []}
    for part, count, bad in (("train", 20, (10, 11)), ("val", 7, (3,))):
        for number in range(count):
            image = b"no image" if number in bad else picture(5 * number)
            label = str(number % 3).encode()
            members[part] += [(f"{number}.png", image), (f"{number}.cls", label)]
        write_tar(folder / f"shards/{part}/0.tar", members[part])
    import h5py

    with h5py.File(folder / "set.h5", "w") as file:
        kind = h5py.vlen_dtype("u1")
        for part, samples in members.items():
            images = file.create_dataset(f"{part}/images", (len(samples) // 2,), kind)
            for number, (_, data) in enumerate(samples[::2]):
                images[number] = list(data)
            file[f"{part}/labels"] = [int(label) for _, label in samples[1::2]]


def test_a_bad_sample_ends_the_job_and_is_named(openmpi: Mpi, tmp_path: Path) -> None:
    write_spoilt(tmp_path)
    flags = ("--data", "shards", "--data-dir", "shards", "--num-workers", "2")
    done = train(openmpi, tmp_path, *flags, "--hang-timeout", "60")
    words = ("shards/train/0.tar, sample 1", "--on-bad-sample skip")
    said = assert_failed(done, tmp_path, *words)
    assert "Traceback" not in said
    (line,) = done.ours
    assert "] BadSample: " in line


SKIP = ("--on-bad-sample", "skip", "--precision", "fp64", "--epochs", "2", "--lr")
SKIP += ("0.05", "--image-size", "16", "--num-workers")
SPOILT = {
    "folder": ("photos", "0", "--global-batch-size", "8"),
    "folder-workers": ("photos", "2", "--global-batch-size", "8", "--random-flip"),
    "hdf5": ("set.h5", "1", "--global-batch-size", "7"),
    "shards": ("shards", "1", "--global-batch-size", "8", "--random-resized-crop"),
    # Steps of one sample: with a bad one there is nothing to do in a step.
    "folder-singly": ("photos", "1", "--global-batch-size", "1"),
}


@pytest.fixture(scope="module")
def skipped(openmpi: Mpi, tmp_path_factory: pytest.TempPathFactory) -> dict[int, Path]:
    """Run folders of trainings that leave out what cannot be read, by rank count."""
    place = tmp_path_factory.mktemp("spoilt")
    write_spoilt(place)
    trainings = {
        name: ["--data", name.split("-")[0], "--data-dir", where, *SKIP, *words]
        for name, (where, *words) in SPOILT.items()
    }
    for name, workers in (("faulty", "0"), ("faulty-workers", "2")):
        words = (
            "--data",
            "custom_data:faulty",
            *SKIP,
            workers,
            "--global-batch-size",
            "8",
        )
        trainings[name] = list(words)
    for size in (1, 3):
        chosen = {n: [*w, "--runs-dir", f"on-{size}"] for n, w in trainings.items()}
        (place / "trainings.json").write_text(json.dumps(chosen))
        words = (str(MANY_TRAININGS), "trainings.json")
        done = mpirun(openmpi, size, *words, cwd=place, timeout_seconds=280)
        assert done.status == 0, done.out + done.err
        assert "Traceback" not in done.err
    return {size: place / f"on-{size}" for size in (1, 3)}


@pytest.mark.parametrize("size", [1, 3])
@pytest.mark.parametrize("name", [*SPOILT, "faulty", "faulty-workers"])
def test_what_cannot_be_read_is_left_out_and_counted(
    skipped: dict[int, Path], name: str, size: int
) -> None:
    good, bad = ((25, 9), 1) if "faulty" in name else ((18, 6), 3)
    found = rows(skipped[size] / name, "epoch")
    assert [(row["train_samples"], row["val_samples"]) for row in found] == [good] * 2
    assert [row["skipped_samples"] for row in found] == [bad] * 2
    result = json.loads((skipped[size] / name / "result.json").read_text())
    assert (result["status"], result["skipped_samples"]) == ("finished", 2 * bad)
    alone = rows(skipped[1] / name, "epoch")
    for loss in ("train_loss", "val_loss"):
        expected = [row[loss] for row in alone]
        assert [row[loss] for row in found] == pytest.approx(expected, rel=1e-9)


@pytest.mark.slow
def test_what_an_evaluation_leaves_out_that_is_stopped_counts_once(
    openmpi: Mpi, tmp_path: Path
) -> None:
    words = ("--data", "custom_data:stopping", *SKIP, "0", "--micro-batch-size", "2")
    for status in (75, 0):
        done = train(openmpi, tmp_path, *words, num_ranks=1)
        assert done.status == status, done.err
    found = rows(tmp_path / "runs/r", "epoch")
    assert [(row["val_samples"], row["skipped_samples"]) for row in found] == [
        (199, 1)
    ] * 2


# --- custom data sets -----------------------------------------------------------------


def test_an_error_in_a_custom_set_ends_the_job(openmpi: Mpi, tmp_path: Path) -> None:
    flags = ("--data", "custom_data:faulty", "--num-workers", "2")
    done = train(openmpi, tmp_path, *flags, "--hang-timeout", "60")
    said = assert_failed(done, tmp_path)
    assert "custom_data.py" in said  # where it was raised
    (line,) = done.ours
    assert "ArithmeticError: " in line
    assert "this is the fault" in said


# --- processes that are killed --------------------------------------------------------


@pytest.mark.parametrize("victim", ["rank", "worker"])
def test_a_killed_process_ends_the_job_and_leaves_no_worker(
    openmpi: Mpi, tmp_path: Path, victim: str
) -> None:
    out = tmp_path / "out"
    with out.open("w") as file:
        job = subprocess.Popen(
            [
                *(str(openmpi.mpirun), "-np", "3", *openmpi.flags, sys.executable),
                *(*TRAIN, "--data", "custom_data:slow", "--num-workers", "2"),
            ],
            cwd=tmp_path,
            env=environment(openmpi, NOTES=str(tmp_path)),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    everybody: list[int] = []
    try:
        wait_until(lambda: len(list(tmp_path.glob("worker-*"))) == 6, 120, out)
        notes = [path.name.split("-") for path in tmp_path.glob("worker-*")]
        workers = {(int(rank), int(number)): int(pid) for _, rank, number, pid in notes}
        logs = (tmp_path / f"runs/r/logs/rank-{rank}.log" for rank in range(3))
        ranks = [int(log.read_text().split()[1]) for log in logs]
        everybody = sorted({*ranks, *(pid for rank in ranks for pid in tree(rank))})
        assert set(workers.values()) < set(everybody)
        time.sleep(1)
        os.kill(ranks[1] if victim == "rank" else workers[1, 0], signal.SIGKILL)
        struck = time.monotonic()
        wait_until(lambda: job.poll() is not None and not survivors(everybody), 60, out)
        took = time.monotonic() - struck
    finally:
        job.kill()
        job.wait()
        send_signal(survivors(everybody))
    said = out.read_text()
    assert took < GONE_SECONDS, said
    assert job.returncode != 0
    (line,) = [line for line in said.splitlines() if line.startswith("[rank ")]
    assert line.startswith("[rank 1/3 "), said
    of_rank, of_worker = "died without an error message", "DataLoader worker (pid"
    assert (of_rank if victim == "rank" else of_worker) in line


def tree(pid: int) -> list[int]:
    """All processes below one."""
    below = children_of(pid)
    return below + [other for child in below for other in tree(child)]


def wait_until(condition: Callable[[], bool], seconds: float, out: Path) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, out.read_text()
        time.sleep(0.05)
