"""Goodput with faults: the share of the time that counts, ours beside torchrun's.

    .venv/bin/python benchmarks/goodput.py --ranks 4 --seconds 300 --every 60

A random rank is killed (`kill -9`) every so many seconds. Goodput is the time of the
steps that were not lost, over the time since the first step: steps reached, times the
median time of a step, without those that were computed twice.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

PEERS = Path(__file__).parent / "peers"
BIN = Path(sys.prefix) / "bin"


def main() -> None:
    """Print the goodput of each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--every", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=1)
    asked = parser.parse_args()
    for name, command in commands(str(asked.ranks)).items():
        with tempfile.TemporaryDirectory() as folder:
            found = measure(command, Path(folder), asked)
        print(f"{name:<24} {found}", flush=True)


def commands(ranks: str) -> dict[str, list[str]]:
    supervise = [sys.executable, "-m", "mpitrain", "supervise", "--restarts", "99"]
    training = [str(BIN / "mpirun"), "-np", ranks, "--oversubscribe", sys.executable]
    training += ["-m", "mpitrain", "run", "--device", "cpu"]
    training += [str(PEERS / "faults_ours.py")]
    torchrun = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", ranks]
    torchrun += ["--max-restarts", "99"]
    return {
        "supervise --warm": [*supervise, "--warm", "--", *training],
        "supervise": [*supervise, "--", *training],
        "torchrun with DCP": [*torchrun, str(PEERS / "faults_torchrun.py")],
        "torchrun with Lightning": [*torchrun, str(PEERS / "faults_lightning.py")],
    }


def measure(command: list[str], folder: Path, asked: argparse.Namespace) -> str:
    """Train for some time with faults; return the goodput, in words."""
    chance = random.Random(asked.seed)
    steps = folder / "steps"
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "STORE": str(folder / "store")}
    with (folder / "output").open("wb") as output:
        job = subprocess.Popen(
            command,
            cwd=folder,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            while not steps.exists():
                time.sleep(0.05)
                assert job.poll() is None, (folder / "output").read_text()
            began = time.time()
            num_faults = 0
            while (now := time.time()) < began + asked.seconds:
                if now > began + (num_faults + 0.5) * asked.every:
                    rank = chance.randrange(asked.ranks)
                    pid = int((folder / f"pid-{rank}").read_text())
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGKILL)
                    num_faults += 1
                time.sleep(0.05)
        finally:
            os.killpg(job.pid, signal.SIGTERM)
            with contextlib.suppress(subprocess.TimeoutExpired):
                job.wait(20)
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGKILL)
    rows = [line.split() for line in steps.read_text().splitlines()]
    times = [(float(at), int(step)) for at, step in rows]
    gaps = [
        after - before
        for (before, one), (after, other) in itertools.pairwise(times)
        if other == one + 1
    ]
    step_seconds = statistics.median(gaps)
    last = max(step for at, step in times if at < began + asked.seconds)
    return (
        f"goodput {last * step_seconds / asked.seconds:.3f}: {last} steps of "
        f"{1000 * step_seconds:.1f} ms, {num_faults} faults"
    )


if __name__ == "__main__":
    main()
