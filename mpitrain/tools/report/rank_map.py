"""The map of ranks by time: a row per rank, the colours of a row are its phases."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime

import numpy as np
from matplotlib.colors import to_rgba
from matplotlib.patches import Patch, Rectangle
from numpy.typing import NDArray

from mpitrain.record.reading import RankJob, Run
from mpitrain.tools.report.analysis import ALL_PHASES, Floats, JobTimes, timeline
from mpitrain.tools.report.curves import apart, mark_checkpoints
from mpitrain.tools.report.figures import (
    HANG,
    INK,
    MUTED,
    PAPER,
    PHASE_COLOURS,
    WAITING,
    Chart,
)
from mpitrain.tools.report.summary import balance_line, findings

NUM_COLUMNS = 800
HEIGHT_PIXELS = 640  # of the whole map; in a row a phase has its share of the pixels
MAX_LABELS = 24
COMMUNICATION = ALL_PHASES.index("communication")


@dataclass(frozen=True, kw_only=True)
class RankMap:
    """What ranks did, cell by cell: jobs side by side, without the time between."""

    edges: Floats  # `(jobs, 2)`: where each job is, from left (0) to right (1)
    times: Floats  # `(jobs, 2)`: when it began and ended, seconds since 1970
    shares: Floats
    """`(rows, columns, phases)`: of each of `ALL_PHASES`, 0 to 1, without waiting for
    other ranks; the rest is waiting, or not known."""
    is_missing: NDArray[np.bool_]
    """`(rows, columns)`: a rank of the job that wrote nothing about that time."""
    is_hanging: NDArray[np.bool_]
    """`(rows, columns)`: what the others waited for when the job was ended."""

    def place(self, time: float) -> float:
        """Return where a time is."""
        return float(np.interp(time, self.times.ravel(), self.edges.ravel()))


def job_edges(jobs: Sequence[JobTimes]) -> Floats:
    """Lay jobs side by side, each as wide as it was long, but visible: `(jobs, 2)`."""
    num = len(jobs)
    gap, smallest = min(0.012, 0.2 / num), min(0.02, 0.3 / num)
    seconds = np.array([max(job.seconds, 1e-6) for job in jobs])
    free = 1 - gap * (num - 1) - smallest * num
    widths = smallest + free * seconds / seconds.sum()
    lefts = np.concatenate([[0.0], np.cumsum(widths + gap)[:-1]])
    return np.stack([lefts, lefts + widths], 1)


def rank_map(jobs: Sequence[JobTimes], num_columns: int = NUM_COLUMNS) -> RankMap:
    """Compute the map of some jobs, at least one."""
    edges = job_edges(jobs)
    shape = (max(job.world_size for job in jobs), num_columns)
    shares = np.zeros((*shape, len(ALL_PHASES)))
    is_missing, is_hanging = np.zeros(shape, bool), np.zeros(shape, bool)
    for job, (left, right) in zip(jobs, edges.tolist(), strict=True):
        first = min(round(left * num_columns), num_columns - 1)
        end = max(round(right * num_columns), first + 1)
        inside = slice(first, end)
        times = np.linspace(job.began, job.ended, end - first + 1)
        hanging, killed = job.hanging_ranks(), job.killed_ranks()
        for rank in range(job.world_size):
            part = job.ranks.get(rank)
            if part is None:
                is_missing[rank, inside] = True
                continue
            shares[rank, inside] = phase_shares(part, times)
            if rank in killed:
                is_missing[rank, inside] = times[1:] > part.ended
            if rank in hanging and part.cut is not None:
                since = min(part.cut.time - part.cut.seconds, times[-2])
                is_hanging[rank, inside] = times[:-1] >= since
        # All ranks need as long for communication as the last one; the rest is waiting.
        block = shares[: job.world_size, inside]
        shortest = np.where(block.any(-1), block[..., COMMUNICATION], 1.0).min(0)
        block[..., COMMUNICATION] = np.minimum(shortest, block[..., COMMUNICATION])
    return RankMap(
        edges=edges,
        times=np.array([(job.began, job.ended) for job in jobs]),
        shares=shares,
        is_missing=is_missing,
        is_hanging=is_hanging,
    )


def phase_shares(part: RankJob, times: Floats) -> Floats:
    """Return what a rank did between some times: `(len(times) - 1, phases)`."""
    known, seconds = timeline(part)
    at = np.stack([np.interp(times, known, column) for column in seconds.T], 1)
    widths = np.maximum(np.diff(times), 1e-12)[:, None]
    found: Floats = np.clip(np.diff(at, axis=0) / widths, 0.0, 1.0)
    return found


def pixels(found: RankMap) -> NDArray[np.float64]:
    """Stack the phases of each cell from the bottom; waiting stays transparent."""
    num_rows, num_columns, _ = found.shares.shape
    num = max(1, HEIGHT_PIXELS // num_rows)
    heights = 1 - (np.arange(num) + 0.5) / num
    tops = found.shares.cumsum(-1)
    stage = np.zeros((num_rows, num, num_columns), int)
    for i in range(len(ALL_PHASES)):
        stage += tops[:, None, :, i] < heights[None, :, None]
    colours = np.array([*map(to_rgba, PHASE_COLOURS.values()), (1, 1, 1, 0)])
    image: NDArray[np.float64] = colours[stage]
    for mask, colour in ((found.is_missing, MUTED), (found.is_hanging, HANG)):
        image.swapaxes(1, 2)[mask] = to_rgba(colour)
    return image.reshape(-1, num_columns, 4)


def map_chart(run: Run, jobs: Sequence[JobTimes]) -> Chart:
    """Draw what every rank of a run did, in one job at least."""
    num = min(max(job.world_size for job in jobs), 26)
    height = min(520.0, 110 + (16 if num > 24 else 26) * num)
    chart = Chart(name="ranks", title="Ranks by time", is_wide=True, height=height)
    metrics = run.metrics
    chart.findings = findings(jobs, metrics.throughputs)
    if metrics.balance is not None:
        chart.findings.append(balance_line(*metrics.balance))
    _draw(chart, jobs, found := rank_map(jobs))
    saved = [one.time for one in run.checkpoints if not one.error]
    places = [found.place(time) for time in saved if time is not None]
    mark_checkpoints(chart, apart(places, 0.01), 1.0)
    return chart


def _draw(chart: Chart, jobs: Sequence[JobTimes], found: RankMap) -> None:
    axes, num_rows = chart.axes, len(found.shares)
    axes.spines["bottom"].set_visible(False)
    largest = max(reversed(jobs), key=lambda job: job.world_size)
    for job, (left, right) in zip(jobs, found.edges.tolist(), strict=True):
        size = right - left, job.world_size
        axes.add_patch(Rectangle((left, 0), *size, lw=0, fc=WAITING))
        text = f"job {job.number}: {job.world_size} ranks"
        if len(jobs) > 1 and len(text) < 120 * (right - left):
            axes.annotate(
                text, (left, 0), (0, 12), textcoords="offset points", color=INK
            )
    extent = (0, 1, num_rows, 0)
    axes.imshow(pixels(found), extent=extent, interpolation="nearest", zorder=2)
    for rank in range(1, largest.world_size):
        is_same = _node(largest, rank) == _node(largest, rank - 1)
        if largest.world_size <= (MAX_LABELS if is_same else 256):
            axes.axhline(rank, color=PAPER, lw=1.5 if is_same else 3, zorder=4)
    axes.set(xlim=(0, 1), ylim=(num_rows, 0), ylabel="rank", aspect="auto")
    axes.set_yticks(*rank_labels(largest))
    axes.set_xticks(*time_labels(found))
    used = found.shares.mean((0, 1)) > 0.0005
    legend = [
        item for item, there in zip(PHASE_COLOURS.items(), used, strict=True) if there
    ]
    legend.append(("waiting for other ranks", WAITING))
    if found.is_hanging.any():
        legend.append(("hang", HANG))
    if found.is_missing.any():
        legend.append(("no data", MUTED))
    chart.figure.legend(
        handles=[Patch(facecolor=colour, label=label) for label, colour in legend],
        loc="outside lower left",
        ncols=10,
    )


def rank_labels(job: JobTimes) -> tuple[list[float], list[str]]:
    """Return the places and names of rows: some ranks, the first of a node with it."""
    places, labels, previous = [], [], ""
    for rank in range(0, job.world_size, math.ceil(job.world_size / MAX_LABELS)):
        host = job.ranks[rank].hostname if rank in job.ranks else "?"
        is_new = host != previous and job.num_nodes > 1
        previous = host
        places.append(rank + 0.5)
        labels.append(
            f"{host.partition('.')[0][-12:]}  {rank}" if is_new else str(rank)
        )
    return places, labels


def _node(job: JobTimes, rank: int) -> int:
    return job.ranks[rank].node_rank if rank in job.ranks else -1


def time_labels(found: RankMap, num: int = 8) -> tuple[list[float], list[str]]:
    """Return places on the time axis, and their local times; none between jobs."""
    places = [
        place
        for place in ((i + 0.5) / num for i in range(num))
        if ((found.edges[:, 0] <= place) & (place <= found.edges[:, 1])).any()
    ]
    times = np.interp(places, found.edges.ravel(), found.times.ravel()).tolist()
    is_long = found.times[-1, 1] - found.times[0, 0] > 86400
    form = "%b %d %H:%M" if is_long else "%H:%M:%S"
    return places, [
        datetime.fromtimestamp(it).astimezone().strftime(form) for it in times
    ]
