"""Bars of where the time went: of a run and its jobs, or of several runs."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from mpitrain.tools.report import words
from mpitrain.tools.report.curves import Shown
from mpitrain.tools.report.facts import SHARES, shares
from mpitrain.tools.report.style import Chart, Paper, plain_axes

MOST_BARS = 12
"""Jobs that have a bar of their own."""


def stage_chart(shown: Sequence[Shown]) -> Chart:
    """Return the chart of where the time went: a bar per job, or per run."""
    bars: list[tuple[str, dict[str, float]]] = []
    for it in shown:
        paces = it.run.metrics.throughputs
        name = it.run.name if len(shown) > 1 else "all jobs"
        bars.append((name, shares(it.jobs, paces)))
        if len(shown) == 1 and len(it.jobs) > 1:
            bars += [
                (f"job {job.number}", shares([job], paces))
                for job in it.jobs[-MOST_BARS:]
            ]
        elif len(shown) == 1:
            bars = [("", bars[0][1])]
    used = [
        name
        for name in SHARES
        if any(
            of[name] > 0.002 * sum(of.values()) for _, of in bars if any(of.values())
        )
    ]
    said = "\n".join(
        f"{it.run.name}: {words.stages(of)}" if len(shown) > 1 else words.stages(of)
        for it, (_, of) in zip(shown, bars, strict=False)
    )
    return Chart(
        name="stages",
        title="Where the time went",
        words=f"{said}\nMeans of the ranks, from the start of the processes on.",
        draw=lambda figure, paper: draw_stages(figure, paper, bars),
        height=70 + 48 * len(bars),
        legend=tuple((name, name) for name in used),
    )


def draw_stages(
    figure: Figure, paper: Paper, bars: Sequence[tuple[str, dict[str, float]]]
) -> None:
    """Draw bars of shares, each with its whole time at the end."""
    axes = plain_axes(figure, paper)
    axes.grid(visible=False)
    thickness = 0.55 if paper.is_narrow else 0.72
    for row, (_, of) in enumerate(bars):
        total, left = sum(of.values()), 0.0
        for name in SHARES:
            width = of[name] / total if total > 0 else 0.0
            if width <= 0:
                continue
            axes.barh(
                row,
                width,
                thickness,
                left=left,
                color=paper.colour(name),
                edgecolor=paper.colour("paper"),
                linewidth=1,
            )
            if width > (0.09 if not paper.is_narrow else 0.16):
                axes.text(
                    left + width / 2,
                    row,
                    words.per_cent(width),
                    ha="center",
                    va="center",
                    color=paper.colour(f"on-{name}"),
                    weight="bold",
                )
            left += width
    labels = [
        f"{name}  {words.duration(sum(of.values()))}".strip() for name, of in bars
    ]
    if paper.is_narrow:  # above the bars, where there is room for them
        for row, label in enumerate(labels):
            axes.text(0, row - 0.31, label, va="bottom", color=paper.colour("muted"))
        axes.set_yticks([])
    else:
        axes.set_yticks(range(len(bars)), labels)
    axes.set_ylim(len(bars) - 0.5, -0.85 if paper.is_narrow else -0.5)
    axes.set_xlim(0, 1)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "25 %", "50 %", "75 %", "100 %"])
