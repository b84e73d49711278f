"""How long a training stands still for a checkpoint, beside a synchronous one.

    .venv/bin/python benchmarks/checkpoints.py
    .venv/bin/mpirun -np 2 .venv/bin/python benchmarks/checkpoints.py --millions 50

A state of so many million float32 parameters is written by turns: asynchronously, where
what counts is how long the training stands still, and synchronously, to the end, by the
same code. The training's own work is not part of it. Also: what a step pays for it that
ranks tell each other whether to stop.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch
from record import about, spread, write

import mpitrain
from mpitrain.checkpoint.manager import CheckpointManager
from mpitrain.mpi.consensus import Consensus
from mpitrain.mpi.shared_arrays import communicator

TENSOR = 1 << 20
"""Numbers of a tensor."""


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--millions", type=int, default=100, help="of parameters")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--folder", type=Path, help="where to write; default: TMPDIR")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    asked = parser.parse_args()
    report = about(
        f"benchmarks/checkpoints.py --millions {asked.millions} --rounds {asked.rounds}"
    )
    with mpitrain.init(device="cpu") as world:
        ranks = communicator(world)
        with tempfile.TemporaryDirectory(dir=asked.folder) as made:
            folder = Path(ranks.on_rank_zero(lambda: made, "make a folder"))
            manager = CheckpointManager(folder, world, ranks, keep=1)
            num = max(1, round(1e6 * asked.millions / TENSOR))
            state = {f"w/{i}": torch.randn(TENSOR) for i in range(num)}
            stalls: list[float] = []
            whole: list[float] = []
            for turn in range(2 * asked.rounds + 1):
                started = time.perf_counter()
                manager.save(state, {}, turn, 0)
                stall = time.perf_counter() - started
                manager.finish("benchmark")
                seconds = time.perf_counter() - started
                if turn == 0:
                    continue  # memory is taken, the plan made
                (whole if turn % 2 else stalls).append(seconds if turn % 2 else stall)
            ranks.allgather(None)
        consensus = Consensus(world, count=5, kinds=2)
        num_steps = 100_000
        started = time.perf_counter()
        for _ in range(num_steps):
            if consensus.is_due(0):
                consensus.exchange([0] * 5)
        per_step = (time.perf_counter() - started) / num_steps
        consensus.close()
        if not world.is_rank_zero:
            return
        ratio = statistics.median(
            stall / all_ for stall, all_ in zip(stalls, whole, strict=True)
        )
        report |= {
            "world_size": world.world_size,
            "parameters": num * TENSOR,
            "stall_seconds": spread(stalls),
            "synchronous_seconds": spread(whole),
            "stall to synchronous": ratio,
            "agreement_microseconds_per_step": 1e6 * per_step,
        }
        print(
            f"{num * TENSOR / 1e6:.0f} M parameters, {world.world_size} ranks: stands "
            f"still {statistics.median(stalls):.3f} s, synchronous "
            f"{statistics.median(whole):.3f} s, ratio {ratio:.3f}; to agree: "
            f"{1e6 * per_step:.1f} us a step"
        )
        write(report, asked.json)


if __name__ == "__main__":
    main()
