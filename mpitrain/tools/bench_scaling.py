"""`python -m mpitrain bench scaling`: one training on 1, 2, 4 ... ranks, in turns."""

from __future__ import annotations

import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Annotated, Literal

from tyro.conf import arg

from mpitrain.config import TrainConfig
from mpitrain.errors import MpitrainError, UsageError
from mpitrain.flags import PROGRAM, read_flags
from mpitrain.launch.env_checks import is_one_of_several
from mpitrain.record.reading import Metrics, sums
from mpitrain.record.run_dir import read_json
from mpitrain.tools.output import deliver

EPOCHS = 2
"""Of each training where the training flags name none; the last one is timed."""

FIXED_FIELDS = ("name", "runs_dir", "strategy")
"""Fields of the training that this command sets itself."""

NUM_LINES = 20
"""Of the output of a training that failed."""

HEAD = (
    *("strategy", "nodes", "ranks", "batch", "ms/step", "min to max", "samples/s"),
    *("speed-up", "efficiency", "all-reduce", "waiting"),
)

Strategy = Literal["dp", "ddp", "fsdp"]


@dataclass(frozen=True, kw_only=True)
class BenchScalingConfig:
    """Train on 1, 2, 4 ... ranks in turns, and print throughput and speed-up.

    Flags of the training follow after `--`.
    """

    ranks: Annotated[tuple[int, ...], arg(metavar="N [N ...]")] = ()
    """Numbers of ranks. Default: 1, 2, 4 ... up to the usable cores."""
    strategies: Annotated[tuple[Strategy, ...], arg(metavar="NAME [NAME ...]")] = (
        "ddp",
    )
    """Strategies for 2 ranks and more; 1 rank is always `single`, and `dp` if it is
    named (DataParallel: one process, all its GPUs)."""
    per_rank: bool = False
    """Weak scaling: --global-batch-size is the batch size of each rank."""
    rounds: int = 3
    """Rounds over all rows; the table shows the median."""
    mpirun: str = "mpirun --oversubscribe"
    """Launcher and its options, for instance "mpirun --hostfile hosts -x PATH"."""
    output: Path | None = None
    """JSON file to write the results to."""

    def __post_init__(self) -> None:
        for flag, value in (
            ("--ranks", min(self.ranks, default=1)),
            ("--rounds", self.rounds),
        ):
            if value < 1:
                raise UsageError(f"{flag} must be at least 1, found {value!r}")


class BenchError(MpitrainError):
    """A training that was to be timed failed."""


@dataclass(kw_only=True)
class Row:
    """One row of the table: a number of ranks with a strategy. Rounds in order."""

    strategy: str
    num_ranks: int
    global_batch_size: int
    num_nodes: int = 0
    step_seconds: list[float] = field(default_factory=list)
    """Mean seconds of a step, on the rank that took longest."""
    samples_per_second: list[float] = field(default_factory=list)
    communication_share: list[float] = field(default_factory=list)
    """Share of a step that the all-reduce adds after the backward pass."""
    wait_share: list[float] = field(default_factory=list)
    """Share of a step that ranks wait for the slowest one, mean over ranks."""
    last_train_loss: float = 0.0
    """Of the last epoch: the same in every row of a fixed problem."""

    def add(self, run_dir: Path) -> None:
        """Add the last epoch of a finished training."""
        metrics = Metrics(run_dir / "metrics.jsonl")
        metrics.update()
        last = metrics.epochs[-1]
        total = sums(row for row in metrics.throughputs if row.epoch == last.epoch)
        self.num_nodes = metrics.began[-1].num_nodes
        self.step_seconds.append(total.seconds / total.num_steps)
        self.samples_per_second.append(total.num_samples / total.seconds)
        self.communication_share.append(total.communication_seconds / total.seconds)
        self.wait_share.append(total.wait_seconds / total.seconds)
        self.last_train_loss = last.train_loss

    def speed_up(self, first: Row) -> float:
        """Samples per second over those of `first`: median of the rounds' ratios."""
        pairs = zip(self.samples_per_second, first.samples_per_second, strict=True)
        return statistics.median(mine / other for mine, other in pairs)


