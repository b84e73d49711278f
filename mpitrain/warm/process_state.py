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
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import TextIOWrapper
from pathlib import Path

from mpitrain import __version__
from mpitrain.schedulers import detect
from mpitrain.watchdog.process import PROXY, memory_limit

READ_AT_IMPORT = re.compile(
    "LD_|GLIBC_|MALLOC_|PYTHON|LANG|LC_|(HOME|XDG_CACHE_HOME|CI|CXX)$|"
    "(OMP|GOMP|KMP|MKL|OPENBLAS|BLIS|NUMEXPR|VECLIB|ONEDNN|DNNL|NPY|NUMPY|MPMATH)_|"
    "(PYTORCH|PT2|ATEN|C10|KINETO|TRITON|NVIDIA|AOT|AOTINDUCTOR|INDUCTOR|CUTLASS)_|"
    "(CUTEDSL|FX|SYMPY|PILLOW|TQDM|HSA|PARTITIONER)_|COMPILE_STROBELIGHT|DUMP_AOTI|"
    "ENABLE_(HOST|PERSISTENT|TEMPLATE|TMA)|FAKE_ALLOW|LOG_(AUTOTUNE|TLPARSE)|"
    "UNSAFE_SKIP_FSDP|TORCH(?!ELASTIC)|CUDA_MODULE"
)
"""Variables that the loader, Python, or a library reads once, while it is imported."""

RENEWABLE = re.compile(rf"sys\.path$|{READ_AT_IMPORT.pattern}")
"""What a server that restarts, from the proxy's folder, would have equal."""

_STATUS = re.compile(
    "(Uid|Gid|Groups|Cap...|NoNewPrivs|Seccomp|TracerPid|Mems_allowed_list)$"
)
"""Lines of /proc/PID/status that no process can change for another."""

_NAMESPACES = ("mnt", "net", "ipc", "pid", "user", "uts", "cgroup", "time")
_LIMITS = [it for it in dir(resource) if it.startswith("RLIMIT_")]


def identity() -> dict[str, str]:
    """Return what this process cannot hand on: it must be equal in the other one.

    The user and capabilities, the scheduler's job, namespaces (containers), the memory
    limit and policy (``numactl``), a debugger or profiler, Python and its options, and
    the variables that are read while torch is imported.
    """
    streams = (sys.stdin, sys.stdout, sys.stderr)
    found = {
        "mpitrain": f"{__version__} in {Path(__file__).parents[1]}",
        # `python` and `python3` of one environment are links to one file.
        "Python": f"{os.path.realpath(sys.executable)} {sys.prefix} {sys.version}",
        "options of Python": repr((sys.flags, sys._xoptions, sys.warnoptions)),  # noqa: SLF001
        "-u of Python": str(getattr(sys.stdout, "write_through", None)),
        "closed streams": repr([it for it in range(3) if streams[it] is None]),
        "trace function": tracers(),
        "job of the scheduler": str(detect(os.environ).job_id),
        "sys.path": repr(sys.path),
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


def tracers() -> str:
    """Return what traces or profiles this process; ``""``: nothing."""
    found = [sys.gettrace(), sys.getprofile()]
    # cProfile and coverage are there alone, from Python 3.12 on.
    if (monitoring := getattr(sys, "monitoring", None)) is not None:
        found += map(monitoring.get_tool, range(6))
    return " ".join(str(it) for it in found if it is not None)


@dataclass(frozen=True, kw_only=True)
class ProcessState:
    """What a process has from who started it, and hands on to its fork.

    Attributes:
        descriptors: Numbers of the open files that it has inherited, such as stdout
            and the connection to Hydra; they are sent beside this.
        limits: Of each resource its soft and hard limit.
        ignored: Signals that are ignored, and `blocked` those that wait.
        cgroups: Lines of /proc/self/cgroup.
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
            limits={it: resource.getrlimit(getattr(resource, it)) for it in _LIMITS},
            cores=sorted(os.sched_getaffinity(0)),
            nice=os.getpriority(os.PRIO_PROCESS, 0),
            oom_score=_read("/proc/self/oom_score_adj"),
            ignored=[it for it in valid if signal.getsignal(it) == signal.SIG_IGN],
            blocked=list(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
            cgroups=_read("/proc/self/cgroup"),
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
            number = getattr(resource, name)
            if resource.getrlimit(number) != tuple(limits):
                with _setting(f"{name} (ulimit) to {limits[0]} and {limits[1]}"):
                    resource.setrlimit(number, (limits[0], limits[1]))
        if os.getpriority(os.PRIO_PROCESS, 0) != self.nice:
            with _setting(f"the priority (nice) to {self.nice}"):
                os.setpriority(os.PRIO_PROCESS, 0, self.nice)
        if _read("/proc/self/oom_score_adj") != self.oom_score:
            with _setting(f"oom_score_adj to {self.oom_score}"):
                Path("/proc/self/oom_score_adj").write_text(self.oom_score)
        self._enter_cgroups()
        with _setting(f"the cores to {list(self.cores)}"):
            os.sched_setaffinity(0, self.cores)
            if sorted(os.sched_getaffinity(0)) != list(self.cores):
                raise OSError("not all of them may be used")
        os.umask(self.umask)
        with _setting(f"the current folder to {self.folder}"):
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
        from mpitrain.launch.pci import has_gpus  # late: each proxy does without

        if _read("/proc/self/cgroup") != self.cgroups and has_gpus():
            raise OSError("the fork server is in another cgroup, maybe of other GPUs")

    def _set_python(self) -> None:
        import tempfile  # the server has; each proxy begins sooner without

        os.environ.clear()
        os.environ.update(self.variables)
        os.environ[PROXY] = f"{os.getpid()} {self.pid}"
        time.tzset()  # as TZ says now
        tempfile.tempdir = None  # as TMPDIR says now
        sys.argv[:], sys.orig_argv[:] = self.argv, self.orig_argv
        importlib.invalidate_caches()  # folders may have been made since
        if isinstance(out := sys.stdout, TextIOWrapper):  # else it is closed
            out.reconfigure(line_buffering=out.isatty() and not out.write_through)
        # Each process begins with seeds of its own; Python's `random` sees to itself.
        numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
        if numpy is not None:
            numpy.random.seed()
        if torch is not None:
            torch.default_generator.seed()


@contextmanager
def _setting(what: str) -> Iterator[None]:
    try:
        yield
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise OSError(
            f"the fork server cannot set {what} for this rank: {reason}; start it "
            "where the ranks start"
        ) from None


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
