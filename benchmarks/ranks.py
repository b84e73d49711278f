"""Few ranks beside many on the same cores; and what a step costs, part by part.

    .venv/bin/python benchmarks/ranks.py
    .venv/bin/python benchmarks/ranks.py --ranks 2 4 --pairs 1 --nets wide --steps 3

On 2 cores 8 ranks cannot be faster than 2. How much do they lose? The nets are such
that the work of a rank in a step keeps its core busy: images of 3 x 32 x 32, 256 in a
step over all ranks, through a wide convolutional net (0.37 M weights) or torchvision's
ResNet-18 (11.2 M: 45 MB of gradients to meet in every step). The jobs take turns; each
ratio is of one job with many ranks and the one with few beside it.

With the tiny default net there is next to no work: it shows what a step itself costs,
in wall time and in time on a core, for each rank and part. The parts are timed from
here, around the trainer's methods; nothing in mpitrain knows of it.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from record import about, spread, write

from mpitrain.record.events import Silent

MPIRUN = Path(sys.prefix) / "bin" / "mpirun"

GLOBAL_BATCH_SIZE = 256

IMAGE_SIZE = 32

PARTS = ("load", "forward", "backward", "update", "rest")
"""Of a step; backward has the all-reduce in it, which overlaps with it."""

PARTS_EPOCHS = 12


def main() -> None:
    """Start the jobs, and print what they found."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs=2, default=[2, 8])
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=8, help="that count, of each job")
    parser.add_argument("--nets", nargs="*", default=["wide", "resnet18"])
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--job", type=Path, help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.job is not None:
        rank(asked)
        return
    words = f"--ranks {asked.ranks[0]} {asked.ranks[1]} --pairs {asked.pairs}"
    words += f" --steps {asked.steps} --nets {' '.join(asked.nets)}"
    report = about(f"benchmarks/ranks.py {words}", "mpi4py", "torchvision")
    report["global_batch_size"] = GLOBAL_BATCH_SIZE
    report["nets"] = [compare(net, asked) for net in asked.nets]
    report["parts"] = parts_by_ranks(asked)
    write(report, asked.json)


# --- the jobs -------------------------------------------------------------------------


def compare(net: str, asked: argparse.Namespace) -> dict[str, Any]:
    """Train a net on few and on many ranks, by turns."""
    rates: dict[int, list[float]] = {num: [] for num in asked.ranks}
    for _ in range(asked.pairs):
        for num in asked.ranks:
            rates[num].append(job(num, net, asked.steps)["samples_per_second"])
    few, many = asked.ranks
    ratio = spread([a / b for a, b in zip(rates[many], rates[few], strict=True)])
    medians = {num: statistics.median(of) for num, of in rates.items()}
    low, high = ratio["range"]
    print(
        f"{net}: {medians[many]:.0f} samples/s on {many} ranks, {medians[few]:.0f} on "
        f"{few}; ratio {ratio['median']:.2f} ({low:.2f} to {high:.2f})",
        flush=True,
    )
    return {
        "net": net,
        "samples_per_second": {str(num): spread(of) for num, of in rates.items()},
        "ratio": ratio,
    }


def parts_by_ranks(asked: argparse.Namespace) -> dict[str, Any]:
    """Time the parts of a step of the default net, alone, on few and on many ranks."""
    found: dict[str, Any] = {}
    for num in (1, *asked.ranks):
        jobs = [job(num, "default", 0)["parts"] for _ in range(asked.pairs)]
        found[str(num)] = {
            clock: {
                part: statistics.median(of[clock][part] for of in jobs)
                for part in (*PARTS, "step")
            }
            for clock in ("wall", "core")
        }
    columns = [(num, clock) for num in found for clock in ("wall", "core")]
    titles = [f"{num} rank{'s' * (num != '1')}, {clock}" for num, clock in columns]
    print("\nmicroseconds per step and rank, default net on the digits, batch 64:\n")
    print("| part     | " + " | ".join(titles) + " |")
    print("|:---------|" + "|".join("-" * (len(t) + 1) + ":" for t in titles) + "|")
    for part in (*PARTS, "step"):
        cells = [
            f"{1e6 * found[num][clock][part]:{len(title)}.0f}"
            for (num, clock), title in zip(columns, titles, strict=True)
        ]
        print(f"| {part:8} | " + " | ".join(cells) + " |")
    return found


def job(num_ranks: int, net: str, steps: int) -> dict[str, Any]:
    """Run this file under mpirun; return what rank zero wrote."""
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder) / "told.json"
        command = [str(MPIRUN), "-np", str(num_ranks), "--oversubscribe"]
        command += [sys.executable, __file__, "--job", str(told)]
        command += ["--nets", net, "--steps", str(steps)]
        done = subprocess.run(
            command, capture_output=True, text=True, stdin=subprocess.DEVNULL
        )
        if done.returncode != 0:
            sys.exit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
        found: dict[str, Any] = json.loads(told.read_text())
    told_by = found.get("samples_per_second")
    rate = "" if told_by is None else f": {told_by:.0f} samples/s"
    print(f"{net} on {num_ranks} ranks{rate}", file=sys.stderr, flush=True)
    return found


# --- inside a job ---------------------------------------------------------------------


def rank(asked: argparse.Namespace) -> None:
    """Train as one rank of a job; rank zero writes down what was found."""
    import mpitrain

    (net,) = asked.nets
    with mpitrain.init(device="cpu") as world:
        found = parts(world) if net == "default" else rate(net, asked.steps, world)
        if world.is_rank_zero:
            asked.job.write_text(json.dumps(found))


