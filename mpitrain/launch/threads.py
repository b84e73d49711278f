"""How many threads each rank may compute with, from the cores it may really use."""

from __future__ import annotations

import os
from collections.abc import Collection, MutableMapping, Sequence
from pathlib import Path

from mpitrain.errors import UsageError


def usable_cores() -> frozenset[int]:
    """Return the cores that this process may run on: its affinity mask."""
    return frozenset(os.sched_getaffinity(0))


def cpu_quota(root: Path = Path("/sys/fs/cgroup")) -> float:
    """Return how many cores' worth of time the container may use.

    Args:
        root: Where cgroups are mounted; ``cpu.max`` there is version 2's
            (https://docs.kernel.org/admin-guide/cgroup-v2.html#cpu-interface-files).

    Returns:
        Cores, such as 1.5; infinity without a limit.
    """
    try:
        quota, period = (root / "cpu.max").read_text().split()
        return float("inf") if quota == "max" else int(quota) / int(period)
    except (OSError, ValueError, ZeroDivisionError):
        return float("inf")


def count_cores(masks: Sequence[Collection[int]], quota: float) -> int:
    """Count the cores that the ranks of one node may use together, at least 1.

    >>> count_cores([{0, 1}, {1, 2}], float("inf")), count_cores([range(64)], 8.0)
    (3, 8)
    """
    return max(1, int(min(len(set().union(*masks)), quota)))


def settle(fair: int, variables: MutableMapping[str, str]) -> int:
    """Settle this rank's threads: ``OMP_NUM_THREADS`` where it is set, else its share.

    Args:
        fair: This rank's share of the cores.
        variables: The environment; ``OMP_NUM_THREADS`` is set there if it is not.

    Returns:
        The number of threads.

    Raises:
        UsageError: ``OMP_NUM_THREADS`` is no number of threads.

    >>> settle(4, {}), settle(4, {"OMP_NUM_THREADS": "2"})
    (4, 2)
    """
    wanted = variables.setdefault("OMP_NUM_THREADS", str(fair))
    first = wanted.split(",")[0].strip()  # a list is for nested regions
    if not first.isdecimal() or int(first) < 1:
        raise UsageError(
            f"OMP_NUM_THREADS={wanted!r} in the environment; expected a number of "
            "threads of at least 1, or `unset OMP_NUM_THREADS` for a fair share"
        )
    return int(first)


def share(
    masks: Sequence[Collection[int]], quota: float = float("inf")
) -> tuple[int, ...]:
    """Divide the cores of one node among its ranks.

    Args:
        masks: The cores that each rank may use, by local rank.
        quota: Cores' worth of time that all of them may use together.

    Returns:
        Threads per rank, at least 1: a core that n ranks may use counts 1/n for each.

    >>> share([{0, 1, 2, 3}, {0, 1, 2, 3}])
    (2, 2)
    >>> share([{0}, {1}]), share([{0, 1}] * 8), share([{0, 1, 2, 3}] * 2, quota=2.0)
    ((1, 1), (1, 1, 1, 1, 1, 1, 1, 1), (1, 1))
    """
    owners: dict[int, int] = {}
    for mask in masks:
        for core in mask:
            owners[core] = owners.get(core, 0) + 1
    most = quota / len(masks)
    # The sum of thirds is just below one: round before cutting.
    parts = (round(sum(1 / owners[core] for core in mask), 6) for mask in masks)
    return tuple(max(1, int(min(part, most))) for part in parts)
