"""A sum that does not depend on the order of its numbers, unless it is too large."""

from __future__ import annotations

import math
from collections.abc import Sequence


def sum_exactly(values: Sequence[float]) -> float:
    """Return the sum, rounded once; nan or infinite where values are.

    >>> sum_exactly([1.0, 1e100, -1e100]), sum_exactly([math.inf, -math.inf])
    (1.0, nan)
    """
    try:
        return math.fsum(values)
    except (OverflowError, ValueError):  # too large, or infinite with both signs
        return sum(values)
