"""Which cores a rank may run on, and which it is given where mpirun gave it too few."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path

from mpitrain.world import in_runs


def usable_cores() -> frozenset[int]:
    """Return the cores that this process may run on: its affinity mask."""
    return frozenset(os.sched_getaffinity(0))


@functools.cache  # the same few lists come from all ranks
def parse_cores(text: str) -> frozenset[int]:
    """Read a list of cores as the kernel writes it.

    Raises:
        ValueError: It is no such list.

    >>> sorted(parse_cores("0-2,8")), sorted(parse_cores(""))
    ([0, 1, 2, 8], [])
    """
    found: set[int] = set()
    for part in filter(None, text.strip().split(",")):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def is_one_core(
    mask: Collection[int], root: Path = Path("/sys/devices/system/cpu")
) -> bool:
    """Tell whether an affinity mask is one physical core, with its hardware threads.

    Args:
        mask: Numbers of logical cores.
        root: Where the kernel shows them
            (https://docs.kernel.org/admin-guide/cputopology.html).
    """
    file = root / f"cpu{min(mask)}" / "topology" / "thread_siblings_list"
    try:
        return set(mask) <= parse_cores(file.read_text())
    except (OSError, ValueError):
        return len(mask) == 1


def list_cores(cores: Collection[int]) -> str:
    """Write cores as the kernel does: a hundred of them take a few bytes.

    >>> list_cores({0, 1, 2, 8})
    '0-2,8'
    """
    return in_runs(sorted(cores))


@dataclass(frozen=True, kw_only=True)
class Binding:
    """How one rank is bound to cores."""

    cores: frozenset[int]
    """Its affinity mask."""
    given: frozenset[int]
    """The cores of mpirun, or its daemon, on this host; empty: unknown."""
    one_core: bool
    """Whether the mask is one physical core."""
    asked: bool | None
    """Whether somebody asked for it; ``None``: unknown here."""


@dataclass(frozen=True, kw_only=True)
class Widening:
    """What becomes of the ranks of one node that are bound to one core each."""

    cores: frozenset[int] = frozenset()
    """The cores they get instead; empty: they stay as they are."""
    idle: int = 0
    """Cores of the job on this node that no rank may use, where they stay."""


def widen(on_node: Sequence[Binding], *, asked: bool | None) -> Widening:
    """Decide whether a node's ranks shall leave the core that mpirun bound each to.

    By default Open MPI binds each of up to two ranks to one core, where threads and
    data workers then stand in line. That is undone, as ``--bind-to none`` would; a
    binding that was asked for stays, and so does one to a package or a NUMA domain.

    Args:
        on_node: The ranks of one node.
        asked: Whether any rank of the job knows that the binding was asked for;
            ``None``: nobody knows.

    Returns:
        The decision, equal on all ranks of the node.

    >>> bound = [
    ...     Binding(cores=frozenset({i}), given=frozenset(range(8)), one_core=True,
    ...             asked=False)
    ...     for i in range(2)
    ... ]
    >>> sorted(widen(bound, asked=False).cores)
    [0, 1, 2, 3, 4, 5, 6, 7]
    >>> widen(bound, asked=True)
    Widening(cores=frozenset(), idle=6)
    """
    used = frozenset[int]().union(*(rank.cores for rank in on_node))
    given = frozenset[int]().union(*(rank.given for rank in on_node))
    if not all(rank.one_core for rank in on_node) or not used < given:
        return Widening()
    if asked is False:
        return Widening(cores=given)
    return Widening(idle=len(given - used))


def whether_asked(bindings: Sequence[Binding]) -> bool | None:
    """Sum up what the ranks of a job know: one that saw mpirun knows for all.

    Returns:
        ``True``: somebody asked for the binding; ``False``: mpirun was seen, and nobody
        did; ``None``: no rank can see it.
    """
    known = [rank.asked for rank in bindings if rank.asked is not None]
    return any(known) if known else None


def run_on(cores: Collection[int]) -> bool:
    """Let all threads of this process, and those to come, run on some cores.

    Returns:
        Whether they may; the kernel refuses cores that the job was not given.
    """
    try:
        os.sched_setaffinity(0, cores)
    except OSError:
        return False
    for thread in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended meanwhile
            os.sched_setaffinity(int(thread.name), cores)
    return True