def rate(net: str, steps: int, world: Any) -> dict[str, Any]:
    """Train a net; return the samples per second of the steps after the first epoch."""
    import mpitrain
    from mpitrain.data.memory import InMemory
    from mpitrain.data.synthetic import make

    num = GLOBAL_BATCH_SIZE * steps
    train, val = (of_synthetic(make(it, 10, IMAGE_SIZE).arrays) for it in (num, 40))
    config = mpitrain.TrainConfig(
        epochs=2, global_batch_size=GLOBAL_BATCH_SIZE, lr=0.01, progress="lines"
    )
    trainer = mpitrain.Trainer(
        build(net), InMemory(*train), InMemory(*val), config, world=world
    )
    trainer.all_weights_used = True
    heard = Heard()
    trainer.listener = heard
    trainer.fit()
    last = heard.epochs[-1]
    return {"samples_per_second": last.train_samples / last.steps_seconds}


def of_synthetic(arrays: Any) -> tuple[Any, Any]:
    import torch

    return (
        torch.from_numpy(arrays["train_inputs"]),
        torch.from_numpy(arrays["train_labels"]),
    )


def build(net: str) -> Any:
    """Build a net by name, the same on all ranks."""
    import torch
    from torch import nn

    if net != "wide":
        from mpitrain.models.build import build_model

        return build_model(
            net, num_classes=10, in_channels=3, image_size=IMAGE_SIZE, seed=1
        )
    torch.manual_seed(1)
    widths = (3, 64, 128, 256)
    layers: list[nn.Module] = []
    for number, (before, after) in enumerate(itertools.pairwise(widths)):
        stride = 1 if number == 0 else 2
        layers += [nn.Conv2d(before, after, 3, stride, 1), nn.ReLU()]
    return nn.Sequential(
        *layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(widths[-1], 10)
    )


class Heard(Silent):
    """Keeps what a training tells."""

    def __init__(self) -> None:
        self.epochs: list[Any] = []
        self.step_times: list[tuple[float, float]] = []

    def step_done(self, _: int) -> None:
        self.step_times.append(now())

    def epoch_done(self, epoch: Any) -> None:
        self.epochs.append(epoch)


class Clock:
    """Adds up what each part of a step took, in wall time and on a core."""

    def __init__(self) -> None:
        self.sums: dict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        before = now()
        yield
        after = now()
        for place in range(2):
            self.sums[name][place] += after[place] - before[place]

    def around(self, name: str, method: Any) -> Any:
        def timed(*args: Any, **kwargs: Any) -> Any:
            with self.part(name):
                return method(*args, **kwargs)

        return timed

    def each(self, name: str, items: Any) -> Iterator[Any]:
        """Yield items, and count the time until each is there."""
        iterator = iter(items)
        while True:
            with self.part(name):
                item = next(iterator, None)
            if item is None:
                return
            yield item


def now() -> tuple[float, float]:
    return time.perf_counter(), time.thread_time()


def parts(world: Any) -> dict[str, Any]:
    """Train the default net on the digits; return the seconds of each part of a step.

    Of each rank the median over the epochs, of which the mean over the ranks.
    """
    import torch
    import torch.distributed as dist

    import mpitrain
    from mpitrain.data.sources import digits
    from mpitrain.models.build import build_model

    data = digits()
    net = build_model("convnet", num_classes=10, in_channels=1, image_size=8, seed=1)
    config = mpitrain.TrainConfig(epochs=PARTS_EPOCHS)
    trainer = mpitrain.Trainer(net, data.train, data.val, config, world=world)
    trainer.all_weights_used = True
    heard, clock = Heard(), Clock()
    trainer.listener = heard
    trainer.each_step.append(heard.step_done)
    setup = trainer.set_up()
    (stage,) = setup.plan.stages
    setup.begin(stage)
    steps_of = setup.steps_of

    def timed_steps(epoch: int) -> Iterator[Any]:
        for step in clock.each("load", steps_of(epoch)):
            step.microsteps = clock.each("load", step.microsteps)
            yield step

    setup.steps_of = timed_steps  # type: ignore[method-assign]
    trainer.step = clock.around("forward", trainer.step)  # type: ignore[method-assign]
    torch.autograd.backward = clock.around("backward", torch.autograd.backward)
    setup.updater.update = clock.around("update", setup.updater.update)  # type: ignore[method-assign]
    epochs = []
    for _ in stage.epochs:
        clock.sums.clear()
        heard.step_times = [now()]
        trainer.train_epoch(stage)
        ends = heard.step_times
        num = len(ends) - 1
        of_clocks = []
        for place in range(2):
            found = {part: clock.sums[part][place] / num for part in PARTS}
            step = (ends[-1][place] - ends[0][place]) / num
            found |= {"rest": step - sum(found.values()), "step": step}
            of_clocks.append(found)
        epochs.append(of_clocks)
    mine = [
        {
            part: statistics.median(of[place][part] for of in epochs[1:])
            for part in epochs[0][place]
        }
        for place in range(2)
    ]
    all_ranks: list[Any] = [None] * world.world_size
    dist.all_gather_object(all_ranks, mine)
    means = [
        {part: statistics.mean(of[place][part] for of in all_ranks) for part in mine[0]}
        for place in range(2)
    ]
    return {"parts": dict(zip(("wall", "core"), means, strict=True))}


if __name__ == "__main__":
    if os.geteuid() == 0:  # Open MPI refuses to run as root unless told twice
        os.environ["OMPI_ALLOW_RUN_AS_ROOT"] = "1"
        os.environ["OMPI_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
    main()
