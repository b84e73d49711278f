"""Random faults of a training under `supervise`: finished, and not a bit is different.

Some faults here. `SOAK_FAULTS=200` takes so many, of all kinds; `SOAK_WARM=1` restarts
warm ranks. The seed is printed; `SOAK_SEED` repeats it.
"""

from __future__ import annotations

import itertools
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from launcher import children_of, survivors

from .hosts import LOGIN, PREFIX, VirtualHosts, ip, mount

ROOT = Path(__file__).resolve().parents[2]
SEED = int(os.environ.get("SOAK_SEED", str(random.SystemRandom().randrange(10**6))))
FAULTS = int(os.environ.get("SOAK_FAULTS", "3"))
WARM = bool(os.environ.get("SOAK_WARM"))
STEPS_PER_FAULT = 60  # of training between two, about
RESTART_SECONDS = 90.0

FEW = ("kill", "host", "raise")
ALL = (*FEW, "kill", "stop", "sidecar", "mpirun", "memory", "disk")


@dataclass
class Training:
    """A training on all hosts, what it wrote, and what struck it."""

    hosts: VirtualHosts
    folder: Path
    job: subprocess.Popen[bytes]
    lost_steps: list[int] = field(default_factory=list)
    down_seconds: list[float] = field(default_factory=list)

    def steps(self) -> list[tuple[float, int]]:
        """When which step was done."""
        lines = (self.folder / "steps").read_text().split("\n")[:-1]
        return [(float(it.split()[0]), int(it.split()[1])) for it in lines]

    def said(self) -> str:
        return (self.folder / "out").read_text(errors="replace")

    def rank(self, rank: int) -> tuple[int, str]:
        """The process of a rank, and its host."""
        pid, host = (self.folder / f"pid-{rank}").read_text().split()
        return int(pid), host

    def wait_until(self, condition: Callable[[], bool], told: str) -> None:
        end = time.monotonic() + RESTART_SECONDS
        while not condition():
            assert self.job.poll() is None, f"{told}: it ended\n{self.said()}"
            assert time.monotonic() < end, f"{told}\n{self.said()[-6000:]}"
            time.sleep(0.02)

    def strike(self, kind: str, chance: random.Random) -> None:
        """Let a fault happen, and wait until the training goes on."""
        ranks = [int(it.name[4:]) for it in self.folder.glob("pid-*")]
        alive = [it for it in sorted(ranks) if survivors([self.rank(it)[0]])]
        rank = chance.choice(alive)
        pid, host = self.rank(rank)
        before, told = len(self.steps()), f"{kind} at rank {rank} on {host}"
        cut_off = ""
        struck = time.time()
        if kind == "kill":
            os.kill(pid, signal.SIGKILL)
        elif kind == "stop":
            os.kill(pid, signal.SIGSTOP)
        elif kind == "sidecar":
            os.kill(children_of(pid)[0], signal.SIGKILL)
        elif kind == "mpirun":
            os.kill(mpirun_of(self.folder), signal.SIGKILL)
        elif kind == "raise":
            (self.folder / f"raise-{rank}").touch()
        elif kind == "host":
            hosts = {self.rank(it)[1] for it in alive} - {self.hosts.names[0]}
            if not hosts:
                return
            cut_off = chance.choice(sorted(hosts))
            told = f"host {cut_off}"
            link(cut_off, "down")
        elif kind == "memory":
            remount(Path("/dev/shm"), full=True)
            time.sleep(3.0)
            remount(Path("/dev/shm"), full=False)
            os.kill(pid, signal.SIGKILL)
            struck = time.time()
        elif kind == "disk":  # still full when ranks start again
            remount(self.hosts.disk, full=True)
            time.sleep(1.0)
            os.kill(pid, signal.SIGKILL)
            struck = time.time()
            time.sleep(4.0)
            remount(self.hosts.disk, full=False)
        print(told, end=": ", flush=True)

        def goes_on() -> bool:
            after = self.steps()[before:]
            times = [struck, *(it for it, _ in after)]
            has_gap = any(b - a > 2.0 for a, b in itertools.pairwise(times))
            return has_gap or (kind == "sidecar" and times[-1] > struck + 6.0)

        try:
            self.wait_until(goes_on, told)
        finally:
            if cut_off:
                link(cut_off, "up")
        steps = self.steps()
        for (at, done), (resumed_at, step) in itertools.pairwise(steps):
            if resumed_at - at > 2.0 and resumed_at > struck:
                lost, seconds = done - step + 1, resumed_at - struck
                self.lost_steps.append(lost)
                self.down_seconds.append(seconds)
                print(f"{lost} steps, {seconds:.1f} s", flush=True)
                return
        print("goes on", flush=True)


