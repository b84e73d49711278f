"""What it costs a training to be recorded: one job, with and without by turns.

    .venv/bin/mpirun -np 8 --oversubscribe .venv/bin/python benchmarks/recording.py
    .venv/bin/python benchmarks/recording.py --rounds 2000

The default network on the digits. A round is three epochs, in an order by lot, the same
on all ranks: one of which everything is recorded that is without ``--log`` (the time of
each phase of each step on each rank, `metrics.jsonl`, `times/`, who is waited for, what
ails the training), one with the times alone, and one of which nothing is: there the
ranks add up the epoch's loss, as whoever trains wants it, and no more.

An epoch's time is the mean of the ranks' wall time, until all ranks have done it; and
the time that the cores of all of them were busy. It is compared with that of the same
round, since the machine is now faster, now slower. A ratio is the geometric mean of the
rounds without the tenths at both ends, when something else had the cores; its interval
is where 95 % of what is drawn of the rounds lie. What the threads take that make and
write the lines, at any time, is known by their own clocks, and counts for the recorded
epochs, though they wake in others, too: of wall time as if the cores in use had shared
it evenly. What is done once in a second or two, the times summed up and told, is taken
out of the epochs in which it is done, and its mean counts for all of their kind.

The screen's line of an epoch is no part of the record. Nor are checkpoints. The weight
that has a hook keeps an empty list of them: some tenths of a microsecond in all kinds.
"""

from __future__ import annotations

import argparse
import gc
import math
import os
import random
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from record import about, write

import mpitrain
from mpitrain.data.sources import digits
from mpitrain.launch.shared import all_ranks
from mpitrain.models.build import build_model
from mpitrain.record.console import Lines
from mpitrain.record.events import Listener, Listeners, Silent, StepRow
from mpitrain.record.health import Health
from mpitrain.record.lines import JsonLines
from mpitrain.record.recorder import Recorder
from mpitrain.record.times import RankTimes
from mpitrain.train.clock import Clock
from mpitrain.train.config import TrainConfig
from mpitrain.train.pace import PACE_SECONDS, Untold
from mpitrain.train.steps import SoFar, Steps
from mpitrain.world import World

NOTHING, TIMES, ALL = range(3)
"""What is recorded of an epoch."""

NOT_COUNTED = 3
"""First rounds: caches."""

AT_THE_ENDS = 0.1
"""Of the rounds' ratios, the share at each end that does not count."""


class NoClock(Clock):
    """Takes no time, and knows nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.is_following = True

    def enter(self, phase: int) -> None:
        """Do nothing."""

    def follow(self, weights: object) -> None:
        """Do nothing."""

    def end(self, *, is_step: bool, then: int) -> None:
        """Do nothing."""


class AtTheEnd(Steps):
    """Lets sums meet at an epoch's end alone, as in one shorter than two seconds."""

    def meet(self, *of_steps: Any, **how: Any) -> list[StepRow]:
        """Let the next ones wait for long."""
        rows = super().meet(*of_steps, **how)
        self._num_at_once = sys.maxsize
        return rows


class Told(Untold):
    """Knows how long it took to tell: in few epochs, whose ends do not count."""

    def __init__(
        self, clock: Clock, times: RankTimes, now: Callable[[], NDArray[np.float64]]
    ) -> None:
        super().__init__(clock, times, "cpu", int)
        self._now = now
        self._spent = np.zeros(2)

    def take_spent(self) -> NDArray[np.float64]:
        """Return the seconds since the last call: of wall time, of cores."""
        spent, self._spent = self._spent, np.zeros(2)
        return spent

    def _take(self) -> None:
        self._spent -= self._now()
        super()._take()
        self._spent += self._now()

    def _tell(self, listeners: Listeners) -> None:
        self._spent -= self._now()
        super()._tell(listeners)
        self._spent += self._now()


