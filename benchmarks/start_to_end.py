"""Whole-command time of the default job, ours beside torchrun and Lightning.

    make bench                                   8 ranks, 5 pairs
    .venv/bin/python benchmarks/start_to_end.py --pairs 3 --peers torchrun lightning
    .venv/bin/python benchmarks/start_to_end.py --warm     ours beside a `serve`, too

All train the same network on the same data, batch and epochs, ours as it starts by
itself, theirs with gloo. The runs are interleaved (ours, theirs, ours, ...), after one
of each that does not count, and the ratios are taken round by round, so that a machine
whose speed drifts does not decide.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import re
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import date
from importlib import metadata
from pathlib import Path

from stages.sitecustomize import STAGES

from mpitrain.warm.protocol import SOCKET

# Where it is set, as in images of containers, a clone of ours is compiled at each
# start; an installed package, as theirs are, has been.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)

HERE = Path(__file__).parent
BIN = Path(sys.prefix) / "bin"
HOOKS = f"{HERE / 'stages'}:{os.environ.get('PYTHONPATH', '')}"

SPANS = {
    "launcher": ("command", "python"),
    "imports and set-up": ("python", "before process group"),
    "  of it MPI_Init": ("before MPI_Init", "MPI_Init"),
    "process group": ("before process group", "process group"),
    "first step": ("process group", "first step"),
    "training": ("first step", "last step"),
    "exit": ("last step", "end"),
    "to the first step": ("command", "first step"),
}
"""The stages that are told, each from one time to another."""


def main() -> None:
    """Time both, and print medians and ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=8)
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--peers", nargs="+", default=["torchrun"], choices=PEERS)
    parser.add_argument("--warm", action="store_true", help="ours with a fork server")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    asked = parser.parse_args()

    ranks = str(asked.ranks)
    ours = [str(BIN / "mpirun"), "-np", ranks, "--oversubscribe"]
    ours += [sys.executable, "-m", "mpitrain"]
    commands = {"mpitrain": ours} | ({"warm": ours} if asked.warm else {})
    names = list(commands)
    commands |= {name: PEERS[name](ranks) for name in asked.peers}
    with tempfile.TemporaryDirectory() as folder, fork_server(folder, asked.warm):
        seconds: dict[str, list[float]] = {name: [] for name in commands}
        accuracy: dict[str, str] = {}
        failures: list[str] = []
        stages: dict[str, list[dict[str, float]]] = {name: [] for name in commands}
        for pair in range(asked.pairs + 1):
            for name, command in commands.items():
                more = {SOCKET: f"{folder}/{name}/socket"} if name == "warm" else {}
                took, accuracy[name], spans = timed(
                    command, Path(folder), failures, more
                )
                print(f"pair {pair}: {name} {took:.2f} s", file=sys.stderr, flush=True)
                if pair > 0:
                    seconds[name].append(took)
                    stages[name].append(spans)

    ratios = {
        f"{one} / {other}": [a / b for a, b in zip(mine, theirs, strict=True)]
        for one, mine in seconds.items()
        for other, theirs in seconds.items()
        if one in names and one != other and other != "warm"
    }
    to_step = {
        f"{one} / {other}": statistics.median(
            a["to the first step"] / b["to the first step"]
            for a, b in zip(stages[one], stages[other], strict=True)
        )
        for one, other in (it.split(" / ") for it in ratios)
    }
    by_stage = {
        name: {span: statistics.median(s[span] for s in found) for span in SPANS}
        for name, found in stages.items()
    }
    report = {
        "date": date.today().isoformat(),
        "command": f"benchmarks/start_to_end.py --ranks {ranks} --pairs {asked.pairs} "
        f"--peers {' '.join(asked.peers)}",
        "cores": len(os.sched_getaffinity(0)),
        "platform": f"{platform.system()} {platform.machine()}",
        "versions": {n: metadata.version(n) for n in ("torch", "mpi4py", "mpitrain")},
        "seconds": seconds,
        "median_seconds": {n: statistics.median(s) for n, s in seconds.items()},
        "ratios": ratios,
        "median_ratios": {name: statistics.median(r) for name, r in ratios.items()},
        "median_ratios_to_the_first_step": to_step,
        "median_seconds_by_stage": by_stage,
        "val_accuracy": accuracy,
        "failed_and_repeated": failures,
    }
    for name, found in seconds.items():
        print(
            f"{name:9} median {statistics.median(found):6.2f} s "
            f"(min {min(found):.2f}, max {max(found):.2f}), "
            f"val_accuracy {accuracy[name]}"
        )
    for name, found in ratios.items():
        print(
            f"{name}: median {statistics.median(found):.2f} "
            f"(min {min(found):.2f}, max {max(found):.2f}) of {asked.pairs} pairs, "
            f"{ranks} ranks on {report['cores']} cores; to the first step "
            f"{to_step[name]:.2f}"
        )
    print(f"{'seconds by stage':20}" + "".join(f"{name:>10}" for name in by_stage))
    for span in SPANS:
        print(f"{span:20}" + "".join(f"{by_stage[n][span]:10.2f}" for n in by_stage))
    if failures:
        print("failed and repeated:", "; ".join(failures))
    if asked.json:
        asked.json.write_text(json.dumps(report, indent=2) + "\n")