@pytest.mark.parametrize(
    ("mpi", "strategy"),
    [("openmpi", "ddp"), pytest.param("mpich", "fsdp", marks=pytest.mark.slow)],
)
def test_random_faults_change_no_bit(
    mpi: str, strategy: str, hosts: VirtualHosts, folder: Path
) -> None:
    before_all = memory_folders()  # a host that another test lost may have left some
    chance = random.Random(f"{SEED}")
    kinds = FEW if len(FEW) == FAULTS else ALL
    print(f"SOAK_SEED={SEED}")
    shutil.copy(Path(__file__).with_name("recovered.py"), folder)
    num_steps = FAULTS * STEPS_PER_FAULT + 100
    words = ["recovered.py", "whole", str(num_steps), strategy]
    words = [*(("-m", "mpitrain", "run", "--device", "cpu") if WARM else ()), *words]
    python, path = ".venv/bin/python", f"{folder}/.venv/bin:{hosts.environ['PATH']}"
    variables = {"PYTHONPATH": str(folder), "PATH": path, "OMP_NUM_THREADS": "1"}
    num_slots = 1 if len(FEW) == FAULTS else 8 // len(hosts.names)
    slots = [num_slots] * len(hosts.names)
    line = "{}:{}\n" if mpi == "mpich" else "{} slots={}\n"
    listed = [line.format(*it) for it in zip(hosts.names, slots, strict=True)]
    (folder / "hosts").write_text("".join(listed))
    start = [".venv/bin/mpirun", "--prefix", f"{folder}/.venv", "--hostfile", "hosts"]
    start += ["--bind-to", "none"]
    start += ["-x", "PATH", "-x", "PYTHONPATH", "-x", "OMP_NUM_THREADS"]
    if mpi == "mpich":
        start = [f"{ROOT}/.venv-mpich/bin/mpirun", "-launcher", "ssh", "-f", "hosts"]
        start += ["-np", str(sum(slots))]
        variables["MPI4PY_LIBMPI"] = f"{ROOT}/.venv-mpich/lib/libmpi.so.12"
        variables["UCX_TLS"] = "tcp,self"  # these hosts share the machine's memory
    alone = hosts.run(
        "node1",
        ["env", "STEP_SECONDS=0", *start[:1], "-np", "1", python, *words],
        cwd=folder,
        timeout_seconds=60 + num_steps // 10,
        environ=variables,
    )
    expected = re.findall("weights [0-9a-f]{64}", alone.stdout)
    assert len(expected) == 1, alone.stdout
    (folder / "steps").unlink()
    words[-3] = str(hosts.disk / f"struck-{mpi}")
    supervise = [python, "-m", "mpitrain", "supervise", "--restarts", str(9 * FAULTS)]
    supervise += ["--warm"] if WARM else []
    with (folder / "out").open("w") as out:
        job = subprocess.Popen(
            [
                *("timeout", "-k", "5", str(120 + 60 * FAULTS)),
                *hosts._on("node1"),
                *(*supervise, "--", *start, python, *words),
            ],
            cwd=folder,
            env={**hosts.environ, **variables},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
        )
    training = Training(hosts, folder, job)
    try:
        training.wait_until((folder / "steps").exists, "the start")
        for number in range(FAULTS):
            kind = kinds[number % len(kinds)]
            before = len(training.steps())
            wait = chance.randint(20, STEPS_PER_FAULT)
            training.wait_until(lambda: len(training.steps()) >= before + wait, "steps")  # noqa: B023
            training.strike(kind, chance)
        assert job.wait(RESTART_SECONDS + num_steps) == 0, training.said()
    finally:
        job.kill()
        job.wait()
    assert re.findall("weights [0-9a-f]{64}", training.said()) == expected
    lost = [it * 0.03 for it in training.lost_steps]
    print(
        f"lost: median {statistics.median(lost):.2f} s, max {max(lost):.2f} s; down: "
        f"median {statistics.median(training.down_seconds):.1f} s"
    )
    left = memory_folders() - before_all
    assert not [it for it in left if "-node1-" in it.name], left


def memory_folders() -> set[Path]:
    """Checkpoints in the memory that all virtual hosts share."""
    return set(Path("/dev/shm").glob("mpitrain-*/*"))


def link(host: str, state: str) -> None:
    """Let a host be cut off, or not."""
    ip("-n", PREFIX + LOGIN, "link", "set", host, state)


def mpirun_of(folder: Path) -> int:
    """The mpirun that was started in a folder."""
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
            here = (entry / "cwd").readlink() == folder
        except OSError:
            continue
        if here and words[0].endswith((b"mpirun", b"prterun")):
            return int(entry.name)
    raise AssertionError("there is no mpirun")


def remount(where: Path, *, full: bool) -> None:
    """Let a tmpfs have no room, or half of the machine's memory again."""
    found = os.statvfs(where)
    used = (found.f_blocks - found.f_bfree) * found.f_frsize
    size = str(used + (1 << 16)) if full else "100%"
    mount("-o", f"remount,size={size}", str(where))
