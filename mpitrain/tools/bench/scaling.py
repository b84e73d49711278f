"""`mpirun ... python -m mpitrain bench scaling`: how much faster more ranks are.

One job times all: each row is trained by some of its ranks, while the others sleep.
"""

from __future__ import annotations

import gc
import os
import platform
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from mpitrain.errors import UsageError
from mpitrain.flags import PROGRAM, flat
from mpitrain.launch import init
from mpitrain.tools.bench.config import BenchScalingConfig
from mpitrain.topology import mpi_library, on_rank_zero

if TYPE_CHECKING:
    from torch import nn

    from mpitrain.data.sources import Data
    from mpitrain.launch import Guard, Job
    from mpitrain.launch.parts import Parts
    from mpitrain.tools.bench.figures import Measured, Row
    from mpitrain.tools.bench.prediction import Weights
    from mpitrain.world import World

TIMEOUT_SECONDS = 1800.0
"""How long one collective may take; the watchdog comes before."""

IMAGE_SIZE = 32
"""Of images that are made up, in pixels."""

FOLDER = Path("bench-scaling")


def bench(guard: Guard, config: BenchScalingConfig, words: Sequence[str]) -> None:
    """Time all that was asked for; print a table, write it, and plot it.

    Collective over all ranks.

    Args:
        guard: The guard that stands.
        config: What was asked for, equal on all ranks.
        words: The words of the command line, for the record.

    Raises:
        UsageError: The data cannot be had in memory, or the folder cannot be made.
    """
    gc.disable()  # during the imports
    folder = on_rank_zero(guard.comm, lambda: _folder(config), "make the folder")
    load_before = os.getloadavg()
    job = init(
        **config.launch.as_arguments(), timeout_seconds=TIMEOUT_SECONDS, guard=guard
    )
    with job as world:
        with guard.stage("imports"):
            import torch._dynamo
            import torch.distributed.fsdp

            from mpitrain.tools.bench import cells, figures

        gc.freeze()
        gc.enable()
        job.progress("loading the data")
        data = _load(config, world)
        model, weights = _build(config, data, job)
        num_gpus = torch.cuda.device_count() if world.device != "cpu" else 0
        found, left_out = cells.cells_of(config, world, num_gpus)
        lines = _introduction(world, config, model, data, len(found))
        if world.is_rank_zero:
            print("\n".join(lines), flush=True)
        measured = figures.Measured(trials={cell: [] for cell in found})
        parts = _measure(guard, world, config, measured, model, weights, data)
        asleep = _asleep(job, parts)
        data.close()
        if world.is_rank_zero:
            rows = figures.rows_of(measured, world, weights, config.strategies)
            text = figures.tables(rows, left_out)
            print(f"\n{text}", flush=True)
            report = {
                "date": datetime.now().astimezone().isoformat(timespec="seconds"),
                "command": shlex.join([*PROGRAM.split(), "bench", "scaling", *words]),
                **_about(world),
                "load_before": load_before,
                "load_after": os.getloadavg(),
                "config": flat(asdict(config)) | {"image_size": data.image_size},
                "num_weights": sum(it.numel() for it in model.parameters()),
                "weights": asdict(weights),
                "making_parts_seconds": parts.making_seconds,
                "asleep_cores": asleep,
                "all_reduces": figures.bandwidths_of(measured, weights),
                "rows": rows,
                "left_out": left_out,
            }
            _write(folder, report, _page(report, lines, text), rows)


def _measure(
    guard: Guard,
    world: World,
    config: BenchScalingConfig,
    measured: Measured,
    model: nn.Module,
    weights: Weights,
    data: Data,
) -> Parts:
    """Time all rows, round by round. Collective over all ranks.

    Returns:
        What the ranks were divided by, and knows what that took.
    """
    from mpitrain.launch.parts import Parts
    from mpitrain.tools.bench import trial

    sizes = sorted({cell.num_ranks for cell in measured.trials})

    def work(part: World) -> None:
        for cell, trials in measured.trials.items():
            if cell.num_ranks == part.world_size:
                trials.append(trial.try_steps(part, cell, config, model, data))
        if part.world_size > 1:
            seconds = trial.all_reduce_seconds(part, weights.num_bytes)
            measured.all_reduces.setdefault(part.world_size, []).append(seconds)

    with Parts(guard, world, TIMEOUT_SECONDS) as parts:
        for number in range(1, config.rounds + 1):
            started = time.perf_counter()
            for size in sizes:
                parts.work(size, work, f"steps on {size} rank{'s' * (size != 1)}")
            if world.is_rank_zero:
                seconds = time.perf_counter() - started
                print(f"round {number} of {config.rounds}: {seconds:.1f} s", flush=True)
    return parts


