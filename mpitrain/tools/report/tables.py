"""What stands on the page beside the charts: tiles and tables, as plain text."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from mpitrain.record.reading import Run, TimedEpoch
from mpitrain.tools.report import words
from mpitrain.tools.report.curves import Shown
from mpitrain.tools.report.facts import shares
from mpitrain.world import in_runs

Row = tuple[str, ...]

SILENT_SECONDS = 300.0
"""After so long without a line a run that says it is running may be dead."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Table:
    """A table that may be folded up."""

    name: str
    rows: Sequence[Row]
    """The first of each names it."""
    head: Row = ()
    note: str = ""
    changed: frozenset[str] = frozenset()
    """Rows that are shown boldly, by name."""
    is_open: bool = False


def status_of(run: Run) -> str:
    """Say how it is with a run, and how old that is."""
    at = run.changed_at()
    if run.status != "running" or at is None:
        return f"as of {words.clock(run.read_at)}"
    age = max(0.0, run.read_at - at)
    said = (
        f"as of {words.clock(run.read_at)}; the last line is {words.duration(age)} old"
    )
    if age > SILENT_SECONDS:
        said += (
            ": it may have been killed, which leaves no word, or its disk takes nothing"
        )
    return said


def tiles(shown: Shown) -> list[Row]:
    """Return what is seen first: a value, and what it is."""
    run, metrics = shown.run, shown.run.metrics
    found: list[Row] = []
    best, last = words.best_of(metrics.epochs), _last(metrics.epochs)
    if best is not None:
        value, now = best.values["accuracy"], last.values.get("accuracy", math.nan)
        found.append(
            (
                _share(value),
                "best accuracy in validation"
                + (f"; last {_share(now)}" if _share(now) != _share(value) else ""),
            )
        )
    if metrics.epochs:
        name = "val_loss" if "loss" in last.values else "train_loss"
        loss = last.values.get("loss", last.train_loss)
        found.append((words.number(loss), f"{name}, last"))
    elif len(metrics.steps.loss):
        found.append((words.number(metrics.steps.loss[-1]), "loss of the last step"))
    if "accuracy" in metrics.test:
        found.append((_share(metrics.test["accuracy"]), "accuracy on the test set"))
    found.append((_progress(run), "steps"))
    found.append((words.duration(wall_seconds(shown)), _jobs(shown)))
    if (rate := samples_per_second(run)) is not None:
        found.append((f"{rate:,.0f}", "samples/s"))
    found.append((_world(run), "ranks x nodes"))
    return found


def wall_seconds(shown: Shown) -> float:
    """Return how long all jobs of a run took, in seconds."""
    if shown.jobs:
        return sum(job.wall_seconds for job in shown.jobs)
    return float(shown.run.result.get("train_seconds") or math.nan)


def samples_per_second(run: Run) -> float | None:
    """Return the mean over all steps; ``None``: not known."""
    paces = run.metrics.throughputs
    seconds = sum(pace.seconds for pace in paces)
    if seconds:
        return sum(pace.num_samples for pace in paces) / seconds
    rates = [it.samples_per_second for it in run.metrics.epochs]
    return sum(rates) / len(rates) if rates else None


def num_jobs(shown: Shown) -> int:
    """Return how many jobs a run has had, as far as is known."""
    metrics = shown.run.metrics
    return max(len(shown.jobs), len(metrics.began), len(metrics.resumed) + 1)


def comparison(shown: Sequence[Shown]) -> Table:
    """Lay runs side by side."""
    rows: list[Row] = []

    def row(name: str, values: Sequence[str]) -> None:
        if any(values):
            rows.append((name, *values))

    runs = [it.run for it in shown]
    bests = [words.best_of(run.metrics.epochs) for run in runs]
    row("status", [run.status for run in runs])
    row("best accuracy", [_share(it.values["accuracy"]) if it else "" for it in bests])
    row("after epoch", [str(it.epoch) if it else "" for it in bests])
    row("last val_loss", [_val_loss(run) for run in runs])
    row("steps", [_progress(run) for run in runs])
    row("ranks x nodes", [_world(run) for run in runs])
    row("jobs", [str(num_jobs(it)) for it in shown])
    row("time of all jobs", [words.duration(wall_seconds(it)) for it in shown])
    row("samples/s", [f"{samples_per_second(run) or 0:,.0f}" for run in runs])
    parts = [shares(it.jobs, it.run.metrics.throughputs) for it in shown]
    for name in ("data", "communication", "waiting", "checkpoint", "start"):
        shown_as = [
            words.per_cent(of[name] / sum(of.values())) if any(of.values()) else ""
            for of in parts
        ]
        row(f"time in {name}", shown_as)
    return Table(
        name="Side by side",
        head=("", *(run.name for run in runs)),
        rows=rows,
        is_open=True,
    )


