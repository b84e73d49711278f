"""What it costs a training to be recorded: one job, with and without by turns.

    .venv/bin/mpirun -np 8 --oversubscribe .venv/bin/python benchmarks/recording.py
    .venv/bin/python benchmarks/recording.py --epochs 2000

The default network on the digits. Recorded: the time of each phase on each rank,
`metrics.jsonl` and `times/`, all that listen to a job without ``--log``. Not recorded:
nothing is written. With both, the losses meet at each epoch's end, and the times with
them. Wall time, the mean of the ranks, and the time that the cores of all of them were
busy, which others on the machine disturb less.

By lot, the same one on all ranks, for each step: whether the clock runs in it. And for
the rest of each epoch (its first step, the evaluation, what its end tells, until all
ranks have done that): whether it is told. The machine is now faster, now slower, for
longer than a step: so both kinds have their share of that. A part's time is the mean of
all that were alike but for the slowest tenth, when something else had the core.

Lines are made as their threads would, twice a second and all that have come, but
between two epochs, and timed apart: that counts for the epochs that they tell of, in
wall time of the rank that takes longest. What is left to the threads is one call of
`write`. The screen's line of an epoch is no part of the record: whoever trains has it.
"""

from __future__ import annotations

import argparse
import gc
import math
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from record import about, write

import mpitrain
from mpitrain.data.sources import digits
from mpitrain.launch.shared import all_ranks
from mpitrain.models.build import build_model
from mpitrain.record.console import Lines
from mpitrain.record.events import Listener, Listeners, Silent, StepRow
from mpitrain.record.health import Health
from mpitrain.record.lines import WRITE_SECONDS, JsonLines
from mpitrain.record.recorder import Recorder
from mpitrain.record.times import FORWARD, NUM_PHASES, RankTimes, Seconds
from mpitrain.train.clock import Clock
from mpitrain.train.config import TrainConfig
from mpitrain.train.pace import PACE_SECONDS
from mpitrain.train.steps import Steps
from mpitrain.world import World

COUNTED = 0.9
"""Of all that are alike, the share that counts: the fastest."""

NOT_COUNTED = 6
"""First epochs: caches, and sums that meet more often."""


class NoClock(Clock):
    """Takes no time, and tells the same for each step.

    Attributes:
        a_step: That: about what a step takes, or a second of them comes too soon.
    """

    def __init__(self) -> None:
        super().__init__()
        self.is_following = True
        self.a_step: Seconds = [0.005 * (it == FORWARD) for it in range(NUM_PHASES)]

    def enter(self, phase: int) -> None:
        """Do nothing."""

    def follow(self, weights: object) -> None:
        """Do nothing."""

    def end(self, *, is_step: bool, then: int) -> None:  # noqa: ARG002
        """Keep some seconds of a step."""
        if is_step:
            self.laps.append(self.a_step)


class ByTurns(NoClock):
    """Now one clock, now the other.

    Args:
        recorded: The one that runs; it has hooked the weight that comes last. That one
            keeps an empty list of hooks without it: some tenths of a microsecond.
    """

    def __init__(self, recorded: Clock) -> None:
        super().__init__()
        self._recorded, self._plain = recorded, NoClock()
        self._hooks: dict[int, Any] = {}
        if recorded._hook is not None:
            self._hooks = recorded._hook.hooks_dict_ref()

    def turn(self, *, is_recorded: bool) -> None:
        """Be one of them from here on."""
        clock = self._recorded if is_recorded else self._plain
        self.enter, self.end = clock.enter, clock.end  # type: ignore[method-assign]
        self._hooks.clear()
        if is_recorded:
            self._hooks[0] = self._recorded._enter_now

    def take(self) -> tuple[NDArray[np.float64], list[Seconds]]:
        """Return what both have."""
        laps, between = self._recorded.take()
        if len(laps):
            self._plain.a_step = laps.mean(0).tolist()
        return np.concatenate([laps, self._plain.take()[0]]), between


class AtTheEnd(Steps):
    """Lets sums meet at an epoch's end alone."""

    def meet(self, *of_steps: Any) -> list[StepRow]:
        """Let the next ones wait for long."""
        rows = super().meet(*of_steps)
        self._num_at_once = sys.maxsize
        return rows