@contextlib.contextmanager
def fork_server(folder: str, is_asked: bool) -> Iterator[None]:
    """Keep a fork server for the runs of the name `warm`."""
    if not is_asked:
        yield
        return
    (private := Path(folder) / "warm").mkdir(mode=0o700)
    environ = {**os.environ, "PYTHONPATH": HOOKS, "BENCH_STAGES": folder}
    with subprocess.Popen(
        # With mpirun, which sets LD_LIBRARY_PATH for its ranks.
        [str(BIN / "mpirun"), "-np", "1", sys.executable, "-m", "mpitrain", "serve"],
        env={**environ, SOCKET: str(private / "socket")},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
    ) as server:
        assert server.stdout is not None
        server.stdout.readline()
        try:
            yield
        finally:
            server.terminate()


def torchrun(ranks: str) -> list[str]:
    script = str(HERE / "peers" / "torchrun_ddp.py")
    started = ["--standalone", "--nproc-per-node", ranks, script]
    return [str(BIN / "torchrun"), *started]


def lightning(ranks: str) -> list[str]:
    script = str(HERE / "peers" / "lightning_ddp.py")
    return [sys.executable, script, "--ranks", ranks]


PEERS = {"torchrun": torchrun, "lightning": lightning}


def timed(
    command: list[str], folder: Path, failures: list[str], more: dict[str, str]
) -> tuple[float, str, dict[str, float]]:
    """Run a command to its end; return its wall seconds, the last accuracy, its stages.

    A run that fails is told, counted and repeated.
    """
    for _ in range(3):
        notes = Path(tempfile.mkdtemp(dir=folder))
        environ = {**os.environ, **more, "PYTHONPATH": HOOKS}
        environ["BENCH_STAGES"] = str(notes)
        started = time.monotonic()
        done = subprocess.run(
            command,
            cwd=folder,
            capture_output=True,
            text=True,
            timeout=300,
            stdin=subprocess.DEVNULL,
            env=environ,
        )
        ended = time.monotonic()
        found = re.findall(r"val_accuracy ([\d.]+%)", done.stdout)
        if done.returncode == 0 and found:
            spans = seconds_by_stage(notes, started, ended)
            return ended - started, found[-1], spans
        failures.append(f"{Path(command[0]).name}: exit status {done.returncode}")
        print(f"repeated after {failures[-1]}", file=sys.stderr)
    sys.exit(f"{' '.join(command)} failed three times, at last:\n{done.stderr}")


def seconds_by_stage(notes: Path, started: float, ended: float) -> dict[str, float]:
    """Return how long each stage took, the median over the ranks."""
    ranks = []
    for note in notes.iterdir():
        times = struct.unpack(f"{len(STAGES)}d", note.read_bytes())
        reached = dict(zip(STAGES, times, strict=True))
        ranks.append({"command": started, "end": ended, **reached})
    return {
        span: statistics.median(rank[to] - rank[since] for rank in ranks)
        for span, (since, to) in SPANS.items()
    }


if __name__ == "__main__":
    main()
