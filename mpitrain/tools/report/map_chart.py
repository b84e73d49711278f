"""The chart of the map: ranks from top to bottom, time from left to right."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from numpy.typing import NDArray

from mpitrain.tools.report import words
from mpitrain.tools.report.curves import Shown
from mpitrain.tools.report.facts import STAGES, Floats, Job
from mpitrain.tools.report.rank_map import WAITING, RankMap, Strip, rank_map
from mpitrain.tools.report.style import Chart, Paper, plain_axes, rgb
from mpitrain.train.metrics import PHASES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

NUM_COLUMNS = 640
NUM_COLUMNS_NARROW = 320

NICE_SECONDS = (
    *(1, 2, 5, 10, 15, 30),
    *(60, 120, 300, 600, 900, 1800),
    *(3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800),
)
"""Distances of the marks on the time's axis."""

MOST_LABELS = 24
"""On the ranks' axis."""


def map_chart(shown: Shown, *, is_alone: bool) -> Chart:
    """Return the chart of one run's ranks."""
    jobs = [job for job in shown.jobs if job.ranks]
    num = max((job.world_size for job in jobs), default=1)
    maps = (
        {n: rank_map(jobs, n) for n in (NUM_COLUMNS, NUM_COLUMNS_NARROW)}
        if jobs
        else {}
    )
    used = [
        name
        for i, name in enumerate(STAGES)
        if maps and _busy(maps[NUM_COLUMNS])[..., i].mean() > 0.002
    ]
    legend = [(it, it) for it in used]
    legend.append(("waiting", "waiting for the others' gradients"))
    if any(job.culprits() for job in jobs):
        legend.append(("hang", "what the others waited for at the end"))
    if shown.run.checkpoints:
        legend.append(
            ("checkpoint", "checkpoint (\N{BLACK DOWN-POINTING TRIANGLE} written)")
        )
    name = "" if is_alone else f"-{shown.colour}"
    return Chart(
        name=f"ranks{name}",
        title="Ranks by time" + ("" if is_alone else f": {shown.run.name}"),
        words=words.ranks(jobs, shown.run.metrics.throughputs),
        draw=lambda figure, paper: draw_map(figure, paper, shown, jobs, maps),
        height=min(520.0, 110 + (16 if num > 24 else 26) * min(num, 26)),
        legend=tuple(dict(legend).items()),
    )


