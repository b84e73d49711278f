"""What --bitwise costs: the time of a step beside that without, on the same ranks.

    .venv/bin/python benchmarks/bitwise.py --ranks 2 --rounds 5
    .venv/bin/python benchmarks/bitwise.py --rounds 9 --verify-every 1 10

Each network is trained without and with --bitwise, with the same micro-batches: the
whole shard of a rank, or an eighth of the global batch, in turns. With --verify-every
it is --bitwise with such verifications, beside --bitwise without. The ratios are taken
round by round. Ranks have one thread each, as with a rank per core.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

MPIRUN = Path(sys.prefix) / "bin" / "mpirun"
SYNTHETIC = ("--data", "synthetic", "--image-size", "32", "--synthetic-samples", "512")
NETWORKS = {
    "convnet": ("--epochs", "8"),
    "resnet18": (*SYNTHETIC, "--model", "resnet18", "--epochs", "3"),
}
GLOBAL_BATCH_SIZE = 64


def main() -> None:
    """Print a table of ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--networks", nargs="+", default=[*NETWORKS])
    parser.add_argument("--strategy", default="ddp", choices=["ddp", "fsdp"])
    parser.add_argument("--verify-every", type=int, nargs="+", default=[])
    asked = parser.parse_args()
    whole = GLOBAL_BATCH_SIZE // asked.ranks
    kinds = {
        f"a micro-batch of {whole}": ((), str(whole)),
        f"--bitwise, the same {whole}": (("--bitwise",), str(whole)),
        "micro-batches of 8": ((), "8"),
        "--bitwise, the same 8": (("--bitwise",), "8"),
    }
    if asked.verify_every:
        kinds = {"--bitwise": (("--bitwise",), "8")}
        for every in asked.verify_every:
            words = ("--bitwise", "--verify-every", str(every))
            kinds[f"--verify-every {every}"] = words, "8"
    for network in asked.networks:
        seconds: dict[str, list[float]] = {kind: [] for kind in kinds}
        for _ in range(asked.rounds):
            for kind, (flags, size) in kinds.items():
                words = (*flags, "--micro-batch-size", size, *NETWORKS[network])
                words += ("--strategy", asked.strategy)
                seconds[kind].append(epoch_seconds(asked.ranks, words))
        print(f"{network}, {asked.ranks} ranks, {asked.strategy}:")
        names = list(kinds)
        for kind, times in seconds.items():
            first = 0 if asked.verify_every else names.index(kind) // 2 * 2
            base = seconds[names[first]]
            ratios = [one / other for one, other in zip(times, base, strict=True)]
            print(
                f"  {kind:<28} {statistics.median(times):7.3f} s per epoch, "
                f"{statistics.median(ratios):.2f} "
                f"({min(ratios):.2f} to {max(ratios):.2f})",
                flush=True,
            )


def epoch_seconds(num_ranks: int, words: tuple[str, ...]) -> float:
    """Train, and return the median time of the epochs after the first."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        command = [str(MPIRUN), "-np", str(num_ranks), "--oversubscribe"]
        command += [sys.executable, "-m", "mpitrain", "--name", "r", "--device", "cpu"]
        command += ["--global-batch-size", str(GLOBAL_BATCH_SIZE), *words]
        subprocess.run(
            command, cwd=folder, env=environ, check=True, capture_output=True
        )
        lines = (Path(folder) / "runs/r/metrics.jsonl").read_text().splitlines()
    rows = [row for row in map(json.loads, lines) if row["event"] == "epoch"]
    rates = [row["train_samples"] / row["samples_per_second"] for row in rows[1:]]
    return statistics.median(rates)


if __name__ == "__main__":
    main()