def differences(shown: Sequence[Shown]) -> Table:
    """Show what runs were asked differently."""
    configs = [it.run.config for it in shown]
    names = [name for config in configs for name in config]
    rows = [
        (name, *(_text(config.get(name)) for config in configs))
        for name in dict.fromkeys(names)
        if len({_text(config.get(name)) for config in configs}) > 1
    ]
    return Table(
        name="What was asked differently",
        head=("", *(it.run.name for it in shown)),
        rows=rows,
        note=words.several(len(rows), "field"),
        is_open=True,
    )


def tables(shown: Shown) -> list[Table]:
    """Return a run's own tables: its jobs, its world, its configuration."""
    return [_job_table(shown), _nodes(shown.run), *_asked(shown.run), _where(shown.run)]


def _job_table(shown: Shown) -> Table:
    rows = [
        (
            str(job.number),
            words.clock(job.began),
            words.duration(job.wall_seconds),
            str(job.world_size),
            str(job.num_nodes),
            f"{max((part.steps[-1] for part in _with_steps(job)), default=0):,}",
        )
        for job in shown.jobs
    ]
    return Table(
        name="Jobs",
        head=("job", "began", "took", "ranks", "nodes", "until step"),
        rows=rows,
        note=words.several(num_jobs(shown), "job"),
    )


def _with_steps(job: Any) -> list[Any]:
    return [part for part in job.ranks.values() if len(part.steps)]


def _nodes(run: Run) -> Table:
    rows: list[Row] = []
    for node in _list(run.environment.get("hosts")):
        if isinstance(node, dict):
            ranks = [it for it in _list(node.get("ranks")) if isinstance(it, int)]
            devices = dict.fromkeys(map(str, _list(node.get("devices"))))
            rows.append(
                (
                    _text(node.get("hostname")),
                    in_runs(ranks),
                    ", ".join(devices),
                    _text(node.get("num_cores")),
                )
            )
    return Table(
        name="World",
        head=("node", "ranks", "devices", "cores"),
        rows=rows,
        note=_world(run),
    )


def _asked(run: Run) -> list[Table]:
    usual = defaults()
    changed = {
        name: value
        for name, value in run.config.items()
        if name not in usual or _text(usual[name]) != _text(value)
    }
    rest = {name: it for name, it in run.config.items() if name not in changed}
    rows = [(name, _text(it)) for name, it in (changed | rest).items()]
    return [
        Table(
            name="Configuration",
            rows=rows,
            note=f"{words.several(len(changed), 'field')} of {len(rows)} not as "
            "usual, first",
            changed=frozenset(changed),
        )
    ]


def defaults() -> dict[str, Any]:
    """Return what a training does that is asked for nothing."""
    from mpitrain.train.config import TrainConfig

    return TrainConfig().as_plain("")


def _where(run: Run) -> Table:
    rows: list[Row] = []
    for group, values in run.environment.items():
        if group == "hosts":
            continue
        if isinstance(values, dict):
            rows += [(f"{group}: {name}", _text(it)) for name, it in values.items()]
        else:
            rows.append((group, _text(values)))
    return Table(name="Environment", rows=rows, note="of the last job")


def _progress(run: Run) -> str:
    steps, began = run.metrics.steps.step, run.metrics.began
    done = f"{steps[-1] if len(steps) else 0:,}"
    total = began[-1].total_steps if began else None
    is_done = not total or (len(steps) and steps[-1] >= total)
    return done if is_done else f"{done} / {total:,}"


def _jobs(shown: Shown) -> str:
    return f"in {words.several(num_jobs(shown), 'job')}"


def _world(run: Run) -> str:
    size, nodes = run.result.get("world_size"), run.result.get("num_nodes")
    return f"{_text(size)} x {_text(nodes)}" if size else "?"


def _last(epochs: Sequence[TimedEpoch]) -> Any:
    return epochs[-1] if epochs else None


def _val_loss(run: Run) -> str:
    last = _last(run.metrics.epochs)
    return words.number(last.values["loss"]) if last and "loss" in last.values else ""


def _share(value: float) -> str:
    return f"{value:.2%}".replace("%", " %")


def _list(value: object) -> Sequence[Any]:
    return value if isinstance(value, list) else []


def _text(value: object) -> str:
    match value:
        case None:
            return "-"
        case bool():
            return "yes" if value else "no"
        case Mapping():
            return ", ".join(f"{name}: {_text(it)}" for name, it in value.items())
        case float():
            return f"{value:g}"
        case _:
            return str(value)
