"""What it costs a training to be recorded: one job, with and without by turns.

    .venv/bin/mpirun -np 8 --oversubscribe .venv/bin/python benchmarks/recording.py
    .venv/bin/python benchmarks/recording.py --pairs 40

The default network on the digits, for some seconds each time: threads write twice a
second what was told. With: the time of each phase on each rank, `metrics.jsonl` and
`times/`, all that listen to a job without ``--log``. Without: the losses meet at an
epoch's end, and nothing is written. Wall time, and the time that the cores of all ranks
were busy, which others on the machine disturb less.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
import time
from pathlib import Path

import numpy as np
from record import about, spread, write

import mpitrain
from mpitrain.data.sources import digits
from mpitrain.launch.shared import all_ranks
from mpitrain.models.build import build_model
from mpitrain.record.console import Lines
from mpitrain.record.events import Listener, Listeners, Silent
from mpitrain.record.health import Health
from mpitrain.record.loggers.telling import Loggers
from mpitrain.record.recorder import Recorder
from mpitrain.record.times import NUM_PHASES, RankTimes
from mpitrain.train.clock import Clock
from mpitrain.train.config import TrainConfig
from mpitrain.train.steps import Steps
from mpitrain.world import World

BLOCK_SECONDS = 3.0
"""How long it is recorded, or not, before the other one's turn."""

A_SECOND = [1.0] + [0.0] * (NUM_PHASES - 1)


class NoClock(Clock):
    """Takes no time, and tells a second for each step."""

    def __init__(self) -> None:
        super().__init__()
        self.is_following = True

    def enter(self, phase: int) -> None:
        """Do nothing."""

    def follow(self, weight: object) -> None:
        """Do nothing."""

    def end(self, *, is_step: bool, then: int) -> None:  # noqa: ARG002
        """Keep a second of a step."""
        if is_step:
            self.laps.append(A_SECOND)


class AtTheEnd(Steps):
    """Lets sums meet at an epoch's end alone."""

    are_due = False


class Silence(Lines):
    """A screen that stays dark."""

    def say(self, line: str) -> None:
        """Do nothing."""


def trainer_of(world: World, config: TrainConfig) -> mpitrain.Trainer:
    """Return a trainer of the default net."""
    data = digits()
    net = build_model(
        "convnet", num_classes=10, in_channels=1, image_size=8, seed=config.seed
    )
    trainer = mpitrain.Trainer(net, data.train, data.val, config, world=world)
    trainer.all_weights_used = True
    trainer.listener = Silent()
    return trainer


def interval_of(ratios: list[float], num_draws: int = 2000) -> tuple[float, float]:
    """Return where their median lies in 95 % of what is drawn of them, as many."""
    drawn = np.random.default_rng(0).choice(ratios, (num_draws, len(ratios)))
    low, high = np.quantile(np.median(drawn, axis=1), (0.025, 0.975))
    return float(low), float(high)


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--pairs", type=int, default=20, help="of blocks of epochs")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    asked = parser.parse_args()
    with mpitrain.init(device="cpu") as world, tempfile.TemporaryDirectory() as made:
        ranks = all_ranks(world)
        num = world.world_size
        report = about(f"mpirun -np {num} benchmarks/recording.py")
        folder = Path(ranks.on_rank_zero(lambda: made, "make a folder"))
        config = TrainConfig(epochs=100_000, schedule="constant", lr=0.01)
        trainer = trainer_of(world, config)
        trainer.times = times = RankTimes(folder, world, 0.0)
        listeners: list[Listener] = [Loggers()]
        recorder = None
        if world.is_rank_zero:
            recorder = Recorder(folder, world, 0.0)
            recorder.console = Silence(0)
            listeners = [recorder, *listeners, Health(world, "0", "runs/x")]
        trainer.listener = Listeners(*listeners)
        setup = trainer.set_up()
        (stage,) = setup.plan.stages
        setup.begin(stage)
        # One trainer: two of them, recorded or not, are not equally fast.
        recorded = times, trainer._heard, trainer._clock, trainer._steps
        recorded_clock = trainer._clock
        plain = None, Silent(), NoClock(), AtTheEnd()
        for _ in range(5):
            started = time.perf_counter()
            trainer.train_epoch(stage)
        took = time.perf_counter() - started
        together = ranks.on_rank_zero(lambda: math.ceil(BLOCK_SECONDS / took), "plan")
        walls: dict[bool, list[float]] = {True: [], False: []}
        cores: dict[bool, list[float]] = {True: [], False: []}
        for turn in range(2 * asked.pairs):
            # By turns, and who begins by turns: + - - + + - - +
            is_recorded = turn % 4 in (0, 3)
            kind = recorded if is_recorded else plain
            trainer.times, trainer._heard, trainer._clock, trainer._steps = kind
            # Once in a training, not in each epoch.
            weight = setup.replica.sure_weight if is_recorded else None
            recorded_clock.follow(weight)
            ranks.tell_all(None)
            started, busy = time.perf_counter(), time.process_time()
            for _ in range(together):
                trainer.train_epoch(stage)
            walls[is_recorded].append(time.perf_counter() - started)
            core = sum(ranks.tell_all(time.process_time() - busy))
            cores[is_recorded].append(core)
        times.close()
        ranks.tell_all(None)
        if recorder is None:
            return
        recorder.finish()
        steps = setup.plan.steps_per_epoch
        report |= {
            "world_size": num,
            "pairs": asked.pairs,
            "epochs_of_a_block": together,
            "steps_per_epoch": steps,
        }
        for name, seconds in (("wall", walls), ("core", cores)):
            pairs = zip(seconds[True], seconds[False], strict=True)
            ratios = [on / off for on, off in pairs]
            ratio, (low, high) = statistics.median(ratios), interval_of(ratios)
            sums = sum(seconds[True]) / sum(seconds[False])
            report[name] = {
                "with": spread(seconds[True]),
                "without": spread(seconds[False]),
                "ratio of pairs, median": ratio,
                "its 95 % interval": [low, high],
                "ratio of sums": sums,
            }
            print(
                f"{num} ranks, {name} time of {together} epochs of {steps} steps: "
                f"{statistics.median(seconds[True]):.3f} s recorded, "
                f"{statistics.median(seconds[False]):.3f} s without; ratio "
                f"{ratio:.4f} (median of pairs; {low:.4f} to {high:.4f} in 95 % of "
                f"draws), {sums:.4f} (of sums)"
            )
        write(report, asked.json)


if __name__ == "__main__":
    main()
