"""Long series as few points: the shape stays, and so do the extremes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray

from mpitrain.record.reading import TimedThroughput

Floats = NDArray[np.float64]


def finite(x: ArrayLike, y: ArrayLike) -> tuple[Floats, Floats]:
    """Leave out points whose value is no number."""
    xs, ys = np.asarray(x, np.float64), np.asarray(y, np.float64)
    good = np.isfinite(ys)
    return xs[good], ys[good]


def thinned(x: Floats, y: Floats, num_bins: int) -> tuple[Floats, Floats]:
    """Keep the first, the least, the largest and the last of each of some bins.

    Args:
        x: Ascending.
        y: Finite.
        num_bins: At most so many, of equally many points.

    Returns:
        At most four points a bin, which look as all of them do.

    >>> x = np.arange(1000.0)
    >>> y = np.zeros(1000)
    >>> y[123] = 5.0
    >>> xs, ys = thinned(x, y, 10)
    >>> len(xs) <= 40, float(ys.max()), float(xs[ys.argmax()])
    (True, 5.0, 123.0)
    """
    if len(x) <= 4 * num_bins:
        return x, y
    kept: set[int] = set()
    edges = np.linspace(0, len(x), num_bins + 1).astype(int)
    for first, end in itertools.pairwise(edges.tolist()):
        part = y[first:end]
        kept |= {first, first + int(part.argmin()), first + int(part.argmax()), end - 1}
    places = np.array(sorted(kept))
    return x[places], y[places]


def smooth(x: Floats, y: Floats, num_bins: int) -> tuple[Floats, Floats]:
    """Return the means of some bins, each of the points around it.

    Args:
        x: Ascending.
        y: Finite.
        num_bins: At most so many; a mean reaches over three of them.
    """
    if len(x) < 3:
        return x, y
    edges = np.linspace(0, len(x), min(num_bins, len(x)) + 1).astype(int)
    sums = np.concatenate([[0.0], np.cumsum(y)])
    places = np.concatenate([[0.0], np.cumsum(x)])
    first, end = edges[:-1], edges[1:]
    width = end - first
    low, high = np.maximum(first - width, 0), np.minimum(end + width, len(x))
    return (places[end] - places[first]) / width, (sums[high] - sums[low]) / (
        high - low
    )


def rates(
    paces: Sequence[TimedThroughput], num_bins: int
) -> tuple[Floats, Floats, Floats]:
    """Put the paces of steps together.

    Args:
        paces: Ascending by step.
        num_bins: At most so many.

    Returns:
        Of each bin: the number of its last step, samples per second, and seconds of a
        step; sums over sums, so that long waits count as what they are.
    """
    seen = [pace for pace in paces if pace.seconds > 0 and pace.num_steps > 0]
    bins = [part.tolist() for part in np.array_split(np.arange(len(seen)), num_bins)]
    steps, samples, seconds = [], [], []
    for part in bins:
        if part:
            time = sum(seen[i].seconds for i in part)
            steps.append(float(seen[part[-1]].step))
            samples.append(sum(seen[i].num_samples for i in part) / time)
            seconds.append(time / sum(seen[i].num_steps for i in part))
    return np.array(steps), np.array(samples), np.array(seconds)


def largest(x: Floats, y: Floats, num_bins: int) -> tuple[Floats, Floats]:
    """Return the largest value of each of some bins of equal width in x."""
    if not len(x):
        return x, y
    width = max((x.max() - x.min()) / num_bins, 1e-9)
    places = np.minimum(((x - x.min()) / width).astype(int), num_bins - 1)
    most = np.full(num_bins, -np.inf)
    np.maximum.at(most, places, y)
    there = np.isfinite(most)
    ends = x.min() + width * (np.arange(num_bins) + 1)
    return ends[there], most[there]