class LossAlone(Steps):
    """Adds up the loss of an epoch, and nothing else."""

    def __init__(self) -> None:
        super().__init__(Untold(NoClock(), None, "cpu", int))
        self._num_at_once = sys.maxsize

    def meet(self, so_far: SoFar, *_: Any, **__: Any) -> list[StepRow]:
        """Add it up; return a row of its last step."""
        steps, self._steps = self._steps, []
        losses = [it for step in steps for it in step.losses]
        count = sum(len(it.indices) for it in losses)
        own = torch.stack([it.total for it in losses]).double().sum()
        sums = torch.stack((own, own.new_tensor(count)))
        if dist.get_world_size() > 1:
            dist.all_reduce(sums)
        loss_sum, num = sums.tolist()
        so_far.loss_sum, so_far.num_samples = loss_sum, int(num)
        where, last = (so_far.epoch, so_far.num_steps), steps[-1]
        return [StepRow(*where, loss_sum / num, last.rate, last.norm)]


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
    trainer.listener = Silent()  # until it is recorded
    return trainer


class Kinds:
    """A trainer whose epochs are recorded in one way or another.

    Args:
        trainer: Set up, and it has trained one epoch.
        folder: Where the record goes.
        world: Where this process stands.
    """

    def __init__(self, trainer: mpitrain.Trainer, folder: Path, world: World) -> None:
        self._trainer = trainer
        self._clock = trainer.clock
        hook = self._clock._hook
        self._hooks: dict[int, Any] = {} if hook is None else hook.hooks_dict_ref()
        self._times = RankTimes(folder, world, 0.0)
        self._times.clock = self._clock
        files: list[JsonLines[Any]] = [self._times._lines]
        screen = Listeners(Silence(0) if world.is_rank_zero else None)
        hearing: list[Listener] = []
        self._recorder: Recorder | None = None
        if world.is_rank_zero:
            self._recorder = Recorder(folder, world, 0.0)
            self._recorder.console = Silence(0)
            hearing = [self._recorder, Health(world, "0", "runs/x")]
            files.append(self._recorder._metrics)
        all_heard = Listeners(*hearing)
        self.told = Told(self._clock, self._times, self.now)
        steps = AtTheEnd(self.told)
        self._kinds: list[tuple[Any, ...]] = [
            (NoClock(), screen, LossAlone(), math.inf),
            (self._clock, screen, steps, PACE_SECONDS),
            (self._clock, all_heard, steps, PACE_SECONDS),
        ]
        of_names = {it.name: it for it in threading.enumerate()}
        self._writers = [of_names[file._path.stem] for file in files]

    def turn_to(self, kind: int) -> None:
        """Record the next epoch so."""
        trainer = self._trainer
        trainer.clock, trainer._heard, trainer._steps, seconds = self._kinds[kind]
        trainer.pace_seconds = seconds
        self._hooks.clear()
        if kind != NOTHING:
            self._hooks[0] = self._clock._enter_now

    def writers_seconds(self) -> tuple[float, float]:
        """Return how long threads that write had a core: those of times, of steps."""
        clocks = [time.pthread_getcpuclockid(it.ident or 0) for it in self._writers]
        times, *others = map(time.clock_gettime, clocks)
        return times, sum(others)

    def now(self) -> NDArray[np.float64]:
        """Return the time by the wall, and by the cores without those who write."""
        cores = time.process_time() - sum(self.writers_seconds())
        return np.array((time.perf_counter(), cores))

    def leave_out(self, seconds: float) -> None:
        """Let no line of `times/` come sooner for an epoch that was not recorded."""
        self._times._line_ends += seconds

    def close(self) -> None:
        """Let the record end."""
        self._times.close()
        if self._recorder is not None:
            self._recorder.finish()


def ratio_of(one: NDArray[np.float64], other: NDArray[np.float64]) -> Any:
    """Return how much longer one kind of epoch takes; of the last axis."""
    ratios = np.sort(np.log(one / other))
    num = round(AT_THE_ENDS * ratios.shape[-1])
    return np.exp(ratios[..., num : ratios.shape[-1] - num].mean(-1))


def interval_of(
    one: NDArray[np.float64], other: NDArray[np.float64], num_draws: int = 1000
) -> NDArray[np.float64]:
    """Return where the ratio lies in 95 % of what is drawn of the rounds, as many."""
    rows = np.random.default_rng(0).integers(len(one), size=(num_draws, len(one)))
    return np.quantile(ratio_of(one[rows], other[rows]), (0.025, 0.975))


