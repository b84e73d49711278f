"""Train several times in one job: each as ``python -m mpitrain`` does it.

    mpirun -np 3 python -m mpitrain run many_trainings.py trainings.json

The file has each run's name and flags. Most of a short job is its start.
"""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

import mpitrain
from mpitrain.checkpoint.preemption import PreemptionHandler
from mpitrain.cli import read_config
from mpitrain.mpi.collectives import on_rank_zero
from mpitrain.tools.train.prepare import prepare


def main() -> None:
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    trainings: dict[str, list[str]] = json.loads(Path(sys.argv[1]).read_text())
    job = mpitrain.init(device="cpu", hang_timeout_seconds=60)
    with job as world:
        from mpitrain.tools.train.run import run_training

        for name, flags in trainings.items():
            config = read_config(["--name", name, *flags])
            if world.is_rank_zero:
                print(f"--- {name}", flush=True)
            run = on_rank_zero(job.comm, lambda: prepare(config), "prepare")  # noqa: B023
            run_dir = run.run_dir if world.is_rank_zero else None
            run_training(world, run, PreemptionHandler(run_dir, None, 0.0), 0.0)


main()
