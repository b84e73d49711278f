"""A node's folder of checkpoints in memory. Imports no torch.

    /dev/shm/mpitrain-UID/TOKEN-HOST-RUN/   of one `supervise` and run; private
        lock                                held by a rank while ranks of it live here
        checkpoints/step-00000120/          the format of those on disk

The folder outlives the ranks. It has the host's name, since containers may share a
machine's memory, and not their names.

A job that was killed whole leaves its folder; the next job of the user on the node
removes it.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from collections.abc import Iterable, Sequence
from pathlib import Path

from mpitrain.checkpoint.layout import FOLDER, list_checkpoints, remove_whole
from mpitrain.files import make_private_folder
from mpitrain.mpi.world import World
from mpitrain.record.supervised import tell_memory_removed
from mpitrain.watchdog.process import memory_left

SHARED_MEMORY = Path("/dev/shm")  # a tmpfs on every Linux
# That nodes send to each other at once: MPI counts in 32 bits, and a restart holds a
# piece beside the files.
PIECE_BYTES = 64 << 20
LEFT_SECONDS = 600.0  # after which a folder without a live rank is of a dead job


class MemoryFolder:
    """This node's folder of one `supervise` and run; its first rank makes and removes.

    ``token`` distinguishes the folders of several jobs, ``run_id`` those of several
    runs of a script.
    """

    def __init__(self, world: World, token: str, run_id: str) -> None:
        name = f"{token}-{world.hostname}-{run_id}"
        self.path = _folder_of_user() / name
        self.is_keeper = world.local_rank == 0
        self.has_warned = False  # that what is in it cannot be used
        self._is_rank_zero = world.is_rank_zero
        self._lock = -1

    def open(self) -> None:
        """Make the folder, and remove those of dead jobs; local."""
        if not self.is_keeper:
            return
        make_private_folder(self.path.parent)
        for other in self.path.parent.iterdir():
            if other != self.path:
                _remove_if_left(other)
        make_private_folder(self.path)
        (self.path / FOLDER).mkdir(exist_ok=True)
        # Never closed: the process holds it until its end.
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._lock = os.open(self.path / "lock", flags, 0o600)
        self._hold()
        for unfinished in (self.path / FOLDER).glob(".*"):
            shutil.rmtree(unfinished, ignore_errors=True)

    def remove(self) -> None:
        """Remove the folder; local."""
        if self.is_keeper:
            _remove([self.path])
        if self._is_rank_zero:  # else the next start would look for it
            tell_memory_removed()

    def keep_only(self, names: Sequence[str]) -> None:
        """Remove the checkpoints of other names; local."""
        if not self.is_keeper:
            return
        for checkpoint in list_checkpoints(self.path):
            if checkpoint.path.name not in names:
                remove_whole(checkpoint.path)
        self._hold()

    def _hold(self) -> None:
        """Tell `_remove_if_left` that this job lives."""
        with contextlib.suppress(OSError):
            os.utime(self._lock)
            # Of POSIX's kind, which the processes that this one forks do not have. A
            # rank of the start before may have it still: then the next call has it.
            fcntl.lockf(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def free_bytes(self) -> int:
        """Return how many bytes the folder could have; local."""
        found = os.statvfs(self.path)
        used = sum(it.stat().st_size for it in self.path.rglob("*.bin"))
        lines = Path("/proc/meminfo").read_text().splitlines()
        available = next(int(it.split()[1]) for it in lines if "MemAvailable" in it)
        # The kernel counts what is in a tmpfs as memory of the job's cgroup.
        return used + min(
            found.f_bavail * found.f_frsize, 1024 * available, memory_left()
        )


def remove_all(token: str) -> None:
    """Remove the folders of one `supervise` on this node, whatever has become of it."""
    _remove(_folder_of_user().glob(f"*{token}-*"))


def _folder_of_user() -> Path:
    return SHARED_MEMORY / f"mpitrain-{os.getuid()}"


def _remove(folders: Iterable[Path]) -> None:
    for folder in folders:
        remove_whole(folder)
    with contextlib.suppress(OSError):  # another job's are there
        _folder_of_user().rmdir()


def _remove_if_left(folder: Path) -> None:
    lock = folder / "lock"
    with contextlib.suppress(OSError), lock.open("r+b") as file:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # No rank lives; but `supervise` may be about to start new ones.
        if time.time() - lock.stat().st_mtime > LEFT_SECONDS:
            shutil.rmtree(folder, ignore_errors=True)