def figures(
    seconds: NDArray[np.float64], at_times: NDArray[np.float64], num_steps: int
) -> dict[str, Any]:
    """Compare the kinds of epochs.

    Args:
        seconds: float64 `(rounds, kinds)`: of each epoch.
        at_times: What is not in each epoch adds to one, float64 `(kinds,)`.
        num_steps: Of an epoch.
    """
    nothing = seconds[:, NOTHING]
    usual = float(np.median(nothing))
    found: dict[str, Any] = {"seconds of an epoch without": usual}
    for name, kind in (("all", ALL), ("times alone", TIMES)):
        more = float(at_times[kind]) / usual
        ratio = float(ratio_of(seconds[:, kind], nothing)) + more
        low, high = (interval_of(seconds[:, kind], nothing) + more).tolist()
        found[name] = {
            "ratio": ratio,
            "its 95 % interval": [low, high],
            "of it what is written and told at times": more,
            "seconds of a step more": (ratio - 1) * usual / num_steps,
        }
    return found


def main() -> None:
    """Measure, and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=600, help="that count")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    asked = parser.parse_args()
    with mpitrain.init(device="cpu") as world, tempfile.TemporaryDirectory() as made:
        ranks = all_ranks(world)
        num = world.world_size
        words = f"--rounds {asked.rounds}"
        report = about(f"mpirun -np {num} benchmarks/recording.py {words}")
        folder = Path(ranks.on_rank_zero(lambda: made, "make a folder"))
        config = TrainConfig(epochs=1_000_000, schedule="constant", lr=0.01)
        trainer = trainer_of(world, config)
        setup = trainer.set_up()
        (stage,) = setup.plan.stages
        setup.begin(stage)
        gc.freeze()  # as a job does
        trainer.train_epoch(stage)
        # One trainer: two of them, recorded or not, are not equally fast.
        kinds = Kinds(trainer, folder, world)
        lots = random.Random(1)  # of all ranks
        own, told = np.zeros((NOT_COUNTED + asked.rounds, 3, 2)), np.zeros((3, 2))
        first = np.array(kinds.writers_seconds())
        for of_round in own:
            for kind in lots.sample(range(3), 3):
                ranks.tell_all(None)
                kinds.turn_to(kind)
                before = kinds.now()
                trainer.train_epoch(stage)
                ranks.tell_all(None)
                of_round[kind] = kinds.now() - before
                if kind == NOTHING:
                    kinds.leave_out(of_round[kind][0])
                spent = kinds.told.take_spent()
                of_round[kind] -= spent
                told[kind] += spent
        of_times, of_steps = (kinds.writers_seconds() - first) / len(own)
        kinds.close()
        of_ranks = np.array(ranks.tell_all(own[NOT_COUNTED:]))
        written = (0.0, of_times / 2, of_times / 2 + of_steps)  # by kind
        writing = np.array(ranks.tell_all(written)).sum(0)
        telling = np.array(ranks.tell_all(told / len(own)))
        steps = setup.plan.steps_per_epoch
        if not world.is_rank_zero or steps is None:
            return
        report |= {"world_size": num, "rounds": asked.rounds, "steps_per_epoch": steps}
        num_cores = min(num, len(os.sched_getaffinity(0)))
        wall = writing / num_cores + telling[..., 0].mean(0)
        core = writing + telling[..., 1].sum(0)
        report["wall"] = figures(of_ranks[..., 0].mean(0), wall, steps)
        report["core"] = figures(of_ranks[..., 1].sum(0), core, steps)
        for clock in ("wall", "core"):
            usual = report[clock]["seconds of an epoch without"]
            print(f"{num} ranks, {clock} time: a step {1000 * usual / steps:.3f} ms")
            for name in ("all", "times alone"):
                found = report[clock][name]
                low, high = found["its 95 % interval"]
                print(
                    f"  {name}: {found['ratio']:.4f} ({low:.4f} to {high:.4f}), "
                    f"{1e6 * found['seconds of a step more']:.1f} microseconds a step"
                )
        write(report, asked.json)


if __name__ == "__main__":
    main()
