"""A host that is cut off in the middle of a training: both sides end, and say why."""

from __future__ import annotations

import os
import re
import subprocess
import time
from pathlib import Path

from .hosts import LOGIN, PREFIX, VirtualHosts, ip

HANG_SECONDS = 6
GONE_SECONDS = HANG_SECONDS + 15

SCRIPT = """
import os, time
from pathlib import Path
import mpitrain

with mpitrain.init(device="cpu", hang_timeout_seconds=SECONDS) as world:
    import torch, torch.distributed as dist
    weight = torch.nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=0.1)
    Path(f"pid-{world.rank}").write_text(str(os.getpid()))
    while True:
        weight.grad = torch.ones(2)
        dist.all_reduce(weight.grad)
        optimizer.step()
        time.sleep(0.1)
        Path(f"step-{world.rank}").touch()
"""


def test_a_host_that_is_cut_off_ends_the_job_on_both_sides(
    hosts: VirtualHosts, folder: Path
) -> None:
    first, second, _ = hosts.names
    (folder / "script.py").write_text(SCRIPT.replace("SECONDS", str(HANG_SECONDS)))
    (folder / "hosts").write_text(f"{first} slots=1\n{second} slots=1\n")
    out = folder / "out"
    words = ["mpirun", "--prefix", f"{folder}/.venv", "--hostfile", "hosts"]
    words += ["-x", "PATH", "-x", "PYTHONPATH", "python", "script.py"]
    path = f"{folder}/.venv/bin:{hosts.environ['PATH']}"
    with out.open("w") as file:
        job = subprocess.Popen(
            ["timeout", "-k", "5", "180", *hosts._on(first), *words],
            cwd=folder,
            env={**hosts.environ, "PATH": path, "PYTHONPATH": str(folder)},
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
        )
    try:
        wait_for(lambda: len(list(folder.glob("step-*"))) == 2, 90, out)
        pids = [int(file.read_text()) for file in folder.glob("pid-*")]
        ip("-n", PREFIX + LOGIN, "link", "set", second, "down")
        cut = time.monotonic()
        wait_for(lambda: job.poll() is not None and not alive(pids), 60, out)
        took = time.monotonic() - cut
    finally:
        job.kill()
        job.wait()
        ip("-n", PREFIX + LOGIN, "link", "set", second, "up")
    said = out.read_text()
    assert job.returncode != 0
    assert took < GONE_SECONDS, said
    (line,) = [x for x in said.splitlines() if x.startswith("[rank ")]
    assert re.match(rf"\[rank 1/2 {second}\] hang: no rank has made progress", line)
    assert re.search(rf"rank 1 {second}: no word from that host", said)


def alive(pids: list[int]) -> list[int]:
    return [pid for pid in pids if os.path.exists(f"/proc/{pid}/exe")]  # noqa: PTH110


def wait_for(condition, seconds: float, out: Path) -> None:  # type: ignore[no-untyped-def]
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, out.read_text()
        time.sleep(0.1)