def draw_map(
    figure: Figure,
    paper: Paper,
    shown: Shown,
    jobs: Sequence[Job],
    maps: dict[int, RankMap],
) -> None:
    """Draw what every rank did."""
    axes = plain_axes(figure, paper)
    axes.grid(visible=False)
    axes.spines["bottom"].set_visible(False)
    if not jobs:
        axes.text(0.5, 0.5, "no times yet", ha="center", transform=axes.transAxes)
        axes.set_xticks([])
        axes.set_yticks([])
        return
    found = maps[NUM_COLUMNS_NARROW if paper.is_narrow else NUM_COLUMNS]
    strip, num_rows = found.strip, len(found.shares)
    for job, left, right in zip(jobs, strip.lefts, strip.rights, strict=True):
        rows = -(-job.world_size // found.ranks_per_row)
        axes.add_patch(
            Rectangle(
                (left, 0), right - left, rows, fc=paper.colour("waiting"), ec="none"
            )
        )
    axes.imshow(
        pixels(found),
        extent=(0, 1, num_rows, 0),
        aspect="auto",
        interpolation="nearest",
        zorder=2,
    )
    _hatch(axes, paper, found)
    if found.ranks_per_row == 1:
        _lines_between(axes, paper, jobs)
    _accuse(axes, paper, found, jobs)
    _name_jobs(axes, paper, strip)
    _mark_checkpoints(axes, paper, shown, strip)
    axes.set_xlim(0, 1)
    axes.set_ylim(num_rows, 0)
    places, labels = rank_labels(_largest(jobs), found.ranks_per_row)
    axes.set_yticks(places, labels)
    axes.set_ylabel("rank")
    ticks = time_ticks(strip, 3 if paper.is_narrow else 7)
    axes.set_xticks([it[0] for it in ticks], [it[1] for it in ticks])


def pixels(found: RankMap) -> NDArray[np.uint8]:
    """Mix the colours of what a rank did in a cell.

    Returns:
        RGBA uint8 `(rows, columns, 4)`: the more it waited, the less is seen of it.
    """
    colours = np.array([rgb(name) for name in STAGES])
    # Half seen, the start steps back on light paper and on dark.
    weights = np.array([0.62 if name == "start" else 1.0 for name in STAGES])
    busy = _busy(found) * weights
    total = busy.sum(-1, keepdims=True)
    mixed = busy @ colours / np.maximum(total, 1e-9)
    # Steeper than the share itself: who waits less than others shall stand out.
    whole = np.concatenate([mixed, np.minimum(total, 1.0) ** 1.6], -1)
    # 64 levels look as 256 do, and take half the bytes.
    levels: NDArray[np.uint8] = (np.round(whole * 63) * 255 / 63).astype(np.uint8)
    return levels


def _busy(found: RankMap) -> Floats:
    """Return the shares of all stages, without waiting."""
    busy = found.shares.copy()
    busy[..., WAITING] = found.communication
    return busy


def _hatch(axes: Axes, paper: Paper, found: RankMap) -> None:
    for top, bottom, left, right in blocks(found.is_missing):
        axes.add_patch(
            Rectangle(
                (left, top),
                right - left,
                bottom - top,
                fc=paper.colour("paper"),
                ec=paper.colour("muted"),
                hatch="////",
                lw=0,
                zorder=3,
            )
        )


def blocks(where: NDArray[np.bool_]) -> Iterator[tuple[int, int, float, float]]:
    """Yield rectangles of cells: first row, end, and left and right from 0 to 1."""
    num_rows, num_columns = where.shape
    row = 0
    while row < num_rows:
        end = row + 1
        while end < num_rows and (where[end] == where[row]).all():
            end += 1
        edges = np.flatnonzero(np.diff(np.concatenate([[0], where[row], [0]])))
        for left, right in edges.reshape(-1, 2).tolist():
            yield row, end, left / num_columns, right / num_columns
        row = end


def _lines_between(axes: Axes, paper: Paper, jobs: Sequence[Job]) -> None:
    """Part ranks by thin lines, and nodes by thick ones."""
    job = _largest(jobs)
    is_fine = job.world_size > 32
    for rank in range(1, job.world_size):
        is_other = _node(job, rank) != _node(job, rank - 1)
        width = (2 if is_fine else 3) if is_other else 0 if is_fine else 1
        if width and job.world_size <= 256:
            axes.axhline(rank, color=paper.colour("paper"), lw=width, zorder=4)


def _accuse(axes: Axes, paper: Paper, found: RankMap, jobs: Sequence[Job]) -> None:
    """Show what the others waited for when a job was ended."""
    num_rows = len(found.is_culprit)
    for top, bottom, left, right in blocks(found.is_culprit):
        width = max(right - left, 0.008)
        height = max(bottom - top, num_rows * 0.012)
        middle = (top + bottom) / 2
        axes.add_patch(
            Rectangle(
                (right - width, middle - height / 2),
                width,
                height,
                fc=paper.colour("hang"),
                ec=paper.colour("paper"),
                lw=1,
                zorder=5,
            )
        )
    for job, right in zip(jobs, found.strip.rights, strict=True):
        for rank in job.culprits()[:3]:
            cut = job.ranks[rank].cut
            assert cut is not None
            since = found.strip.place(max(cut.time - cut.seconds, job.began))
            phase = PHASES[cut.phase]
            text = f"rank {rank}: {phase}, {words.duration(cut.seconds)}"
            is_left = since > 0.45
            axes.annotate(
                text,
                (since if is_left else right, (rank + 0.5) / found.ranks_per_row),
                xytext=(-8 if is_left else 8, 0),
                textcoords="offset points",
                ha="right" if is_left else "left",
                va="center",
                weight="bold",
                color=paper.colour("hang"),
                bbox={"boxstyle": "round,pad=0.3", "fc": paper.colour("paper"),
                      "ec": paper.colour("hang"), "lw": 1.2},
                zorder=6,
            )  # fmt: skip


def _name_jobs(axes: Axes, paper: Paper, strip: Strip) -> None:
    if len(strip.jobs) < 2:
        return
    before: Job | None = None
    for job, left, right in zip(strip.jobs, strip.lefts, strip.rights, strict=True):
        pause = job.began - before.ended if before else 0.0
        later = f", {words.duration(pause)} later" if pause > 1 else ""
        ranks = words.several(job.world_size, "rank")
        for text in (
            f"job {job.number}: {ranks}{later}",
            f"job {job.number}: {ranks}",
            f"job {job.number}",
            f"{job.number}",
        ):
            if len(text) * paper.font * 0.6 < (right - left) * paper.width * 0.88:
                axes.annotate(
                    text,
                    (left, 0),
                    xytext=(0, 14),
                    textcoords="offset points",
                    color=paper.colour("ink"),
                    annotation_clip=False,
                )
                break
        before = job


def _mark_checkpoints(axes: Axes, paper: Paper, shown: Shown, strip: Strip) -> None:
    for is_bad in (False, True):
        places: list[float] = []
        times = [
            it.time
            for it in shown.run.checkpoints
            if it.time is not None and bool(it.error) is is_bad
        ]
        for place in sorted(strip.place(time) for time in times):
            if not places or place - places[-1] > (0.02 if paper.is_narrow else 0.01):
                places.append(place)
        if not places:
            continue
        axes.plot(
            places,
            [1.0] * len(places),
            marker="x" if is_bad else 7,  # a triangle that points down
            ls="",
            color=paper.colour("bad" if is_bad else "checkpoint"),
            markersize=7,
            clip_on=False,
            transform=axes.get_xaxis_transform(),
            zorder=6,
        )


def _largest(jobs: Sequence[Job]) -> Job:
    return max(reversed(jobs), key=lambda job: job.world_size)


def rank_labels(job: Job, ranks_per_row: int) -> tuple[list[float], list[str]]:
    """Name the rows: by rank where there is room, by node where there are several.

    Returns:
        Places in rows, and names.
    """
    firsts = [
        rank
        for rank in range(job.world_size)
        if rank == 0 or _node(job, rank) != _node(job, rank - 1)
    ]
    if job.world_size <= MOST_LABELS:
        labels = []
        for rank in range(job.world_size):
            host = short(job.ranks[rank].hostname) if rank in job.ranks else "?"
            is_named = rank in firsts and len(firsts) > 1
            labels.append(f"{host}  {rank}" if is_named else f"{rank}")
        return [rank + 0.5 for rank in range(job.world_size)], labels
    if len(firsts) > 1:
        every = math.ceil(len(firsts) / MOST_LABELS)
        places, labels = [], []
        for node in range(0, len(firsts), every):
            first = firsts[node]
            end = firsts[node + 1] if node + 1 < len(firsts) else job.world_size
            host = short(job.ranks[first].hostname) if first in job.ranks else "?"
            places.append((first + end) / 2 / ranks_per_row)
            labels.append(f"{host}  {first}-{end - 1}" if end - first > 1 else host)
        return places, labels
    every = 2 ** math.ceil(math.log2(job.world_size / 16))
    ranks = list(range(0, job.world_size, every))
    return [(rank + 0.5) / ranks_per_row for rank in ranks], [f"{it}" for it in ranks]


def _node(job: Job, rank: int) -> int:
    return job.ranks[rank].node_rank if rank in job.ranks else -1


def short(hostname: str, most: int = 12) -> str:
    """Shorten a host's name: its domain first, then its beginning.

    >>> short("gpu03.cluster.example.org"), short("a-very-long-node-name-0123")
    ('gpu03', '..-name-0123')
    """
    name = hostname.partition(".")[0] or hostname
    return name if len(name) <= most else ".." + name[-(most - 2) :]


def time_ticks(strip: Strip, most: int) -> list[tuple[float, str]]:
    """Choose marks on the time's axis: where, and the clock's time here."""
    total = sum(job.wall_seconds for job in strip.jobs)
    distance = next((s for s in NICE_SECONDS if total / s <= most), NICE_SECONDS[-1])
    form = "%H:%M:%S" if distance < 60 else "%H:%M" if distance < 86400 else "%b %d"
    ticks: list[tuple[float, str]] = []
    offset = _utc_offset(strip.jobs[0].began)
    for job in strip.jobs:
        time = math.ceil((job.began + offset) / distance) * distance - offset
        while time <= job.ended:
            place = strip.place(time)
            if not ticks or place - ticks[-1][0] > 0.7 / most:
                ticks.append((place, _local(time).strftime(form)))
            time += distance
    return ticks


def _local(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds).astimezone()


def _utc_offset(seconds: float) -> float:
    offset = _local(seconds).utcoffset()
    return offset.total_seconds() if offset else 0.0
