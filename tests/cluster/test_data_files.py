"""Files that differ between hosts: told in one error, or no matter at all."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread

import pytest
from data_files import write_folder, write_mnist
from launcher import children_of, rows, slow, survivors

from .conftest import ROOT
from .hostfile import mpirun
from .hosts import VirtualHosts
from .runs import assert_finished

OWN = ROOT / "tests/jobs"
FLAGS = ("--image-size", "16", "--global-batch-size", "8", "--epochs", "2")
FLAGS += ("--precision", "fp64")


@contextmanager
def seen_there(
    hosts: VirtualHosts, host: str, path: Path, what: Path
) -> Iterator[None]:
    """Let all that is started on a host by ssh see another folder at a path.

    Each host's sshd has a mount namespace of its own (`ip netns exec` makes it), which
    what it starts shares.
    """
    (daemon,) = (
        pid
        for pid in (daemon.pid for daemon in hosts._daemons)
        if is_sshd_of(pid, host)
    )
    inside = ["nsenter", "--target", str(daemon), "--mount"]
    subprocess.run([*inside, "mount", "--bind", str(what), str(path)], check=True)
    try:
        yield
    finally:
        subprocess.run([*inside, "umount", str(path)], check=True)


def is_sshd_of(pid: int, host: str) -> bool:
    name = Path(f"/proc/{pid}/comm").read_text().strip()
    of_host = subprocess.run(
        ["nsenter", "--target", str(pid), "--uts", "hostname"],
        capture_output=True,
        text=True,
        check=True,
    )
    return (name, of_host.stdout.strip()) == ("sshd", host)


def train(
    hosts: VirtualHosts, folder: Path, *words: str, slots: int = 1
) -> tuple[int, str]:
    """Train on the first two hosts."""
    done = mpirun(
        hosts,
        folder,
        hosts.names[:2],
        slots=slots,
        words=["--name", "r", *FLAGS, *words],
        flags=["-x", f"PYTHONPATH={OWN}", "-x", f"NOTES={folder}"],
    )
    return done.returncode, done.stdout


def assert_refused(status: int, said: str, folder: Path, *words: str) -> None:
    assert status == 1, said
    assert "Traceback" not in said
    assert said.count("DataError: ") == 1, said
    for word in words:
        assert word in said, said
    result = json.loads((folder / "runs/r/result.json").read_text())
    assert result["status"] == "failed"


@pytest.fixture
def photos(folder: Path) -> Path:
    """A folder of images that all hosts see, in a folder of data."""
    return write_folder(folder / "data/photos")


def test_a_host_whose_folder_lacks_a_file_is_named(
    hosts: VirtualHosts, folder: Path, photos: Path
) -> None:
    _, second, _ = hosts.names
    other = write_folder(folder / "other")
    (other / "train/b/10.jpg").unlink()
    with seen_there(hosts, second, photos, other):
        status, said = train(
            hosts, folder, "--data", "folder", "--data-dir", str(photos)
        )
    first = hosts.names[0]
    words = f"the files of {photos} are not the same on all nodes: {second} sees others"
    assert_refused(status, said, folder, words, f"than {first}")


@pytest.mark.slow
def test_where_the_folder_is_the_same_workers_of_all_hosts_read_it(
    hosts: VirtualHosts, folder: Path, photos: Path
) -> None:
    """Through a copy on the second host, as on each node's own disk."""
    first, second, _ = hosts.names
    copy = write_folder(folder / "copy")
    words = ("--data", "folder", "--data-dir", str(photos), "--num-workers", "1")
    with seen_there(hosts, second, photos, copy):
        status, said = train(hosts, folder, *words, "--random-resized-crop")
    assert status == 0, said
    assert_finished(folder, said, hosts=[first, second], world_size=2)
    assert "Traceback" not in said


def test_a_set_in_memory_is_read_where_rank_zero_is(
    hosts: VirtualHosts, folder: Path
) -> None:
    first, second, _ = hosts.names
    write_mnist(folder / "data/mnist/MNIST/raw")
    empty = folder / "empty"
    empty.mkdir()
    words = ("--data", "mnist", "--data-dir", str(folder / "data/mnist"))
    with seen_there(hosts, second, folder / "data", empty):
        status, said = train(hosts, folder, *words)
    assert status == 0, said
    assert_finished(folder, said, hosts=[first, second], world_size=2)
    for row in rows(folder / "runs/r", "epoch"):
        assert (row["train_samples"], row["val_samples"]) == (27, 11)


@pytest.mark.parametrize("name", [slow("photos"), "readings"])
def test_ones_own_set_is_read_by_workers_on_all_hosts(
    hosts: VirtualHosts, folder: Path, name: str
) -> None:
    words = ("--data", f"custom_data:{name}", "--num-workers", "1")
    status, said = train(hosts, folder, *words)
    assert status == 0, said
    assert_finished(folder, said, hosts=hosts.names[:2], world_size=2)
    assert "Traceback" not in said


@pytest.mark.slow
@pytest.mark.parametrize("victim", ["rank", "worker"])
def test_a_killed_process_of_one_host_leaves_no_worker_on_any(
    hosts: VirtualHosts, folder: Path, victim: str
) -> None:
    """Between hosts workers are not the ranks' own children: a server forks them."""
    found: list[tuple[int, str]] = []
    words = ("--data", "custom_data:slow", "--num-workers", "2")
    job = Thread(target=lambda: found.append(train(hosts, folder, *words, slots=2)))
    job.start()
    wait_for(lambda: len(list(folder.glob("worker-*"))) == 8, 120)
    notes = [path.name.split("-") for path in folder.glob("worker-*")]
    workers = {(int(rank), int(i)): int(pid) for _, rank, i, pid in notes}
    logs = [folder / f"runs/r/logs/rank-{rank}.log" for rank in range(4)]
    ranks = [int(log.read_text().split()[1]) for log in logs]
    everybody = [pid for rank in ranks for pid in (rank, *below(rank))]
    assert set(workers.values()) < set(everybody)
    struck = time.monotonic()
    os.kill(ranks[3] if victim == "rank" else workers[3, 1], signal.SIGKILL)
    wait_for(lambda: not job.is_alive() and not survivors(everybody), 30)
    assert time.monotonic() - struck < 20
    ((status, said),) = found
    # Open MPI 5.0's mpirun gives 0 where a daemon is gone, too
    # (docs/reference/exit-codes.md).
    assert status != 0 or "lost communication with a remote daemon" in said, said
    result = json.loads((folder / "runs/r/result.json").read_text())
    assert result["status"] != "finished"
    assert f"[rank 3/4 {hosts.names[1]}] " in said or "Socket closed" in said, said
    assert said.count("\n[rank ") <= 1


def below(pid: int) -> list[int]:
    """All processes below one."""
    return [pid for child in children_of(pid) for pid in (child, *below(child))]


def wait_for(condition: Callable[[], bool], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.1)
