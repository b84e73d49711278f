"""Curves over steps: loss, metrics, throughput."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Iterator, Sequence

import numpy as np
from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter
from numpy.typing import ArrayLike

from mpitrain.record.reading import Run
from mpitrain.tools.report.analysis import Floats, stages_of
from mpitrain.tools.report.figures import CHECKPOINT, CURVE, INK, MUTED, Chart

MAX_CHARTS = 24  # of metrics; records have all
NUM_BINS = 60  # points of a curve
LINES = "-", "--", "-.", ":"  # of groups, beside colours
LOG_RATIO = 30.0  # losses that differ by more are shown on a logarithmic scale


def loss_chart(run: Run) -> Chart:
    """Draw the mean and range of the loss, and the validation loss as points."""
    chart, steps = _chart("loss", "Loss", run), run.metrics.steps
    axes = chart.axes
    x, low, mean, high = bins([it.step for it in steps], [it.loss for it in steps])
    axes.fill_between(x, low, high, color=CURVE, alpha=0.2, lw=0)
    axes.plot(x, mean, color=CURVE, label="training")
    at, _, values, _ = _validation(run, "loss")
    if len(at):
        axes.plot(at, values, ls="", marker="o", color=INK, label="validation")
    # An outlier may leave the chart.
    seen = [*mean, *np.quantile([low, high], (0.02, 0.98))] if len(x) else []
    seen += values.tolist()
    if seen and min(seen) > 0 and max(seen) / min(seen) > LOG_RATIO:
        axes.set_ylim(min(seen) / 1.3, max(seen) * 1.3)
        axes.set_yscale("log")
        axes.yaxis.set_major_locator(LogLocator(subs=(1.0, 3.0)))
        axes.yaxis.set_minor_formatter(NullFormatter())
        axes.tick_params(which="minor", length=0)
    elif seen:
        margin = 0.06 * max(max(seen) - min(seen), 1e-9)
        axes.set_ylim(min(seen) - margin, max(seen) + margin)
    if seen:
        chart.figure.legend(loc="outside lower left", ncols=4)
    return _finish(chart, bool(seen), "{:.5g}")


def metric_charts(run: Run) -> Iterator[Chart]:
    """Draw each metric of the validation but the loss, and each other training loss."""
    epochs, steps = run.metrics.epochs, run.metrics.steps
    for name in dict.fromkeys(it for step in steps for it in step.losses):
        chart = _chart("train-" + re.sub(r"\W", "-", name), f"Training {name}", run)
        rows = [it for it in steps if name in it.losses]
        losses = [it.losses[name] for it in rows]
        x, _, values, _ = bins([it.step for it in rows], losses)
        chart.axes.plot(x, values, color=CURVE)
        yield _finish(chart, len(x) > 0, "{:.5g}")
    names = dict.fromkeys(it for epoch in epochs for it in epoch.values if it != "loss")
    shown = names or (() if epochs else ("accuracy",))
    for name in itertools.islice(shown, MAX_CHARTS):
        file = "accuracy" if name == "accuracy" else "val-" + re.sub(r"\W", "-", name)
        chart = _chart(file, f"Validation {name}", run)
        is_percent = name.endswith("accuracy")
        scale, form = (100, "{:.4g} %") if is_percent else (1, "{:.4g}")
        x, _, values, _ = _validation(run, name)
        chart.axes.plot(x, scale * values, color=CURVE, marker="o")
        yield _finish(chart, len(x) > 0, form)


def rate_chart(run: Run) -> Chart | None:
    """Draw the learning rate, of each parameter group where they differ."""
    chart, steps = _chart("learning-rate", "Learning rate", run), run.metrics.steps
    num = max((len(it.lr_groups) for it in steps), default=0)
    at, has_data = [it.step for it in steps], False
    for group in range(num or 1):
        rates = [it.lr_groups[group] if it.lr_groups else it.lr for it in steps]
        x, _, values, _ = bins(at, rates)
        chart.axes.plot(x, values, label=f"group {group}", ls=LINES[group % len(LINES)])
        has_data |= len(x) > 0
    if num:
        chart.figure.legend(loc="outside lower left", ncols=6)
    return _finish(chart, has_data, "{:.3g}") if has_data else None


def throughput_chart(run: Run) -> Chart:
    """Draw the samples per second of all ranks."""
    chart = _chart("throughput", "Throughput in samples per second", run)
    rows = [row for row in run.metrics.throughputs if row.seconds > 0]
    rates = [row.samples_per_second for row in rows]
    x, _, rate, _ = bins([row.step for row in rows], rates)
    chart.axes.plot(x, rate, color=CURVE)
    chart.axes.set_ylim(bottom=0)
    return _finish(chart, len(x) > 0, "{:,.0f}")


def _chart(name: str, title: str, run: Run) -> Chart:
    chart = Chart(name=name, title=title)
    axes = chart.axes
    axes.grid(visible=True, axis="y")
    axes.locator_params(axis="x", nbins=6)
    axes.set_xlabel("step")
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.0f}"))
    last = max([1, *(it.step for it in run.metrics.steps[-1:])])
    axes.set_xlim(0, last * 1.02)
    for i, resumed in enumerate(run.metrics.resumed):
        label = "resumed" if i == 0 else ""
        axes.axvline(resumed.step, color=MUTED, lw=1, ls=(0, (3, 3)), label=label)
    for i, stage in enumerate(stages_of(run)[:-1]):
        label = "" if i else "end of a stage"
        axes.axvline(stage[-1].step, color=INK, lw=1, ls=":", label=label)
    saved = [it.step for it in run.checkpoints if not it.error]
    mark_checkpoints(chart, apart(saved, last / 90), 0.0)
    return chart


def _finish(chart: Chart, has_data: bool, form: str) -> Chart:
    axes = chart.axes
    if not has_data:
        axes.set_yticks([])
        middle = axes.transAxes
        axes.text(0.5, 0.5, "no data", color=MUTED, ha="center", transform=middle)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: form.format(value)))
    return chart


def mark_checkpoints(chart: Chart, places: Sequence[float], y: float) -> None:
    """Draw triangles at the lower (``y`` 0) or upper (1) end of a chart."""
    if places:
        chart.axes.plot(
            places,
            [y] * len(places),
            marker=7 if y else 6,  # down or up
            ls="",
            color=CHECKPOINT,
            markeredgewidth=0,
            clip_on=False,
            transform=chart.axes.get_xaxis_transform(),
            label="checkpoint",
        )


def _validation(run: Run, name: str) -> tuple[Floats, Floats, Floats, Floats]:
    found = [it for it in run.metrics.all_validations if name in it.values]
    return bins([it.step for it in found], [it.values[name] for it in found])


def apart(places: Iterable[float], distance: float) -> list[float]:
    """Leave out marks that would lie on the one before."""
    kept: list[float] = []
    for place in sorted(places):
        if not kept or place - kept[-1] >= distance:
            kept.append(place)
    return kept


def bins(
    x: ArrayLike, y: ArrayLike, num_bins: int = NUM_BINS
) -> tuple[Floats, Floats, Floats, Floats]:
    """Return the last x and the smallest, mean and largest y of at most so many bins.

    Points whose y is nan or inf are left out.

    >>> x, low, mean, high = bins(range(1, 7), [1, 3, 5, 5, float("nan"), 2], 2)
    >>> x.tolist(), low.tolist(), mean.tolist(), high.tolist()
    ([2.0, 6.0], [1.0, 2.0], [2.0, 4.0], [3.0, 5.0])
    """
    xs, ys = np.asarray(x, np.float64), np.asarray(y, np.float64)
    xs, ys = xs[np.isfinite(ys)], ys[np.isfinite(ys)]
    if not len(xs):
        return xs, ys, ys, ys
    # No more bins than points: `reduceat` takes for an empty one the next point.
    edges = np.linspace(0, len(xs), min(num_bins, len(xs)) + 1).astype(int)
    first, last = edges[:-1], edges[1:] - 1
    mean = np.add.reduceat(ys, first) / np.diff(edges)
    low, high = np.minimum.reduceat(ys, first), np.maximum.reduceat(ys, first)
    return xs[last], low, mean, high
