"""What recording costs a training: epochs with and without callbacks, by turns.

    .venv/bin/mpirun -np 4 --oversubscribe .venv/bin/python benchmarks/recording.py
    .venv/bin/python benchmarks/recording.py --rounds 2000

One trainer of the default network on the digits. In each round every rank trains one
epoch with all callbacks of the command line (record, rank times, health check) and one
with none, in random order. A round's ratio compares the mean wall time of the ranks.
"""

from __future__ import annotations

import argparse
import gc
import random
import tempfile
import time
from pathlib import Path

import numpy as np
from record import about, spread, write

import mpitrain
from mpitrain.config import TrainConfig
from mpitrain.models.build import build_model
from mpitrain.mpi.shared_arrays import communicator
from mpitrain.record.health import HealthCheck
from mpitrain.record.rank_times import RankTimes
from mpitrain.record.recorder import Recorder
from mpitrain.tasks.image_classification.datasets.named import digits

NOT_COUNTED = 3
"""First rounds: caches."""


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=300, help="that count")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    asked = parser.parse_args()
    with mpitrain.init(device="cpu") as world, tempfile.TemporaryDirectory() as made:
        ranks = communicator(world)
        run = Path(ranks.on_rank_zero(lambda: made, "make a folder")) / "run"
        data = digits()
        model = build_model(
            "convnet", num_classes=10, in_channels=1, image_size=8, seed=1
        )
        trainer = mpitrain.Trainer(
            model,
            data.train,
            data.val,
            TrainConfig(epochs=1_000_000, schedule="constant", lr=0.01),
            world=world,
            callbacks=[Recorder(run), RankTimes(run), HealthCheck("runs/x")],
            find_unused_parameters=False,
        )
        engine = trainer.set_up()
        engine.start_stage(engine.plan.stages[0])
        trainer.call("on_fit_start")
        hooks = {True: trainer._hooks, False: {name: [] for name in trainer._hooks}}
        gc.freeze()  # as a job does
        lots = random.Random(1)  # the same on all ranks
        seconds = np.zeros((NOT_COUNTED + asked.rounds, 2))
        for of_round in seconds:
            for is_recorded in lots.sample((False, True), 2):
                trainer._hooks = hooks[is_recorded]
                ranks.allgather(None)
                began = time.perf_counter()
                trainer.train_epoch()
                ranks.allgather(None)
                of_round[int(is_recorded)] = time.perf_counter() - began
                trainer.state.begin_next_epoch()
        trainer._hooks = hooks[True]
        trainer.call("on_stop", "the benchmark is over")
        mean = np.mean(ranks.allgather(seconds[NOT_COUNTED:]), axis=0)
        if world.is_rank_zero:
            report = about(f"benchmarks/recording.py --rounds {asked.rounds}")
            ratio = spread((mean[:, 1] / mean[:, 0]).tolist())
            report |= {"world_size": world.world_size, "ratio": ratio}
            low, high = ratio["quartiles"]
            print(
                f"{world.world_size} ranks: with callbacks / without = "
                f"{ratio['median']:.4f} (quartiles {low:.4f} to {high:.4f})"
            )
            write(report, asked.json)


if __name__ == "__main__":
    main()
