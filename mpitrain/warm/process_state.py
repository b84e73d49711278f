"""What a process hands on to one that runs in its place, and what must be equal."""

from __future__ import annotations

import fcntl
import importlib
import os
import re
import resource
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, TextIO, cast

from mpitrain import __version__
from mpitrain.watchdog.process import PROXY, memory_limit

if TYPE_CHECKING:
    from io import TextIOWrapper

READ_AT_IMPORT = re.compile(
    "LD_|GLIBC_|MALLOC_|PYTHON|LANG|LC_|"
    "(OMP|GOMP|KMP|MKL|OPENBLAS|BLIS|NUMEXPR|VECLIB|ONEDNN|DNNL|NPY|NUMPY)_|"
    "(TORCH|PYTORCH|ATEN|C10|KINETO|TRITON|NVIDIA)_|CUDA_MODULE|HSA_"
)
"""Variables that the loader, Python, or a library reads once, while it is imported."""

SEARCH_PATH = "sys.path"

_STATUS = re.compile(
    "(Uid|Gid|Groups|Cap...|NoNewPrivs|Seccomp|TracerPid|Mems_allowed_list)$"
)
"""Lines of /proc/PID/status that no process can change for another."""

_NAMESPACES = ("mnt", "net", "ipc", "pid", "user", "uts", "cgroup", "time")
_LIMITS = [getattr(resource, it) for it in dir(resource) if it.startswith("RLIMIT_")]


def identity() -> dict[str, str]:
    """Return what this process cannot hand on: it must be equal in the other one.

    The user and capabilities, namespaces (containers), the memory limit and policy
    (``numactl``), a debugger or profiler, Python and its options, and the variables
    that are read while torch is imported.
    """
    found = {
        "mpitrain": f"{__version__} in {Path(__file__).parents[1]}",
        "Python": f"{sys.executable} {sys.version}",
        "options of Python": repr((sys.flags, sys._xoptions, sys.warnoptions)),  # noqa: SLF001
        "-u of Python": repr(_stream(sys.stdout).write_through),
        "trace function": repr((sys.gettrace(), sys.getprofile())),
        SEARCH_PATH: repr(sys.path),
        "memory limit": memory_limit(),
        # The C library read it when the server began, for the stacks of threads.
        "stack limit": repr(resource.getrlimit(resource.RLIMIT_STACK)),
        "scheduling policy": str(os.sched_getscheduler(0)),
        # The second word of the first line; "default" unless numactl chose another.
        "memory policy": " ".join(_read("/proc/self/numa_maps").split()[1:2]),
        "security label": _read("/proc/self/attr/current"),
        "personality": _read("/proc/self/personality"),
        "root folder": str(Path("/").stat().st_ino),
    }
    for line in _read("/proc/self/status").splitlines():
        name, _, value = line.partition(":")
        if _STATUS.match(name):
            found[name] = value.strip()
    for name in _NAMESPACES:
        with suppress(OSError):
            found[f"namespace {name}"] = str(Path(f"/proc/self/ns/{name}").readlink())
    for name, value in os.environ.items():
        if READ_AT_IMPORT.match(name):
            found[name] = value
    return found


def difference(mine: Mapping[str, str], theirs: Mapping[str, str]) -> str:
    """Return the first name whose value is not equal; ``""``: none.

    What a new server would have equal comes last (`is_renewable`).

    >>> difference({"LANG": "C", "TZ": "x"}, {"LANG": "C", "TZ": "x", "LD_A": "1"})
    'LD_A'
    """
    names = {it for it in {*mine, *theirs} if mine.get(it) != theirs.get(it)}
    return min(names, key=lambda it: (is_renewable(it), it), default="")


def is_renewable(name: str) -> bool:
    """Whether a server that begins anew, from the proxy's folder, would have it."""
    return name == SEARCH_PATH or READ_AT_IMPORT.match(name) is not None


