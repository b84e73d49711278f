"""What the kernel knows of a process: read from /proc, never asked of the process."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import signal
import time
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

from mpitrain.mpi.launchers import LINGERING, RANK_VARIABLES, by_process

# Variable of a warm rank: its process id, and its proxy's, which the launcher started.
# What the rank starts inherits it; there the first number is another's.
PROXY = "MPITRAIN_PROXY"
_PR_SET_PDEATHSIG = 1  # of prctl(2)
LINGER_SECONDS = 3.0  # how long a launcher may take to notice that its rank is gone


class Ancestor(NamedTuple):
    """A process above a rank: its id, and when it started, since ids are reused."""

    pid: int
    started: str


def status_of(pid: int) -> tuple[str, int, str] | None:
    """Return a process's state, parent and start; ``None`` if it is gone.

    The state is a letter as in proc(5): ``"R"`` runs, ``"S"`` sleeps, ``"D"`` waits in
    the kernel, ``"T"`` is stopped, ``"Z"`` is dead. The start is in clock ticks since
    boot.
    """
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return None
    fields = text.rpartition(")")[2].split()  # the name before may hold anything
    return fields[0], int(fields[1]), fields[19]


def started_process(pid: int) -> int:
    """Return the process that the launcher started for a rank: itself, or its proxy."""
    rank, _, proxy = os.environ.get(PROXY, "").partition(" ")
    return int(proxy) if rank == str(pid) else pid


def parent_of_rank() -> int:
    """Return the process that started this rank: mpirun, its daemon, or a wrapper."""
    started = started_process(os.getpid())
    status = None if started == os.getpid() else status_of(started)
    return os.getppid() if status is None else status[1]


def age_seconds(pid: int | None = None) -> float:
    """Return how long ago this rank, or a process, started, by a monotonic clock."""
    status = status_of(started_process(os.getpid()) if pid is None else pid)
    started = int(status[2]) / os.sysconf("SC_CLK_TCK") if status else 0.0
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started


def is_gone(pid: int, started: str | None = None) -> bool:
    """Return whether a process has ended, even if its parent does not know yet.

    ``started``: when it began, as `status_of` tells. False if it cannot be known.
    """
    try:
        status = status_of(pid)
    except OSError:  # no descriptor left, or the like
        return False
    return status is None or status[0] in "ZX" or started not in (None, status[2])


def is_stopped(pid: int) -> bool:
    """Return whether a process is stopped: Ctrl-Z, or SIGSTOP."""
    status = status_of(pid)
    return status is not None and status[0] == "T"


def launchers_of(pid: int) -> list[Ancestor]:
    """Return the processes from a rank's parent up to mpirun, or its daemon here.

    That is the first that has no rank itself; shells and wrappers may be between, and
    the proxy of a warm rank comes first. Empty where it cannot be seen: in another
    process namespace, or another user's where /proc hides those (hidepid).
    """
    with contextlib.suppress(PermissionError):
        return _launchers_of(pid)
    return []


def _launchers_of(pid: int) -> list[Ancestor]:
    found: list[Ancestor] = []
    if (started := started_process(pid)) != pid:
        if (proxy := status_of(started)) is None:
            return []
        pid, found = started, [Ancestor(started, proxy[2])]
    variables = _ranks_of(pid)
    if not variables:
        return []
    while (status := status_of(pid)) is not None and status[1] > 1:
        pid = status[1]
        above = status_of(pid)
        if above is None:
            return []
        found.append(Ancestor(pid, above[2]))
        if not _ranks_of(pid) & variables:
            return found
    return []


def _ranks_of(pid: int) -> set[bytes]:
    try:
        block = Path(f"/proc/{pid}/environ").read_bytes()
    except OSError:
        return set()  # another user's, such as a scheduler's daemon
    names = {name.encode() for name in RANK_VARIABLES}
    return {entry for entry in block.split(b"\0") if entry.split(b"=")[0] in names}


def ranks_below(pid: int) -> list[int]:
    """Return the ranks that a launcher has on this host, and that handle TERM.

    Of each the uppermost process: a wrapper may be above it, and workers below.
    """
    children = _children()
    found, below = [], list(children[pid])
    while below:
        child = below.pop()
        if _ranks_of(child) and has_signal(child, "SigCgt", signal.SIGTERM):
            found.append(child)
        else:
            below += children[child]
    return found


def _children() -> defaultdict[int, list[int]]:
    """Return the processes of this host by their parents."""
    found: defaultdict[int, list[int]] = defaultdict(list)
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if (status := status_of(int(entry.name))) is not None:
                found[status[1]].append(int(entry.name))
    return found


def name_of(pid: int) -> str:
    """Return the name of a process's program; ``""`` if it cannot be known."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return ""