def _load(config: BenchScalingConfig, world: World) -> Data:
    """Load the data, once per node. Collective over all ranks."""
    from mpitrain.data.config import DataConfig
    from mpitrain.data.memory import InMemory
    from mpitrain.data.sources import LARGE, load_data
    from mpitrain.errors import agreed
    from mpitrain.launch.shared import all_ranks

    refusal = UsageError(
        f"--data {config.data}: its samples are read from files, or one by one, which "
        "would be timed, too; expected a set that is held in memory: synthetic, "
        "digits, mnist, fashion-mnist, cifar10, cifar100"
    )
    if config.data in LARGE:
        raise agreed(refusal)
    image_size = config.image_size
    if image_size is None and config.data == "synthetic":
        image_size = IMAGE_SIZE
    asked = DataConfig(
        data=config.data, data_dir=config.data_dir, image_size=image_size, num_workers=0
    )
    data = load_data(asked, seed=1, world=world, ranks=all_ranks(world))
    if not isinstance(data.train, InMemory):
        raise agreed(refusal)
    return data


def _build(
    config: BenchScalingConfig, data: Data, job: Job
) -> tuple[nn.Module, Weights]:
    """Build the model; say what of it travels. Collective over all ranks."""
    from mpitrain.models.build import build_model
    from mpitrain.tools.bench.prediction import Weights
    from mpitrain.train.strategy import DTYPES, blocks_of

    model = job.all_or_none(
        lambda: build_model(
            config.model,
            num_classes=data.num_classes,
            in_channels=data.in_channels,
            image_size=data.image_size,
            seed=1,
        ),
        "build the model",
    )
    travelling = DTYPES[config.precision].itemsize
    kept = max(travelling, 4)
    in_blocks = [it for block in blocks_of(model) for it in block.parameters()]
    weights = Weights(
        num_bytes=kept * sum(it.numel() for it in model.parameters()),
        block_bytes=kept * sum(it.numel() for it in in_blocks),
        gathered_share=travelling / kept,
    )
    return model, weights


def _introduction(
    world: World,
    config: BenchScalingConfig,
    model: nn.Module,
    data: Data,
    num_rows: int,
) -> list[str]:
    """Say who is there, what is trained, and how often."""
    from mpitrain.models.summary import summary_line
    from mpitrain.record.console import world_lines

    size = data.image_size
    return [
        *world_lines(world),
        f"{summary_line(model)}; {config.precision}; {config.data}, {size} x {size}",
        f"{num_rows} rows, {config.rounds} rounds by turns, {config.steps} steps of "
        f"each after {config.warmup_steps} to warm up",
    ]


def _asleep(job: Job, parts: Parts) -> float | None:
    """Return what a rank that slept took of a core, at most; equal on all ranks.

    Collective over all ranks.
    """
    mine = (
        parts.asleep_cpu_seconds / parts.asleep_seconds if parts.asleep_seconds else 0.0
    )
    return max(job.comm.allgather(mine)) if job.comm.size > 1 else None


def _about(world: World) -> Row:
    """Say with what it was measured."""
    from mpitrain.record.environment import describe
    from mpitrain.schedulers import detect

    about = describe(world, detect(os.environ), mpi_library(), os.environ)
    kept = ("world", "hosts", "versions", "mpi_library", "git_commit")
    machine = f"{platform.system()} {platform.machine()}"
    return {name: about[name] for name in kept} | {"platform": machine}


def _folder(config: BenchScalingConfig) -> Path:
    """Make the folder for the figures."""
    now = datetime.now().astimezone().strftime("%Y-%m-%d-%H%M%S")
    folder = config.output or FOLDER / now
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"--output {folder} cannot be made: {error.strerror}; expected a folder"
        ) from None
    return folder


def _page(report: Row, lines: Sequence[str], text: str) -> str:
    """Put what was measured, and with what, before the tables."""
    versions = report["versions"]
    loads = " and ".join(
        f"{report[f'load_{when}'][0]:.1f}" for when in ("before", "after")
    )
    facts = [
        f"`{report['command']}`, {report['date']}",
        *lines,
        f"torch {versions['torch']}, {report['mpi_library'].partition(',')[0]}",
        f"load of {report['hosts'][0]['hostname']} before and after: {loads}",
    ]
    return "\n".join(f"- {fact}" for fact in facts) + f"\n\n{text}"


def _write(folder: Path, report: Row, text: str, rows: Sequence[Row]) -> None:
    """Write table, figures and plot."""
    from mpitrain.record.folder import write_json, write_whole
    from mpitrain.tools.bench import plot

    names = ["table.md", "scaling.json"]
    write_whole(folder / names[0], text)
    write_json(folder / names[1], report)
    try:
        plot.draw(rows, report["config"]["model"], folder / "scaling.png")
        names.append("scaling.png")
    except ImportError:
        print(
            f"no plot: it needs matplotlib ({sys.executable} -m pip install "
            "matplotlib)",
            file=sys.stderr,
        )
    print(f"{', '.join(names)} in {folder}", flush=True)