@dataclass(frozen=True, kw_only=True)
class ProcessState:
    """What a process has from who started it, and hands on to its fork.

    Attributes:
        pid: Its process id.
        descriptors: Numbers of the open files that it has inherited, such as stdout
            and the connection to Hydra; they are sent beside this.
        limits: Of each resource its soft and hard limit.
        ignored: Signals that are ignored, and `blocked` those that wait.
        cgroups: Lines of /proc/self/cgroup.
        line_buffered: Whether stdout, and stderr, are written after each line.
    """

    pid: int
    argv: Sequence[str]
    orig_argv: Sequence[str]
    variables: dict[str, str]
    folder: str
    umask: int
    descriptors: Sequence[int]
    limits: dict[str, tuple[int, int]]
    cores: Sequence[int]
    nice: int
    oom_score: str
    ignored: Sequence[int]
    blocked: Sequence[int]
    cgroups: str
    line_buffered: Sequence[bool]

    @classmethod
    def of_this_process(cls) -> ProcessState:
        """Return that of this process, which must have changed nothing yet."""
        umask = os.umask(0)
        os.umask(umask)
        valid = signal.valid_signals()
        return cls(
            pid=os.getpid(),
            argv=sys.argv,
            orig_argv=sys.orig_argv,
            variables=dict(os.environ),
            folder=os.getcwd(),
            umask=umask,
            descriptors=inherited_files(),
            limits={str(it): resource.getrlimit(it) for it in _LIMITS},
            cores=sorted(os.sched_getaffinity(0)),
            nice=os.getpriority(os.PRIO_PROCESS, 0),
            oom_score=_read("/proc/self/oom_score_adj"),
            ignored=[it for it in valid if signal.getsignal(it) == signal.SIG_IGN],
            blocked=list(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
            cgroups=_read("/proc/self/cgroup"),
            line_buffered=[
                _stream(it).line_buffering for it in (sys.stdout, sys.stderr)
            ],
        )

    def take(self, received: Sequence[int], keep: socket.socket) -> socket.socket:
        """Make this process one that was started so; an OSError if it cannot be.

        Args:
            received: The open files, in the order of `descriptors`; they are closed.
            keep: A socket that stays open, with another number.
        """
        # PBS signals the processes of a session. The server's group is another rank's.
        if os.getsid(self.pid) == os.getsid(0):
            os.setpgid(0, 0)
        else:
            os.setsid()
        for name, limits in self.limits.items():
            if resource.getrlimit(int(name)) != tuple(limits):
                resource.setrlimit(int(name), (limits[0], limits[1]))
        if os.getpriority(os.PRIO_PROCESS, 0) != self.nice:
            os.setpriority(os.PRIO_PROCESS, 0, self.nice)
        if _read("/proc/self/oom_score_adj") != self.oom_score:
            Path("/proc/self/oom_score_adj").write_text(self.oom_score)
        self._enter_cgroups()
        os.sched_setaffinity(0, self.cores)
        if sorted(os.sched_getaffinity(0)) != list(self.cores):
            raise OSError(0, f"not all of the cores {list(self.cores)} may be used")
        os.umask(self.umask)
        os.chdir(self.folder)
        # No number that is wanted may be another's, meanwhile.
        above = max(self.descriptors, default=2) + 1
        moved = [fcntl.fcntl(it, fcntl.F_DUPFD_CLOEXEC, above) for it in received]
        number = fcntl.fcntl(keep.fileno(), fcntl.F_DUPFD_CLOEXEC, above)
        keep.close()
        for old in {*received, *inherited_files()}:  # and the server's, such as PMI_FD
            os.close(old)
        for old, wanted in zip(moved, self.descriptors, strict=True):
            os.dup2(old, wanted)
            os.close(old)
        self._set_python()
        for it in signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
            if it in self.ignored:
                signal.signal(it, signal.SIG_IGN)
            elif signal.getsignal(it) == signal.SIG_IGN:
                signal.signal(it, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, self.blocked)
        return socket.socket(fileno=number)

    def _enter_cgroups(self) -> None:
        # It needs rights that a job's user rarely has: then it stays in the server's,
        # whose memory limit is equal. Which GPUs that one allows cannot be read.
        for line in self.cgroups.splitlines():
            _, controllers, path = line.split(":", 2)
            file = Path("/sys/fs/cgroup", controllers, path.lstrip("/"), "cgroup.procs")
            with suppress(OSError):
                file.write_text("0")
        if _read("/proc/self/cgroup") != self.cgroups and any(
            map(os.path.exists, ("/dev/nvidiactl", "/dev/kfd", "/dev/dri"))
        ):
            raise OSError(0, "it is in another cgroup, and GPUs may be others there")

    def _set_python(self) -> None:
        import tempfile  # the server has; each proxy begins sooner without

        os.environ.clear()
        os.environ.update(self.variables)
        os.environ[PROXY] = f"{os.getpid()} {self.pid}"
        time.tzset()  # as TZ says now
        tempfile.tempdir = None  # as TMPDIR says now
        sys.argv[:], sys.orig_argv[:] = self.argv, self.orig_argv
        importlib.invalidate_caches()  # folders may have been made since
        for stream, is_line_buffered in zip(
            (sys.stdout, sys.stderr), self.line_buffered, strict=True
        ):
            _stream(stream).reconfigure(line_buffering=is_line_buffered)
        # Each process begins with seeds of its own; Python's `random` sees to itself.
        numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
        if numpy is not None:
            numpy.random.seed()
        if torch is not None:
            torch.default_generator.seed()


def _stream(stream: TextIO) -> TextIOWrapper:
    return cast("TextIOWrapper", stream)  # as Python makes stdout and stderr


def inherited_files() -> list[int]:
    """Return the open files that Python has not opened: its own end at an exec."""
    found = []
    for name in os.listdir("/proc/self/fd"):  # noqa: PTH208
        with suppress(OSError):  # that of the listing itself
            if os.get_inheritable(int(name)):
                found.append(int(name))
    return sorted(found)


def _read(path: str) -> str:
    try:
        return Path(path).read_text().strip("\0\n")
    except OSError:
        return ""
