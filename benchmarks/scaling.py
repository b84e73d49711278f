"""One training on 1, 2, 4 ... ranks, in turns: throughput, speed-up and efficiency.

    python benchmarks/scaling.py --ranks 1 2 4 -- --data digits --precision fp64

Starts `mpirun` itself. Flags of the training follow after `--`. Each training is an
ordinary one in a temporary folder of runs; its last epoch is timed.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from record import about, write

from mpitrain.record.reading import Metrics, sums

EPOCHS = 2
"""Of each training where the training flags name none."""

NUM_LINES = 20
"""Of the output of a training that failed."""

HEAD = (
    *("strategy", "nodes", "ranks", "batch", "ms/step", "min to max", "samples/s"),
    *("speed-up", "efficiency", "all-reduce", "waiting"),
)

Row = dict[str, Any]
"""A number of ranks with a strategy; what is measured is a list, a value per round."""


def measure(row: Row, run_dir: Path) -> None:
    """Add the last epoch of a finished training to its row."""
    metrics = Metrics(run_dir / "metrics.jsonl")
    metrics.update()
    last = metrics.epochs[-1]
    total = sums(it for it in metrics.throughputs if it.epoch == last.epoch)
    row["num_nodes"] = metrics.began[-1].num_nodes
    row["last_train_loss"] = last.train_loss
    for name, value in {
        "step_seconds": total.seconds / total.num_steps,
        "samples_per_second": total.num_samples / total.seconds,
        "communication_share": total.communication_seconds / total.seconds,
        "wait_share": total.wait_seconds / total.seconds,
    }.items():
        row.setdefault(name, []).append(value)


def rows_of(options: argparse.Namespace, global_batch_size: int) -> list[Row]:
    """Return the rows of the table: the fewest ranks first, which is the baseline."""
    cores = len(os.sched_getaffinity(0))
    powers = (1 << at for at in range(cores.bit_length()))
    rows = []
    for num in sorted(set(options.ranks or [*powers, cores])):
        # DataParallel ("dp") is one process with all its GPUs.
        dp = [name for name in options.strategies if name == "dp"]
        several = [name for name in options.strategies if name != "dp"]
        batch = global_batch_size * (num if options.per_rank else 1)
        for strategy in ["single", *dp] if num == 1 else several:
            row = {"strategy": strategy, "num_ranks": num, "global_batch_size": batch}
            rows.append(row)
    return rows


def train(mpirun: str, row: Row, training: list[str], run_dir: Path) -> None:
    """Run one training to its end."""
    command = [
        *(*shlex.split(mpirun), "-np", str(row["num_ranks"])),
        *(sys.executable, "-m", "mpitrain", *training, "--strategy", row["strategy"]),
        *("--global-batch-size", str(row["global_batch_size"])),
        *("--runs-dir", str(run_dir.parent), "--name", run_dir.name),
    ]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
    except OSError as error:
        sys.exit(
            f"--mpirun {mpirun!r} cannot be started: {error}; expected a launcher on "
            "the PATH and its options"
        )
    if done.returncode:
        last = "\n".join(done.stdout.strip().splitlines()[-NUM_LINES:])
        sys.exit(f"{shlex.join(command)}\nended with {done.returncode}:\n{last}")


def table(rows: list[Row]) -> str:
    """Return the table in Markdown; speed-up and efficiency are over the first row."""
    lines = [HEAD, (":---", *["---:"] * (len(HEAD) - 1))]
    for row in rows:
        rates = zip(
            row["samples_per_second"], rows[0]["samples_per_second"], strict=True
        )
        # Both of a ratio are of one round: the machine may be slow in another.
        speed_up = statistics.median(rate / first for rate, first in rates)
        efficiency = speed_up * rows[0]["num_ranks"] / row["num_ranks"]
        ms = [1e3 * seconds for seconds in row["step_seconds"]]
        cells = (
            *(row["strategy"], row["num_nodes"], row["num_ranks"]),
            *(row["global_batch_size"], f"{statistics.median(ms):.1f}"),
            f"{min(ms):.1f} to {max(ms):.1f}",
            f"{statistics.median(row['samples_per_second']):.0f}",
            *(f"{speed_up:.2f}", f"{efficiency:.0%}"),
            f"{statistics.median(row['communication_share']):.1%}",
            f"{statistics.median(row['wait_share']):.1%}",
        )
        lines.append(tuple(map(str, cells)))
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        f"| {' | '.join(map(str.rjust, cells, widths))} |" for cells in lines
    )


def main(words: list[str]) -> None:
    """Run all trainings of a round in turns, round after round."""
    at = words.index("--") if "--" in words else len(words)
    training = words[at + 1 :]
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = parser.add_argument
    add("--ranks", type=int, nargs="+", help="default: 1, 2, 4 ... up to the cores")
    add("--strategies", nargs="+", default=["ddp"], choices=["dp", "ddp", "fsdp"])
    add("--per-rank", action="store_true", help="the batch size is of each rank")
    add("--rounds", type=int, default=3, help="the table shows the median")
    add("--mpirun", default="mpirun --oversubscribe", help="launcher and its options")
    add("--output", type=Path, help="JSON file for the results")
    options = parser.parse_args(words[:at])
    if min([options.rounds, *(options.ranks or [])]) < 1:
        parser.error(
            f"found --ranks {options.ranks} --rounds {options.rounds}; expected "
            "numbers of at least 1"
        )
    batch = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    batch.add_argument("--global-batch-size", type=int, default=64)
    batch.add_argument("--epochs", default=str(EPOCHS))
    known, training = batch.parse_known_args(training)
    training += ["--epochs", known.epochs]
    report = about(f"benchmarks/scaling.py {shlex.join(words)}")
    rows = rows_of(options, known.global_batch_size)
    if not rows:
        parser.error("dp is one process: found no --ranks 1, expected it beside dp")
    with tempfile.TemporaryDirectory(prefix="mpitrain-scaling-") as folder:
        for number in range(1, options.rounds + 1):
            for at, row in enumerate(rows):
                run_dir = Path(folder, f"row-{at}-round-{number}")
                train(options.mpirun, row, training, run_dir)
                measure(row, run_dir)
            print(f"round {number} of {options.rounds}", file=sys.stderr, flush=True)
        environment = json.loads((run_dir / "environment.json").read_text())
    print(table(rows), flush=True)
    write({**report, "environment": environment, "rows": rows}, options.output)


if __name__ == "__main__":
    main(sys.argv[1:])
