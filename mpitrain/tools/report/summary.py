"""The text of the page: facts of a run, tables, and findings about ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import partial

from mpitrain.mpi.world import format_ranges
from mpitrain.record.health import is_late, slowest_rank
from mpitrain.record.reading import Run, TimedThroughput, sums
from mpitrain.tools.report.analysis import (
    CATEGORIES,
    JobTimes,
    goodput,
    restart_costs,
    seconds_by_category,
    stages_of,
)
from mpitrain.train.metrics import PHASES, best_metric, knows_best

Row = tuple[str, ...]

SILENT_SECONDS = 300.0  # a run that wrote nothing for so long may be dead


@dataclass(frozen=True, kw_only=True)
class Section:
    """A table with a title, folded up unless it is open."""

    title: str
    rows: Sequence[Row]
    head: Row = ()
    note: str = ""
    num_bold: int = 0  # so many rows are bold, from the first
    is_open: bool = False


def status_line(run: Run) -> str:
    """Return when the run was read, and how old its last line is."""
    text, at = f"as of {clock(run.read_at)}", run.changed_at()
    if run.status == "running" and at is not None:
        age = max(0.0, run.read_at - at)
        text += f"; the last line is {duration(age)} old"
        if age > SILENT_SECONDS:
            text += ": the run may have been killed, or its disk may be full"
    return text


def summary(run: Run, jobs: Sequence[JobTimes]) -> dict[str, str]:
    """Return what is most interesting of a run, by name; empty if not known."""
    metrics = run.metrics
    epochs, steps = metrics.epochs, metrics.steps
    validations = metrics.all_validations
    names = dict.fromkeys(name for it in validations for name in it.values)
    best_by = run.result.get("best_by")
    best, is_lower_better = best_metric(names, best_by)
    values = [it.values.get(best, math.nan) for it in validations]
    choose = min if is_lower_better else max
    value = choose(filter(math.isfinite, values), default=math.nan)
    has_best = knows_best(names, best_by)
    if not has_best and values:  # which is better is not known
        value = values[-1]
    show = partial(percent, digits=2) if best.endswith("accuracy") else number
    losses = [it.values["loss"] for it in validations if "loss" in it.values]
    kind = "validation" if losses else "training"
    losses = (
        losses or [it.train_loss for it in epochs] or [it.loss for it in steps[-1:]]
    )
    done = steps[-1].step if steps else 0
    total = metrics.began[-1].total_steps if metrics.began else None
    num_jobs = max(len(jobs), len(metrics.began), len(metrics.resumed) + 1)
    seconds = sum(job.seconds for job in jobs)  # of none if no rank wrote its times
    total_of = sums(metrics.throughputs)
    num_samples, step_seconds = total_of.num_samples, total_of.seconds
    size, nodes = run.result.get("world_size"), run.result.get("num_nodes")
    return {
        f"{'best' if has_best else 'last'} validation {best}": show(value),
        f"last {kind} loss": number((losses or [math.nan])[-1]),
        f"test {best}": show(metrics.test.get(best, math.nan)),
        "steps": f"{done:,}" + (f" / {total:,}" if total and done < total else ""),
        f"in {num_jobs} job{'s' * (num_jobs > 1)}": duration(seconds) if jobs else "",
        "samples/s": f"{num_samples / step_seconds:,.0f}" if step_seconds else "",
        "goodput": percent(goodput(run, jobs)),
        "ranks x nodes": f"{size} x {nodes}" if size else "",
    }


def tables(run: Run, jobs: Sequence[JobTimes]) -> list[Section]:
    """Return the tables of a run: jobs, configuration, environment."""
    from mpitrain.config import TrainConfig

    rows = [
        (
            f"{job.number}",
            clock(job.began),
            duration(job.seconds),
            f"{job.world_size} x {job.num_nodes}",
            f"{max(it.last_step for it in job.ranks.values()):,}",
        )
        for job in jobs
    ]
    defaults = {name: _text(it) for name, it in TrainConfig().as_plain("").items()}
    config = [(name, _text(value)) for name, value in run.config.items()]
    changed = [row for row in config if defaults.get(row[0]) != row[1]]
    environment = []
    for group, values in run.environment.items():
        if isinstance(values, list):
            values = {f"{i}": value for i, value in enumerate(values)}
        if not isinstance(values, dict):
            values = {"": values}
        environment += [(f"{group} {name}", _text(of)) for name, of in values.items()]
    stages = [
        (
            stage[0].stage,
            f"{stage[0].epoch} to {stage[-1].epoch}",
            f"{stage[-1].step:,}",
            number(stage[-1].train_loss),
            number(stage[-1].values.get("loss", math.nan)),
        )
        for stage in stages_of(run)
    ]
    phases = [_phases(f"job {job.number}", [job], run) for job in jobs[-10:]]
    if len(phases) > 1:
        phases.insert(0, _phases("all jobs", jobs, run))
    return [
        Section(
            title="Time by phase",
            head=("", "total", *CATEGORIES),
            rows=phases,
            note="mean over ranks",
            is_open=True,
        ),
        Section(
            title="Jobs",
            head=("job", "began", "duration", "ranks x nodes", "last step"),
            rows=rows,
        ),
        Section(
            title="Restarts",
            head=("at", "step", "steps lost", "until it resumed", "why"),
            rows=[
                (
                    clock(it.restart.time),
                    f"{it.restart.step:,}",
                    f"{it.steps:,} ({duration(it.step_seconds)})",
                    duration(it.down_seconds),
                    it.restart.error,
                )
                for it in restart_costs(run, jobs)
            ],
        ),
        Section(
            title="Stages",
            head=("stage", "epochs", "last step", "train loss", "val loss"),
            rows=stages if len(stages) > 1 else (),
        ),
        Section(
            title="Predictions",
            head=("data", "samples", "at", "after step"),
            rows=[
                (it.data, f"{it.predicted_samples:,}", clock(it.time), f"{it.step:,}")
                for it in run.metrics.predicted[-10:]
            ],
            note="the last 10 calls" if len(run.metrics.predicted) > 10 else "",
        ),
        Section(
            title="Configuration",
            rows=[*changed, *(row for row in config if row not in changed)],
            note=f"{len(changed)} of {len(config)} fields not at the default",
            num_bold=len(changed),
        ),
        Section(title="Environment", rows=environment, note="of the last job"),
    ]


def _phases(name: str, jobs: Sequence[JobTimes], run: Run) -> Row:
    seconds = seconds_by_category(jobs, run.metrics.throughputs)
    total = sum(seconds.values())
    parts = (percent(value / (total or 1.0)) for value in seconds.values())
    return name, duration(total), *parts


def balance_line(step: int, counts: Sequence[int]) -> str:
    """Return a sentence: how many micro-batches ranks take.

    >>> balance_line(40, [9, 5, 9])
    'Since step 40 ranks take 5 (rank 1) to 9 (rank 0) of the 23 micro-batches.'
    """
    few, most = min(counts), max(counts)
    return (
        f"Since step {step} ranks take {few} (rank {counts.index(few)}) to {most} "
        f"(rank {counts.index(most)}) of the {sum(counts)} micro-batches."
    )


def findings(
    jobs: Sequence[JobTimes], throughputs: Sequence[TimedThroughput]
) -> list[str]:
    """Return sentences: whom ranks waited for, and how jobs were ended."""
    found = []
    for job in jobs:
        where = f"job {job.number}: " if len(jobs) > 1 else ""
        inside = [row for row in throughputs if job.covers(row.time) and row.num_steps]
        rank, num_last, late_seconds = slowest_rank(inside)
        total = sums(inside)
        waited = percent(total.wait_seconds / (total.seconds or 1.0))
        if is_late(num_last, late_seconds, total.num_steps, total.seconds):
            found.append(
                f"{where}{_rank(rank, job)} was the last in "
                f"{percent(min(1.0, num_last / total.num_steps))} of the steps, by "
                f"{duration(late_seconds / num_last)}; ranks waited {waited} of "
                "the time"
            )
        elif num_last and len(jobs) == 1:
            found.append(f"no straggler; ranks waited {waited} of the time for others")
        ends = dict.fromkeys(job.failed_ranks(), "was")
        ends |= dict.fromkeys(job.hanging_ranks(), "hung")
        for rank, verb in [*ends.items()][:4]:
            cut = job.cuts()[rank]
            where_in = f"{verb} in {PHASES[cut.phase]} for {duration(cut.seconds)}"
            found.append(f"{where}at the end {_rank(rank, job)} {where_in}")
        for ranks, reason in (
            (job.killed_ranks(), "left no last line: killed, or stopped"),
            (job.missing_ranks(), "left no file: can their nodes see this folder?"),
        ):
            if ranks:
                name = _rank(ranks[0], job) if len(ranks) == 1 else format_ranges(ranks)
                found.append(f"{where}{name} {reason}")
    return [text[0].upper() + text[1:] + "." for text in found]


def duration(seconds: float) -> str:
    """Write a duration with two digits or more.

    >>> [duration(s) for s in (0.00012, 0.25, 2.5, 75, 3600 * 5 + 61, 86400 * 3)]
    ['0.12 ms', '250 ms', '2.5 s', '1 min 15 s', '5 h 01 min', '3 d 0 h']
    """
    if seconds < 1:
        return f"{1000 * seconds:{'.2g' if seconds < 0.01 else '.0f'}} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s" if seconds < 10 else f"{seconds:.0f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if not hours:
        return f"{minutes} min {rest:02} s"
    if hours < 24:
        return f"{hours} h {minutes:02} min"
    return f"{hours // 24} d {hours % 24} h"


def percent(share: float, digits: int | None = None) -> str:
    """Write a share.

    >>> percent(0.714), percent(0.0123), percent(0.5, 2), percent(math.nan)
    ('71 %', '1.2 %', '50.00 %', '')
    """
    if digits is None:
        digits = 1 if share < 0.0995 else 0
    return f"{100 * share:.{digits}f} %" if math.isfinite(share) else ""


def number(value: float) -> str:
    """Write a number shortly.

    >>> number(0.123456), number(12345.6), number(0.00001234), number(math.nan)
    ('0.1235', '12,346', '1.234e-05', '')
    """
    if not math.isfinite(value):
        return ""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def clock(seconds: float) -> str:
    """Write a date and a local time."""
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M:%S")


def _rank(rank: int, job: JobTimes) -> str:
    part = job.ranks.get(rank)
    return f"rank {rank}" + (f" ({part.hostname})" if part else "")


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
