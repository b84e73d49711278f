"""The mpi4py backend beside gloo: all-reduce by size, and the step of DDP.

    mpirun -np 8 --oversubscribe .venv/bin/python benchmarks/collectives.py
    mpirun --hostfile hosts --bind-to none .venv/bin/python benchmarks/collectives.py

Both in one run, by turns: ours, gloo's, ours, ... Each figure is the median over the
rounds of the slowest rank's time.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from datetime import date
from importlib import metadata
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import mpitrain
from mpitrain.mpi.implementation import mpi_library_version
from mpitrain.mpi.world import World

SIZES = {
    "1 kB": 1 << 10,
    "8 kB": 8 << 10,
    "64 kB": 64 << 10,
    "256 kB": 256 << 10,
    "1 MB": 1 << 20,
    "4 MB": 4 << 20,
    "25 MB": 25 << 20,
    "100 MB": 100 << 20,
}

WIDTHS = {"26 k": 127, "1.1 M": 1000, "11 M": 3270}
"""Of the hidden layers of a net with about so many weights."""

WARM_UP_ROUNDS = 2

REPEATED_BYTES, REPEATED_WIDTHS = 256 << 10, 3000
"""Small tensors and nets are too quick for a clock: several are timed as one."""


def main() -> None:
    """Measure all, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    asked = parser.parse_args()
    with mpitrain.init(device="cpu") as world:
        groups = {name: dist.new_group(backend=name) for name in ("mpi4py", "gloo")}
        rows = [
            row(
                f"all_reduce {label}",
                all_reduces(num_bytes, groups),
                max(1, REPEATED_BYTES // num_bytes),
                world,
                asked.rounds,
            )
            for label, num_bytes in SIZES.items()
        ]
        rows += [
            row(
                f"DDP step {label}",
                steps(width, groups),
                max(1, REPEATED_WIDTHS // width),
                world,
                asked.rounds,
            )
            for label, width in WIDTHS.items()
        ]
        if world.is_rank_zero:
            tell(rows, world, asked)


def all_reduces(
    num_bytes: int, groups: dict[str, dist.ProcessGroup]
) -> dict[str, Callable[[], None]]:
    """Return one all-reduce of float32 for each group."""
    tensor = torch.zeros(num_bytes // 4)

    def of(group: dist.ProcessGroup) -> Callable[[], None]:
        return lambda: dist.all_reduce(tensor, group=group)

    return {name: of(group) for name, group in groups.items()}


def steps(
    width: int, groups: dict[str, dist.ProcessGroup]
) -> dict[str, Callable[[], None]]:
    """Return one step of data-parallel training for each group, and one alone."""
    inputs, labels = torch.randn(8, 64), torch.randint(0, 10, (8,))

    def of(group: dist.ProcessGroup | None) -> Callable[[], None]:
        torch.manual_seed(0)
        net = nn.Sequential(
            *(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU()),
            nn.Linear(width, 10),
        )
        model = net
        if group is not None:
            model = nn.parallel.DistributedDataParallel(net, process_group=group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

        def step() -> None:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs), labels).backward()
            optimizer.step()

        return step

    return {name: of(group) for name, group in [*groups.items(), ("alone", None)]}


def row(
    label: str,
    calls: dict[str, Callable[[], None]],
    repeats: int,
    world: World,
    num_rounds: int,
) -> dict:
    """Time calls by turns, so many of one at once; the slowest rank counts."""
    seconds: dict[str, list[float]] = {name: [] for name in calls}
    for round_number in range(num_rounds + WARM_UP_ROUNDS):
        for name, call in calls.items():
            dist.barrier()
            started = time.perf_counter()
            for _ in range(repeats):
                call()
            took = torch.tensor([(time.perf_counter() - started) / repeats])
            dist.all_reduce(took, dist.ReduceOp.MAX)
            if round_number >= WARM_UP_ROUNDS:
                seconds[name].append(took.item())
    medians = {name: statistics.median(found) for name, found in seconds.items()}
    ratio = medians["gloo"] / medians["mpi4py"]
    if world.is_rank_zero:
        spread = [
            f"{name} {1e3 * medians[name]:8.3f} ms "
            f"({1e3 * min(found):.3f} to {1e3 * max(found):.3f})"
            for name, found in seconds.items()
        ]
        print(f"{label:18} {'  '.join(spread)}  {ratio:6.1f} x", flush=True)
    return {"what": label, "median_seconds": medians, "ratio": ratio}


def tell(rows: list[dict], world: World, asked: argparse.Namespace) -> None:
    """Write the figures into a file, if one was asked for."""
    start = f"-np {world.world_size} --oversubscribe"
    if world.num_nodes > 1:
        start = "--hostfile hosts --bind-to none"
    report = {
        "date": date.today().isoformat(),
        "command": f"mpirun {start} python benchmarks/collectives.py "
        f"--rounds {asked.rounds}",
        "ranks_per_node": [len(node.ranks) for node in world.nodes],
        "cores": len(os.sched_getaffinity(0)),
        "platform": f"{platform.system()} {platform.machine()}",
        "mpi": mpi_library_version(),
        "versions": {n: metadata.version(n) for n in ("torch", "mpi4py", "mpitrain")},
        "threads_per_rank": world.num_threads,
        "rows": rows,
    }
    if asked.json:
        asked.json.write_text(json.dumps(report, indent=2) + "\n")
    print(f"{world.world_size} ranks on {report['cores']} cores", file=sys.stderr)


if __name__ == "__main__":
    main()
