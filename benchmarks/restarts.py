"""From the kill of a rank to the next step: ours cold and warm, beside torchrun.

    .venv/bin/python benchmarks/restarts.py --ranks 8 --pairs 10

A rank is killed 3 s after all have made a step (`kill -9`, of its own process id); the
time counts until all new ranks have made one. Interleaved, after one of each that does
not count; ratios are taken round by round.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from stages.sitecustomize import STAGES

HERE = Path(__file__).parent
BIN = Path(sys.prefix) / "bin"
RATIOS = (("warm", "cold"), ("cold", "torchrun"), ("warm", "torchrun"))


def main() -> None:
    """Time all of them, and print medians and ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--pairs", type=int, default=10)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    asked = parser.parse_args()
    seconds: dict[str, list[dict[str, float]]] = {}
    for pair in range(asked.pairs + 1):
        for name, command in commands(str(asked.ranks)).items():
            with tempfile.TemporaryDirectory() as folder:
                took = restart(command, Path(folder), asked.ranks)
            print(f"pair {pair}: {name} {took}", file=sys.stderr, flush=True)
            if pair > 0:
                seconds.setdefault(name, []).append(took)
    for name, found in seconds.items():
        for what in found[0]:
            print(name, what, statistics.median(one[what] for one in found))
    ratios = {
        f"{one} / {other}": statistics.median(
            a["restart"] / b["restart"]
            for a, b in zip(seconds[one], seconds[other], strict=True)
        )
        for one, other in RATIOS
    }
    # A start from nothing, of the same command in the same run.
    ratios["cold / start"] = statistics.median(
        it["restart"] / it["start"] for it in seconds["cold"]
    )
    print(ratios)
    if asked.json:
        asked.json.write_text(json.dumps({"seconds": seconds, "ratios": ratios}) + "\n")


def commands(ranks: str) -> dict[str, list[str]]:
    supervise = [sys.executable, "-m", "mpitrain", "supervise", "--restarts", "1"]
    training = [str(BIN / "mpirun"), "-np", ranks, "--oversubscribe", sys.executable]
    training += ["-m", "mpitrain", "--epochs", "10000"]
    script = str(HERE / "peers" / "torchrun_ddp.py")
    torchrun = [str(BIN / "torchrun"), "--standalone", "--nproc-per-node", ranks]
    return {
        "cold": [*supervise, "--", *training],
        "warm": [*supervise, "--warm", "--", *training],
        "torchrun": [*torchrun, "--max-restarts", "5", script],
    }


def restart(command: list[str], folder: Path, num_ranks: int) -> dict[str, float]:
    """Return the seconds of a start, and from a kill to the next step of all ranks."""
    notes = folder / "notes"
    notes.mkdir()
    hooks = f"{HERE / 'stages'}:{os.environ.get('PYTHONPATH', '')}"
    environ = {"PYTHONPATH": hooks, "BENCH_STAGES": str(notes), "EPOCHS": "10000"}
    environ["STORE"] = str(folder / "store")
    began = time.monotonic()
    with (folder / "output").open("w+b") as output:
        job = subprocess.Popen(
            command,
            cwd=folder,
            env={**os.environ, **environ},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            wait_for_steps(notes, num_ranks - 1, job)
            time.sleep(3.0)
            before = first_steps(notes)
            killed = time.monotonic()
            os.kill(max(before), signal.SIGKILL)
            after = wait_for_steps(notes, 2 * len(before), job)
            new = [at for pid, at in after.items() if pid not in before]
            return {"start": max(before.values()) - began, "restart": max(new) - killed}
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job.pid, signal.SIGTERM)
            try:
                job.wait(20)
            except subprocess.TimeoutExpired:
                os.killpg(job.pid, signal.SIGKILL)


def wait_for_steps(
    notes: Path, num_processes: int, job: subprocess.Popen[bytes]
) -> dict[int, float]:
    """Wait until so many processes have made a step; return when, by process id."""
    end = time.monotonic() + 120
    while len(found := first_steps(notes)) < num_processes:
        if time.monotonic() > end or job.poll() is not None:
            said = (notes.parent / "output").read_text(errors="replace")[-20000:]
            raise RuntimeError(f"{len(found)} of {num_processes} train\n{said}")
        time.sleep(0.05)
    return found


def first_steps(notes: Path) -> dict[int, float]:
    """Return when each process made its first step, by process id."""
    at = STAGES.index("first step")
    found = {}
    for note in notes.iterdir():
        if len(data := note.read_bytes()) == 8 * len(STAGES):
            (when,) = struct.unpack_from("d", data, 8 * at)
            found |= {int(note.name): when} if when else {}
    return found


if __name__ == "__main__":
    main()