class Making:
    """Makes lines in place of the threads that write them.

    Attributes:
        seconds: What it has taken, by both clocks.
    """

    def __init__(self, files: list[JsonLines[Any]]) -> None:
        self._make = [file._encode for file in files]
        self._made_at = time.perf_counter()
        self.seconds = np.zeros(2)
        for file in files:
            file._encode = lambda _=0: None  # type: ignore[method-assign]

    def make_if_due(self) -> None:
        """Make all that have come, twice a second."""
        if time.perf_counter() - self._made_at > WRITE_SECONDS:
            self.make()

    def make(self) -> None:
        """Make all that have come."""
        before = _now()
        for make in self._make:
            make()
        self._made_at = before[0]
        self.seconds += np.subtract(_now(), before)


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


class Marks:
    """Whose turn it is in each part of an epoch, and how long that took this rank.

    Args:
        clock: The one that turns.
    """

    def __init__(self, clock: ByTurns) -> None:
        self._clock = clock
        self._lots = random.Random(1)  # of all ranks
        self._ends: list[tuple[float, float]] = []
        self._starts: list[tuple[float, float]] = []
        self._turns: list[bool] = []
        self._num_steps = 0

    def begin(self, num_steps: int) -> bool:
        """Begin an epoch; return whether it is told."""
        self._ends, self._starts, self._turns = [], [], [self._lots.random() < 0.5]
        self._num_steps = num_steps
        self._turn_to(self._turns[0])
        return self._turns[0]

    def step_done(self, _: int) -> None:
        """Let it be the next one's turn; after the last step, the rest's."""
        self._ends.append(_now())
        is_last = len(self._ends) == self._num_steps
        is_recorded = self._turns[0] if is_last else self._lots.random() < 0.5
        if not is_last:
            self._turns.append(is_recorded)
        self._turn_to(is_recorded)

    def _turn_to(self, is_recorded: bool) -> None:
        self._clock.turn(is_recorded=is_recorded)
        self._starts.append(_now())

    def end(self) -> tuple[list[bool], NDArray[np.float64]]:
        """Return whose turn it was, and seconds `(2, steps)` of both clocks.

        Of the rest, and then of all steps but the first, which is a part of the rest.
        """
        self._ends.append(_now())
        seconds = np.subtract(self._ends, self._starts).T
        seconds[:, 0] += seconds[:, -1]
        return self._turns, seconds[:, :-1]


def _now() -> tuple[float, float]:
    return time.perf_counter(), time.process_time()


def part_of(
    turns: NDArray[np.bool_],
    seconds: NDArray[np.float64],
    *,
    is_recorded: bool,
    counted: float = COUNTED,
) -> float:
    """Return how long one takes, of parts that are alike; without the slowest."""
    found = np.sort(seconds[turns == is_recorded])
    return float(found[: round(counted * found.size)].mean())


def epoch_of(
    turns: NDArray[np.bool_], seconds: NDArray[np.float64], **how: Any
) -> float:
    """Return how long an epoch takes, of parts `(epochs, steps)` of many."""
    rest = part_of(turns[:, 0], seconds[:, 0], **how)
    step = part_of(turns[:, 1:], seconds[:, 1:], **how)
    return rest + (int(seconds.shape[1]) - 1) * step


def ratio_of(
    turns: NDArray[np.bool_],
    seconds: NDArray[np.float64],
    making: float,
    counted: float = COUNTED,
) -> float:
    """Return how much longer an epoch takes that is recorded.

    Args:
        turns: Which parts were recorded, `(epochs, steps)`.
        seconds: Of each of them.
        making: What the lines of an epoch take to be made.
        counted: The share that counts.
    """
    on, off = (
        epoch_of(turns, seconds, is_recorded=it, counted=counted)
        for it in (True, False)
    )
    return float((on + making) / off)


