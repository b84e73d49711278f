"""The map of ranks by time: what each rank did, and the strip of time it lies on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mpitrain.record.reading import RankJob
from mpitrain.tools.report.facts import (
    STAGES,
    Floats,
    Job,
    columns,
    until_first_line,
)
from mpitrain.train.metrics import NUM_PHASES, OTHER

MOST_ROWS = 400
"""More ranks than this share rows; in each the one that waits least is seen."""

GAP = 0.012
"""Of the strip's width: what lies between two jobs, however long that was."""

LEAST_WIDTH = 0.02
"""Of the strip's width: a job, however short."""

WAITING = STAGES.index("communication")


@dataclass(frozen=True, kw_only=True)
class Strip:
    """Time from left (0) to right (1), without what lies between jobs."""

    jobs: tuple[Job, ...]
    lefts: tuple[float, ...]
    """Where each job begins."""
    rights: tuple[float, ...]
    """Where each job ends."""

    def place(self, time: float) -> float:
        """Return where a time lies; between two jobs, at the end of the first."""
        last = 0.0
        for job, left, right in zip(self.jobs, self.lefts, self.rights, strict=True):
            if time < job.began:
                return last
            if time <= job.ended:
                span = max(job.wall_seconds, 1e-9)
                return left + (right - left) * (time - job.began) / span
            last = right
        return last


def strip_of(jobs: Sequence[Job]) -> Strip:
    """Lay jobs side by side, each as wide as it was long."""
    num = max(len(jobs), 1)
    gap = min(GAP, 0.2 / num)
    least = min(LEAST_WIDTH, 0.3 / num)
    wall = np.array([max(job.wall_seconds, 1e-6) for job in jobs])
    room = 1 - gap * (num - 1)
    widths = least + (room - least * num) * wall / wall.sum()
    lefts = np.concatenate([[0.0], np.cumsum(widths + gap)[:-1]])
    return Strip(
        jobs=tuple(jobs),
        lefts=tuple(lefts.tolist()),
        rights=tuple((lefts + widths).tolist()),
    )


@dataclass(frozen=True, kw_only=True)
class RankMap:
    """What ranks did, cell by cell."""

    strip: Strip
    shares: Floats
    """`(rows, columns, stages)`: of each of `STAGES`, 0 to 1; zeros: nothing known."""
    communication: Floats
    """`(rows, columns)`: of the share of communication, what every rank of the job
    spent in it; the rest is waiting."""
    is_missing: NDArray[np.bool_]
    """`(rows, columns)`: a rank of the job that left no word of that time."""
    is_culprit: NDArray[np.bool_]
    """`(rows, columns)`: it did something else while the others waited, at the end."""
    num_ranks: int
    """Of the largest job."""
    ranks_per_row: int


def rank_map(jobs: Sequence[Job], num_columns: int) -> RankMap:
    """Draw the map of some jobs, at least one."""
    strip = strip_of(jobs)
    num_ranks = max(job.world_size for job in jobs)
    per_row = -(-num_ranks // MOST_ROWS)
    num_rows = -(-num_ranks // per_row)
    shape = (num_rows, num_columns)
    shares = np.zeros((*shape, len(STAGES)))
    communication = np.zeros(shape)
    is_missing, is_culprit = np.zeros(shape, bool), np.zeros(shape, bool)
    edges = np.linspace(0, 1, num_columns + 1)
    for job, left, right in zip(jobs, strip.lefts, strip.rights, strict=True):
        first = min(round(left * num_columns), num_columns - 1)
        end = max(round(right * num_columns), first + 1)
        inside = slice(first, end)
        here = (edges[first : end + 1] - edges[first]) / (edges[end] - edges[first])
        times = job.began + here * job.wall_seconds
        middles = (times[:-1] + times[1:]) / 2
        culprits, silent = set(job.culprits()), set(job.silent())
        for rank in range(job.world_size):
            row = rank // per_row
            part = job.ranks.get(rank)
            if part is None:
                is_missing[row, inside] = True
                continue
            found = cells(part, times)
            if rank in silent:
                is_missing[row, inside] |= middles > part.ended
            if rank in culprits and part.cut is not None:
                late = middles >= part.cut.time - part.cut.seconds
                late[-1] = True  # however short that was
                is_culprit[row, inside] |= late
            busier = _busy(found) > _busy(shares[row, inside])
            if rank % per_row == 0:
                busier[:] = True
            shares[row, inside][busier] = found[busier]
        of_job = slice(0, -(-job.world_size // per_row)), inside
        known = shares[of_job].sum(-1) > 0
        least = np.where(known, shares[of_job][..., WAITING], 1.0).min(0)
        communication[of_job] = least * known
    return RankMap(
        strip=strip,
        shares=shares,
        communication=communication,
        is_missing=is_missing,
        is_culprit=is_culprit,
        num_ranks=num_ranks,
        ranks_per_row=per_row,
    )


def _busy(shares: Floats) -> Floats:
    """Return how much of the time of cells went elsewhere than into waiting."""
    busy: Floats = shares.sum(-1) - shares[..., WAITING]
    return busy


def cells(part: RankJob, times: Floats) -> Floats:
    """Return what a rank did between some times.

    Args:
        part: Its lines in a job. Within a line, nobody knows the order of its phases:
            they are held to be mixed.
        times: Ascending, seconds since 1970: one more than there are cells.

    Returns:
        `(cells, stages)`: the share of each stage; zeros where nothing is known.
    """
    began = part.time - part.start_seconds
    first = part.time + until_first_line(part)
    ends = [began, first]
    rows = [np.eye(1, len(STAGES))[0] * (first - began)]
    if len(part.ends):
        sums = columns(part)
        spans = np.diff(np.concatenate([[first], np.asarray(part.ends)]))
        # What no phase tells of (a GPU's marks are read later), others do too much of.
        lacking = np.maximum(spans - sums.sum(1), 0.0)
        sums[:, OTHER] += lacking
        totals = np.maximum(sums.sum(1, keepdims=True), 1e-12)
        sums *= np.maximum(spans, 0.0)[:, None] / totals
        ends += list(part.ends)
        rows += [np.concatenate([[0.0], it]) for it in sums]
    if part.cut is not None:
        since = max(part.cut.time - part.cut.seconds, ends[-1])
        for end, phase in ((since, OTHER), (part.cut.time, part.cut.phase)):
            if end > ends[-1]:
                row = np.zeros(1 + NUM_PHASES)
                row[1 + phase] = end - ends[-1]
                ends.append(end)
                rows.append(row)
    whole = np.concatenate([np.zeros((1, len(STAGES))), np.cumsum(rows, 0)])
    places = np.maximum.accumulate(np.asarray(ends))
    at = np.stack([np.interp(times, places, column) for column in whole.T], 1)
    widths = np.maximum(np.diff(times), 1e-12)[:, None]
    found: Floats = np.clip(np.diff(at, axis=0) / widths, 0.0, 1.0)
    return found
