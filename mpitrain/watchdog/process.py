"""What the kernel knows of a process: read from /proc, never by asking the process."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

LINGER_SECONDS = 3.0
"""How long a launcher may take to notice that its rank is gone."""

COMMANDS = ("mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prterun", "prun")
"""Launchers, as a user types them."""

DAEMONS = ("prted", "orted", "hydra_pmi_proxy")
"""What they start on every host to start the ranks there."""


@dataclass(frozen=True)
class Ancestor:
    """A process above a rank: its id, and when it began, since ids come again."""

    pid: int
    began: str


def status_of(pid: int) -> tuple[str, int, str] | None:
    """Return a process's state, parent and beginning; ``None`` when it is gone.

    Args:
        pid: The process.

    Returns:
        A letter as in proc(5) (``"R"`` runs, ``"S"`` sleeps, ``"D"`` waits in the
        kernel, ``"T"`` is stopped, ``"Z"`` is dead), the parent's id, the start in
        clock ticks since boot.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()  # the name before may hold anything
    return fields[0], int(fields[1]), fields[19]


def launchers_of(pid: int, rank_variables: Sequence[str]) -> list[Ancestor]:
    """Return the processes from a rank's parent up to the one that launched it.

    The launcher (mpirun, or its daemon on this host) is the first that has not itself
    been given a rank; between it and the rank may be shells and wrappers.

    Args:
        pid: The rank's process.
        rank_variables: Variables by which launchers number their processes.

    Returns:
        The parent first, the launcher last; empty without a launcher, or where it
        cannot be seen (another process namespace).
    """
    mine = variables_of(pid, rank_variables)
    if not mine:
        return []
    found: list[Ancestor] = []
    while (status := status_of(pid)) is not None and status[1] > 1:
        pid = status[1]
        above = status_of(pid)
        if above is None:
            return []
        found.append(Ancestor(pid, above[2]))
        if not variables_of(pid, rank_variables) & mine:
            return found
    return []


def variables_of(pid: int, names: Sequence[str]) -> set[bytes]:
    """Return those of some variables that a process began with, ``NAME=value``."""
    try:
        block = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return set()  # another user's, such as a scheduler's daemon
    wanted = {name.encode() for name in names}
    return {entry for entry in block.split(b"\0") if entry.split(b"=")[0] in wanted}


def name_of(pid: int) -> str:
    """Return the name of a process's program; ``""`` where it cannot be known."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def is_alive(ancestor: Ancestor) -> bool:
    """Whether that very process still runs; true where that cannot be known."""
    try:
        status = status_of(ancestor.pid)
    except OSError:  # no descriptor left, or the like
        return True
    return status is not None and status[0] != "Z" and status[2] == ancestor.began


def count_children(pid: int) -> int:
    """Count the processes that a process has started and that still run."""
    found = 0
    for entry in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            status = status_of(int(entry.name)) if entry.name.isdecimal() else None
            found += status is not None and status[1] == pid
    return found


class Ancestry:
    """What started a rank on this host: mpirun or its daemon, and wrappers between.

    Args:
        pid: The rank's process.
        rank_variables: Variables by which launchers number their processes.
    """

    def __init__(self, pid: int, rank_variables: Sequence[str]) -> None:
        self._ancestors = launchers_of(pid, rank_variables)

    def __str__(self) -> str:
        """Name it, so that no other on this host was ever called the same."""
        return "-".join(f"{a.pid}.{a.began}" for a in self._ancestors[-1:])

    @property
    def lives(self) -> bool:
        """Whether all of it still runs; true where there is none to be seen."""
        return all(map(is_alive, self._ancestors))

    @property
    def num_ranks(self) -> int:
        """Processes that it has started on this host and that still run."""
        return count_children(self._ancestors[-1].pid) if self._ancestors else 1

    def end_if_it_stays(self, since: float) -> None:
        """End a launcher that does not notice that its rank is gone.

        Open MPI's mpirun was seen to wait for ever, deaf to SIGTERM, for a rank that
        died while others were in MPI_Init.

        Args:
            since: When the rank went, on the monotonic clock.
        """
        if (
            not self._ancestors
            or name_of(self._ancestors[-1].pid) not in COMMANDS + DAEMONS
        ):
            return
        for seconds, number in (
            (LINGER_SECONDS, signal.SIGTERM),
            (LINGER_SECONDS + 1.0, signal.SIGKILL),
        ):
            while time.monotonic() < since + seconds:
                if not is_alive(self._ancestors[-1]):
                    return
                time.sleep(0.1)
            quietly_kill(self._ancestors[-1].pid, number)


def oom_kills() -> int:
    """Return how often the kernel killed in this cgroup for want of memory.

    Version 2: ``memory.events``; version 1: ``memory.oom_control``
    (https://docs.kernel.org/admin-guide/cgroup-v2.html#memory-interface-files).
    """
    try:
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    except OSError:
        return 0
    total = 0
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            files = [f"/sys/fs/cgroup{path}/memory.events"]
        elif "memory" in controllers.split(","):
            files = [f"/sys/fs/cgroup/memory{path}/memory.oom_control"]
        else:
            continue
        for file in files:
            total += _counter(Path(file), "oom_kill")
    return total


def _counter(file: Path, name: str) -> int:
    try:
        for line in file.read_text().splitlines():
            key, _, value = line.partition(" ")
            if key == name:
                return int(value)
    except (OSError, ValueError):
        pass
    return 0


def quietly_kill(pid: int, signal_number: int) -> None:
    """Send a signal to a process that may be gone, or not ours to end."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal_number)
