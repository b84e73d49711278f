"""A sweep beside a shell loop of mpirun: the same trials, the same bits, one job.

    python benchmarks/sweep.py --trials 30 --rounds 3

Both train the same models on as many ranks each; the loop starts mpirun for each trial,
one after another, or two at a time. Times are of whole commands, in turns.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

MPIRUN = [str(Path(sys.executable).with_name("mpirun")), "--oversubscribe"]
ROOT = ["OMPI_ALLOW_RUN_AS_ROOT", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"]
FLAGS = ["--device", "cpu", "--epochs", "1"]


def run(words: list[str], num_ranks: int, folder: Path) -> None:
    """Run ``mpirun -np N python -m mpitrain WORDS``."""
    subprocess.run(
        [*MPIRUN, "-np", str(num_ranks), sys.executable, "-m", "mpitrain", *words],
        cwd=folder,
        check=True,
        capture_output=True,
        env={**os.environ, **dict.fromkeys(ROOT, "1")},
    )


def sweep(folder: Path, trials: int, ranks: int, at_once: int) -> None:
    """Train all seeds in one job of `at_once` times `ranks` ranks."""
    space = f"sampler: grid\nspace:\n  seed: {{int: [1, {trials}]}}\n"
    (folder / "space.yaml").write_text(space)
    words = ["sweep", "space.yaml", "--ranks-per-trial", str(ranks), "--", *FLAGS]
    run(words, at_once * ranks, folder)


def loop(folder: Path, trials: int, ranks: int, at_once: int) -> None:
    """Train each seed in a job of its own."""
    with ThreadPoolExecutor(at_once) as pool:
        seeds = map(str, range(1, trials + 1))
        words = [["--seed", seed, "--name", f"s{seed}", *FLAGS] for seed in seeds]
        list(pool.map(lambda it: run(it, ranks, folder), words))


def main() -> None:
    """Measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--trials", type=int, default=30)
    parser.add_argument("--ranks-per-trial", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    asked = parser.parse_args()
    ways = {
        "sweep, two at a time": (sweep, 2),
        "loop": (loop, 1),
        "loop, two at a time": (loop, 2),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(asked.rounds):
        for name, (way, at_once) in ways.items():
            with tempfile.TemporaryDirectory() as folder:
                began = time.perf_counter()
                way(Path(folder), asked.trials, asked.ranks_per_trial, at_once)
                seconds[name].append(round(time.perf_counter() - began, 2))
    first = statistics.median(seconds["sweep, two at a time"])
    ratios = {
        name: round(statistics.median(found) / first, 2)
        for name, found in seconds.items()
    }
    print(json.dumps({"seconds": seconds, "to the sweep": ratios}, indent=2))


if __name__ == "__main__":
    main()