def launcher_name(environ: Mapping[str, str]) -> str:
    """Return the name of what started this rank, in `LAUNCHERS`; empty: not known."""
    above = launchers_of(os.getpid())
    return by_process(name_of(above[-1].pid) if above else "", environ)


class LauncherProcesses:
    """What started a rank on this host: mpirun or its daemon, and wrappers between."""

    def __init__(self, pid: int) -> None:
        self._ancestors = launchers_of(pid)

    def __str__(self) -> str:
        """Return a name that no other launcher of this host ever had."""
        return "-".join(f"{a.pid}.{a.started}" for a in self._ancestors[-1:])

    @property
    def is_alive(self) -> bool:
        """Whether all of it still runs; true where there is none to be seen."""
        return not any(is_gone(*ancestor) for ancestor in self._ancestors)

    @property
    def outlives_ranks(self) -> bool:
        """Whether mpirun, or its daemon, still runs once a rank is gone.

        The proxy of a warm rank ends with it, and so may a wrapper.
        """
        return not any(is_gone(*ancestor) for ancestor in self._ancestors[-1:])

    @property
    def num_ranks(self) -> int:
        """Processes that it has started on this host and that still run."""
        return len(_children()[self._ancestors[-1].pid]) if self._ancestors else 1

    def end_if_it_lingers(self, since: float) -> None:
        """End a launcher that does not notice that its rank is gone.

        Open MPI's mpirun was seen to wait forever, deaf to SIGTERM, for a rank that
        died while others were in MPI_Init. `since`: when the rank went, monotonic.
        """
        for launcher in self._ancestors[-1:]:
            if by_process(name_of(launcher.pid), {}) not in LINGERING:
                return
            for delay, number in ((0.0, signal.SIGTERM), (1.0, signal.SIGKILL)):
                while time.monotonic() < since + LINGER_SECONDS + delay:
                    if is_gone(*launcher):
                        return
                    time.sleep(0.1)
                send_signal(launcher.pid, number)


def cgroups(
    controller: str,
    root: Path = Path("/sys/fs/cgroup"),
    own: Path = Path("/proc/self/cgroup"),
) -> list[Path]:
    """Return the folders of this process's cgroup and of those above it.

    Of version 2, and of version 1 those of a controller. A limit of any of them holds;
    in a container the path may be one outside, and the first folder that is there is
    the root.
    """
    # https://docs.kernel.org/admin-guide/cgroup-v2.html
    found: list[Path] = []
    for line in own.read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controller in (controllers or controller).split(","):
            top = root / (controllers and controller)
            folder = top / path.lstrip("/")
            found += [it for it in (folder, *folder.parents) if it.is_relative_to(top)]
    return found


def oom_kills() -> int:
    """Return how often the kernel killed in this cgroup for lack of memory."""
    for folder in cgroups("memory"):
        for name in ("memory.events", "memory.oom_control"):
            with contextlib.suppress(OSError):
                text = (folder / name).read_text()
                if found := re.search(r"^oom_kill (\d+)", text, re.M):
                    return int(found[1])
    return 0


def memory_limit() -> str:
    """Return the memory limit of this cgroup, as ``"16.0 GiB"``; empty without one."""
    limits = [float("inf")]
    for folder in cgroups("memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            with contextlib.suppress(OSError, ValueError):  # "max" among them
                limits.append(int((folder / name).read_text()))
    return f"{min(limits) / 2**30:.1f} GiB" if min(limits) < 2**60 else ""


def memory_left() -> int:
    """Return how many bytes this cgroup may still take; much without a limit."""
    left = [2**60]
    for folder in cgroups("memory"):
        for limit, usage, cache in (
            ("memory.max", "memory.current", "inactive_file"),
            ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
        ):
            with contextlib.suppress(OSError, ValueError):  # "max" among them
                free = int((folder / limit).read_text())
                free -= int((folder / usage).read_text())
                stat = (folder / "memory.stat").read_text()
                # What the kernel gives back by itself.
                if found := re.search(rf"^{cache} (\d+)", stat, re.M):
                    free += int(found[1])
                left.append(max(0, free))
    return min(left)


def has_signal(pid: int, field: str, number: int) -> bool:
    """Return whether a mask of /proc/PID/status, as ``"ShdPnd"``, has a signal."""
    found = None
    with contextlib.suppress(OSError):
        text = Path(f"/proc/{pid}/status").read_text()
        found = re.search(rf"^{field}:\s*(\w+)", text, re.M)
    return found is not None and bool(int(found[1], 16) >> (number - 1) & 1)


def send_signal(pid: int, signal_number: int) -> None:
    """Send a signal to a process that may be gone, or not ours to end."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.kill(pid, signal_number)


def end_with_parent(pid: int, number: int = signal.SIGTERM) -> None:
    """Let this process get a signal when its parent, `pid`, ends."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
    if os.getppid() != pid:
        os._exit(1)