def interval_of(
    turns: NDArray[np.bool_],
    seconds: NDArray[np.float64],
    making: float,
    num_draws: int = 1000,
) -> tuple[float, float]:
    """Return where the ratio lies in 95 % of what is drawn of the epochs, as many."""
    random_rows = np.random.default_rng(0).integers(
        len(turns), size=(num_draws, len(turns))
    )
    drawn = [ratio_of(turns[rows], seconds[rows], making) for rows in random_rows]
    low, high = np.quantile(drawn, (0.025, 0.975))
    return float(low), float(high)


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=600, help="that count")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    asked = parser.parse_args()
    with mpitrain.init(device="cpu") as world, tempfile.TemporaryDirectory() as made:
        ranks = all_ranks(world)
        num = world.world_size
        words = f"--epochs {asked.epochs}"
        report = about(f"mpirun -np {num} benchmarks/recording.py {words}")
        folder = Path(ranks.on_rank_zero(lambda: made, "make a folder"))
        config = TrainConfig(epochs=100_000, schedule="constant", lr=0.01)
        trainer = trainer_of(world, config)
        trainer.times = times = RankTimes(folder, world, 0.0)
        files: list[JsonLines[Any]] = [times._lines]
        listeners: list[Listener] = []
        recorder: Recorder | None = None
        screen: Lines | Silent = Silent()
        if world.is_rank_zero:
            recorder = Recorder(folder, world, 0.0)
            recorder.console = screen = Silence(0)
            listeners = [recorder, Health(world, "0", "runs/x")]
            files.append(recorder._metrics)
        trainer.listener = Listeners(*listeners)
        setup = trainer.set_up()
        (stage,) = setup.plan.stages
        setup.begin(stage)
        trainer.train_epoch(stage)
        # One trainer: two of them, recorded or not, are not equally fast.
        trainer.clock = clock = ByTurns(trainer.clock)
        recorded = times, trainer._heard, AtTheEnd(), PACE_SECONDS
        plain = None, screen, AtTheEnd(), math.inf
        marks, making = Marks(clock), Making(files)
        trainer.each_step.append(marks.step_done)
        steps = setup.plan.steps_per_epoch
        assert steps is not None
        gc.freeze()  # as a job does
        found: list[tuple[list[bool], NDArray[np.float64]]] = []
        for _ in range(NOT_COUNTED + asked.epochs):
            ranks.tell_all(None)
            is_told = marks.begin(steps)
            kind = recorded if is_told else plain
            trainer.times, trainer._heard, trainer._steps, seconds = kind
            trainer.pace_seconds = seconds
            trainer.train_epoch(stage)
            ranks.tell_all(None)
            found.append(marks.end())
            making.make_if_due()
        making.make()
        times.close()
        turns = np.array([of_epoch for of_epoch, _ in found])[NOT_COUNTED:]
        own = np.array([seconds for _, seconds in found])[NOT_COUNTED:]
        of_ranks = np.array(ranks.tell_all(own))
        num_told = sum(of_epoch[0] for of_epoch, _ in found)
        of_lines = np.array(ranks.tell_all(making.seconds / num_told))
        if recorder is None:
            return
        recorder.finish()
        report |= {"world_size": num, "epochs": asked.epochs, "steps_per_epoch": steps}
        both = {
            "wall": (of_ranks[:, :, 0].mean(0), float(of_lines[:, 0].max())),
            "core": (of_ranks[:, :, 1].sum(0), float(of_lines[:, 1].sum())),
        }
        for name, (seconds, lines) in both.items():
            on, off = (epoch_of(turns, seconds, is_recorded=it) for it in (True, False))
            on += lines
            low, high = interval_of(turns, seconds, lines)
            with_clock, without = (
                part_of(turns[:, 1:], seconds[:, 1:], is_recorded=it)
                for it in (True, False)
            )
            report[name] = {
                "seconds of an epoch, recorded": on,
                "without": off,
                "ratio": on / off,
                "its 95 % interval": [low, high],
                "ratio, slow ones too": ratio_of(turns, seconds, lines, counted=1.0),
                "seconds for the lines of an epoch": lines,
                "seconds of a step without": without,
                "ratio of a step, its times alone": with_clock / without,
            }
            print(
                f"{num} ranks, {name} time of an epoch of {steps} steps: "
                f"{1000 * on:.2f} ms recorded, {1000 * off:.2f} ms without; ratio "
                f"{on / off:.4f} ({low:.4f} to {high:.4f} in 95 % of draws), "
                f"{1e6 * (on - off) / steps:.0f} microseconds a step; a step's times "
                f"alone {with_clock / without:.4f}"
            )
        write(report, asked.json)


if __name__ == "__main__":
    main()