def bench_scaling(argv: Sequence[str]) -> None:
    """Run one training on each number of ranks, in turns, and print a table.

    Starts `mpirun` itself, so it is not started by `mpirun`. Each training is an
    ordinary one in a temporary folder of runs. In `argv` its flags follow ``--``.
    """
    if is_one_of_several(os.environ):
        raise UsageError(
            "bench scaling starts mpirun itself, and was started by mpirun; expected "
            f"{PROGRAM} bench scaling --ranks 1 2 4, without mpirun"
        )
    at = argv.index("--") if "--" in argv else len(argv)
    words, training = list(argv[:at]), list(argv[at + 1 :])
    config = read_flags(
        BenchScalingConfig, words, program=f"{PROGRAM} bench scaling", files=False
    )
    asked = read_flags(TrainConfig, training, program=PROGRAM)
    for name in FIXED_FIELDS:
        if getattr(asked, name) != getattr(TrainConfig, name):
            flag = "--" + name.replace("_", "-")
            raise UsageError(f"{flag} after -- is set by bench scaling; leave it out")
    if "--epochs" not in training:
        training = [*training, "--epochs", str(EPOCHS)]
    rows = rows_of(config, asked.global_batch_size)
    with tempfile.TemporaryDirectory(prefix="mpitrain-bench-") as runs_dir:
        for number in range(1, config.rounds + 1):
            for row in rows:
                row.add(_train(config.mpirun, row, training, Path(runs_dir), number))
            print(f"round {number} of {config.rounds}", file=sys.stderr, flush=True)
        last = _run_dir(Path(runs_dir), rows[-1], config.rounds)
        environment = read_json(last / "environment.json")
    print(table(rows), flush=True)
    if config.output is not None:
        report = {
            "date": datetime.now().astimezone().isoformat(timespec="seconds"),
            "command": shlex.join([*PROGRAM.split(), "bench", "scaling", *argv]),
            "environment": environment,
            "rows": [vars(row) for row in rows],
        }
        deliver(json.dumps(report, indent=2) + "\n", config.output)


def rows_of(config: BenchScalingConfig, global_batch_size: int) -> list[Row]:
    """Return the rows of the table: the fewest ranks first, which is the baseline.

    >>> config = BenchScalingConfig(ranks=(4, 1), per_rank=True)
    >>> [(r.strategy, r.num_ranks, r.global_batch_size) for r in rows_of(config, 64)]
    [('single', 1, 64), ('ddp', 4, 256)]
    """
    one = ("single", *(name for name in config.strategies if name == "dp"))
    several = tuple(name for name in config.strategies if name != "dp")
    return [
        Row(
            strategy=strategy,
            num_ranks=num,
            global_batch_size=global_batch_size * (num if config.per_rank else 1),
        )
        for num in sorted(set(config.ranks or _powers_of_two()))
        for strategy in (one if num == 1 else several)
    ]


def _powers_of_two() -> list[int]:
    """Return 1, 2, 4 ... and the number of cores that this process may use."""
    cores = len(os.sched_getaffinity(0))
    return [*(1 << at for at in range(cores.bit_length()) if 1 << at < cores), cores]


def _run_dir(runs_dir: Path, row: Row, number: int) -> Path:
    return runs_dir / f"{row.strategy}-{row.num_ranks}-round-{number}"


def _train(
    mpirun: str, row: Row, training: Sequence[str], runs_dir: Path, number: int
) -> Path:
    """Run one training to its end; return its run folder."""
    run_dir = _run_dir(runs_dir, row, number)
    command = [
        *(*shlex.split(mpirun), "-np", str(row.num_ranks)),
        *(sys.executable, "-m", "mpitrain", *training),
        *("--strategy", row.strategy, "--runs-dir", str(runs_dir)),
        *("--global-batch-size", str(row.global_batch_size), "--name", run_dir.name),
    ]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            check=False,
        )
    except OSError as error:
        raise BenchError(f"--mpirun {mpirun!r} cannot be started: {error}") from None
    if done.returncode:
        last = "\n".join(done.stdout.strip().splitlines()[-NUM_LINES:])
        raise BenchError(
            f"status {done.returncode} of {shlex.join(command)}, which printed\n{last}"
        )
    return run_dir


def table(rows: Sequence[Row]) -> str:
    """Return the table in Markdown; speed-up and efficiency are over the first row."""
    first = rows[0]
    lines: list[Sequence[str]] = [HEAD, [":---", *["---:"] * (len(HEAD) - 1)]]
    for row in rows:
        speed_up = row.speed_up(first)
        efficiency = speed_up * first.num_ranks / row.num_ranks
        low, high = 1e3 * min(row.step_seconds), 1e3 * max(row.step_seconds)
        lines.append(
            (
                *(row.strategy, str(row.num_nodes), str(row.num_ranks)),
                str(row.global_batch_size),
                f"{1e3 * statistics.median(row.step_seconds):.1f}",
                f"{low:.1f} to {high:.1f}",
                f"{statistics.median(row.samples_per_second):.0f}",
                *(f"{speed_up:.2f}", f"{efficiency:.0%}"),
                f"{statistics.median(row.communication_share):.1%}",
                f"{statistics.median(row.wait_share):.1%}",
            )
        )
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        f"| {' | '.join(map(str.rjust, cells, widths))} |" for cells in lines
    )
