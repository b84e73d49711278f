"""Curves over the steps: loss, accuracy, speed, step time."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

from mpitrain.record.reading import Run, TimedEpoch
from mpitrain.tools.report import words
from mpitrain.tools.report.facts import Job, jobs_of
from mpitrain.tools.report.series import (
    Floats,
    finite,
    largest,
    rates,
    smooth,
    thinned,
)
from mpitrain.tools.report.style import Chart, Paper, plain_axes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NUM_BINS = 160
"""Points of a curve: more than a phone can show."""

LOG_RATIO = 30.0
"""Losses that differ by more are shown by their logarithm."""


@dataclass(kw_only=True)
class Shown:
    """A run as it is shown."""

    run: Run
    colour: str
    """By its name."""
    jobs: list[Job] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.jobs = jobs_of(self.run)


def curves(shown: Sequence[Shown]) -> list[Chart]:
    """Return the charts over steps, of one run or of several laid over each other."""
    alone = shown[0].run if len(shown) == 1 else None
    legend = () if alone else tuple((it.colour, it.run.name) for it in shown)
    one = shown[0].colour
    longest = max((longest_step(it.jobs) for it in shown), default=0.0)

    def said(of: str) -> str:
        if alone is None:
            return "\n".join(f"{it.run.name}: {_of_run(of, it)}" for it in shown)
        return _of_run(of, shown[0])

    of_steps = ((one, "mean"), *((("muted", "longest"),) if longest else ()))
    return [
        Chart(
            name=name,
            title=title,
            words=said(name),
            draw=functools.partial(draw, shown=shown),
            height=height,
            is_half=True,
            legend=legend or alone_legend,
        )
        for name, title, draw, height, alone_legend in (
            ("loss", "Loss", draw_loss, 280, _loss_legend(shown[0])),
            ("accuracy", "Accuracy in validation", draw_accuracy, 280, ()),
            ("speed", "Samples per second", draw_speed, 240, ()),
            ("step-time", "Time of a step", draw_step_time, 240, of_steps),
        )
    ]


def _loss_legend(shown: Shown) -> tuple[tuple[str, str], ...]:
    found = [(shown.colour, "training"), ("ink", "validation")]
    if shown.run.checkpoints:
        found.append(("checkpoint", "checkpoint"))
    if shown.run.metrics.resumed:
        found.append(("muted", "another job goes on"))
    return tuple(found)


def _of_run(of: str, shown: Shown) -> str:
    paces = shown.run.metrics.throughputs
    match of:
        case "loss":
            return words.loss(shown.run)
        case "accuracy":
            return words.accuracy(shown.run)
        case "speed":
            return words.speed(paces)
        case _:
            return words.step_time(paces, longest_step(shown.jobs))


def longest_step(jobs: Sequence[Job]) -> float:
    """Return the longest step of all, in seconds; 0 where none is known."""
    found = (max(it.longest, default=0.0) for job in jobs for it in job.ranks.values())
    return max(found, default=0.0)


def draw_loss(figure: Figure, paper: Paper, shown: Sequence[Shown]) -> None:
    """Draw the loss of all steps thin, their mean bold, and validation as points."""
    axes = _over_steps(figure, paper, shown)
    seen: list[float] = []
    for it in shown:
        steps = it.run.metrics.steps
        x, y = finite(steps.step, steps.loss)
        colour = paper.colour(it.colour)
        thin_x, thin_y = thinned(x, y, 2 * NUM_BINS)
        alpha = 0.35 / len(shown) ** 0.5
        axes.plot(thin_x, thin_y, color=colour, lw=0.7, alpha=alpha)
        mean_x, mean_y = smooth(x, y, NUM_BINS // 2)
        axes.plot(mean_x, mean_y, color=colour, lw=2.2)
        judged = [(e.step, e.values.get("loss", math.nan)) for e in _epochs(it)]
        val_x, val_y = finite(*_columns(judged))
        edge = paper.colour("ink" if len(shown) == 1 else it.colour)
        _points(axes, paper, val_x, val_y, edge)
        seen += [*mean_y.tolist(), *val_y.tolist(), *_usual(y)]
    if seen:
        _loss_scale(axes, min(seen), max(seen))
    else:
        _nothing(axes, paper, "no step yet")


def draw_accuracy(figure: Figure, paper: Paper, shown: Sequence[Shown]) -> None:
    """Draw the accuracy after each epoch."""
    axes = _over_steps(figure, paper, shown)
    is_empty = True
    for it in shown:
        judged = [(e.step, e.values.get("accuracy", math.nan)) for e in _epochs(it)]
        x, y = finite(*_columns(judged))
        colour = paper.colour(it.colour)
        axes.plot(x, y, color=colour, lw=2.2)
        _points(axes, paper, x, y, colour)
        is_empty &= not len(x)
        if len(x) and len(shown) == 1:
            best = int(y.argmax())
            _points(axes, paper, x[best : best + 1], y[best : best + 1], colour, 9.0)
    if is_empty:
        _nothing(axes, paper, "no accuracy yet")
    axes.yaxis.set_major_formatter(
        FuncFormatter(lambda value, _: f"{100 * value:.4g} %")
    )


def draw_speed(figure: Figure, paper: Paper, shown: Sequence[Shown]) -> None:
    """Draw how many samples all ranks did in a second."""
    axes = _over_steps(figure, paper, shown)
    is_empty = True
    for it in shown:
        x, samples, _ = rates(it.run.metrics.throughputs, NUM_BINS)
        if not len(x):  # as versions without paces told it
            x, samples = finite(
                *_columns([(e.step, e.samples_per_second) for e in _epochs(it)])
            )
        axes.plot(x, samples, color=paper.colour(it.colour), lw=2.2)
        is_empty &= not len(x)
    if is_empty:
        _nothing(axes, paper, "no speed yet")
    else:
        axes.set_ylim(bottom=0)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))


def draw_step_time(figure: Figure, paper: Paper, shown: Sequence[Shown]) -> None:
    """Draw how long steps took, and the longest among them."""
    axes = _over_steps(figure, paper, shown)
    top = 0.0
    for it in shown:
        x, _, seconds = rates(it.run.metrics.throughputs, NUM_BINS)
        if len(shown) == 1:
            most_x, most = largest(*_longest(it.jobs), NUM_BINS)
            axes.plot(most_x, most, color=paper.colour("muted"), lw=1, alpha=0.8)
            top = max(top, *most.tolist(), 0.0)
        axes.plot(x, seconds, color=paper.colour(it.colour), lw=2.2)
        top = max(top, *seconds.tolist(), 0.0)
    if top:
        mean = max(
            rates(it.run.metrics.throughputs, 1)[2].max(initial=0) for it in shown
        )
        if top > LOG_RATIO * mean > 0:
            axes.set_yscale("log")
            _plain_log(axes)
        else:
            axes.set_ylim(bottom=0)
    else:
        _nothing(axes, paper, "no step yet")
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _seconds(value, top)))


def _over_steps(figure: Figure, paper: Paper, shown: Sequence[Shown]) -> Axes:
    """Return axes over steps, with marks where jobs went on, and for checkpoints."""
    axes = plain_axes(figure, paper)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    axes.set_xlabel("step")
    last = max((it.run.metrics.steps.step[-1:].tolist() or [1])[0] for it in shown)
    axes.set_xlim(0, max(last, 1) * 1.02)
    if len(shown) == 1:
        metrics = shown[0].run.metrics
        for went_on in metrics.resumed:
            axes.axvline(
                went_on.step, color=paper.colour("muted"), lw=1.1, ls=(0, (3, 3))
            )
        saved = [it.step for it in shown[0].run.checkpoints if not it.error]
        if marks := _apart(saved, last / 90):
            axes.plot(
                marks,
                [0.0] * len(marks),
                marker=6,  # a triangle that points up
                ls="",
                color=paper.colour("checkpoint"),
                markersize=5,
                clip_on=False,
                transform=axes.get_xaxis_transform(),
            )
    return axes


def _apart(places: Sequence[int], least: float) -> list[int]:
    """Leave out marks that would lie upon the one before."""
    kept: list[int] = []
    for place in sorted(places):
        if not kept or place - kept[-1] >= least:
            kept.append(place)
    return kept


def _points(
    axes: Axes, paper: Paper, x: Floats, y: Floats, colour: str, size: float = 5.5
) -> None:
    few = len(x) <= 40
    axes.plot(
        x,
        y,
        marker="o" if few else "",
        lw=1.2 if not few else 0,
        color=colour,
        markersize=size,
        markerfacecolor=colour,
        markeredgecolor=paper.colour("paper"),
        markeredgewidth=1.2,
    )


def _usual(y: Floats) -> list[float]:
    """Return where nearly all values lie: one that strays far is not all of a chart."""
    return [float(v) for v in np.quantile(y, (0.003, 0.997))] if len(y) else []


def _loss_scale(axes: Axes, least: float, most: float) -> None:
    if least > 0 and most / least > LOG_RATIO:
        axes.set_yscale("log")
        axes.set_ylim(least / 1.3, most * 1.3)
        _plain_log(axes)
    else:
        margin = 0.06 * max(most - least, 1e-9)
        axes.set_ylim(least - margin, most + margin)


def _plain_log(axes: Axes) -> None:
    axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.tick_params(which="minor", length=0)


def _seconds(value: float, top: float) -> str:
    if top < 1:
        return f"{1000 * value:.4g} ms"
    return f"{value:.4g} s"


def _nothing(axes: Axes, paper: Paper, why: str) -> None:
    axes.set_yticks([])
    axes.text(
        0.5,
        0.5,
        why,
        transform=axes.transAxes,
        ha="center",
        va="center",
        color=paper.colour("muted"),
    )


def _epochs(shown: Shown) -> list[TimedEpoch]:
    return shown.run.metrics.epochs


def _columns(rows: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [row[0] for row in rows], [row[1] for row in rows]


def _longest(jobs: Sequence[Job]) -> tuple[Floats, Floats]:
    """Return the longest step of each line of each rank, by step."""
    parts = [part for job in jobs for part in job.ranks.values()]
    none = [np.zeros(0)]
    steps = np.concatenate(none + [np.asarray(it.steps, float) for it in parts])
    most = np.concatenate(none + [np.asarray(it.longest, float) for it in parts])
    there = most > 0
    return steps[there], most[there]
