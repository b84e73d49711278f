"""What is to be said: a finding, and those of the trials.

Each finding has a name, under which docs/check.md has more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal

from mpitrain.mpi.world import Node, format_ranges
from mpitrain.tools.check.pairs import Failure

if TYPE_CHECKING:
    from mpitrain.tools.check.collectives import Result

Severity = Literal["error", "warning", "note"]

_FAILURES_NAMED = 8


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One thing to be known, and what to do about it."""

    severity: Severity
    """Only errors count for the exit status."""
    name: str
    """Under which the documentation has more."""
    found: str
    """What was found and where; one line."""
    remedy: str
    """What to type or to change; one line."""


def by_severity(found: Sequence[Finding]) -> list[Finding]:
    """Put errors first, then warnings, then notes; each in their order."""
    order = ("error", "warning", "note")
    return sorted(found, key=lambda finding: order.index(finding.severity))


def of_pairs(failures: Sequence[Failure], nodes: Sequence[Node]) -> list[Finding]:
    """Name the nodes that do not reach each other.

    Args:
        failures: Who does not reach whom.
        nodes: All nodes, by node rank.

    Returns:
        An error for each, the first few where there are many.
    """
    found = [
        Finding(
            severity="error",
            name="unreachable",
            found=f"{nodes[failure.source].hostname} does not reach "
            f"{nodes[failure.target].hostname}: {failure.why}",
            remedy="every node must reach every other: look for a firewall, name "
            "another network (--interface), or leave one out",
        )
        for failure in failures[:_FAILURES_NAMED]
    ]
    more = len(failures) - len(found)
    if more > 0:
        found[-1] = replace(found[-1], found=f"{found[-1].found}; and {more} more")
    return found


def of_exchange(num_wrong: int) -> list[Finding]:
    """Say that values changed on their way between nodes."""
    if num_wrong == 0:
        return []
    return [
        Finding(
            severity="error",
            name="wrong-exchange",
            found=f"{num_wrong} nodes received other values than were sent to them",
            remedy="the network or a driver is broken: leave one node after another "
            "out until this goes",
        )
    ]


def of_collectives(
    by_rank: Sequence[Sequence[Result]], nodes: Sequence[Node]
) -> list[Finding]:
    """Name the kinds that gave something wrong, and where.

    Args:
        by_rank: What each rank found, but for what was right there.
        nodes: All nodes.

    Returns:
        An error for each kind and device; a note for all that a backend lacks.
    """
    hosts = {rank: node.hostname for node in nodes for rank in node.ranks}
    bad: dict[tuple[str, str], dict[int, Result]] = {}
    lacking: dict[tuple[str, str], list[int]] = {}
    for rank, results in enumerate(by_rank):
        for result in results:
            key = (result.kind, result.device)
            if result.outcome == "lacking":
                lacking.setdefault(key, []).append(rank)
            else:
                bad.setdefault(key, {})[rank] = result
    found = []
    for (kind, device), ranks in bad.items():
        first = min(ranks)
        where = f"rank {first} {hosts[first]}"
        if len(ranks) > 1:
            where = f"ranks {format_ranges(sorted(ranks))}, first {where}"
        is_wrong = ranks[first].outcome == "wrong"
        found.append(
            Finding(
                severity="error",
                name="wrong-collective" if is_wrong else "failed-collective",
                found=f"{kind} on {device} {'is wrong' if is_wrong else 'failed'} on "
                f"{where}: {ranks[first].detail}",
                remedy="do not train on this: try without one node after another, "
                "another network (--interface), another torch",
            )
        )
    some = [key for key, ranks in lacking.items() if len(ranks) < len(by_rank)]
    found += [
        Finding(
            severity="error",
            name="failed-collective",
            found=f"{kind} on {device} is lacking on ranks "
            f"{format_ranges(lacking[kind, device])} alone",
            remedy="use one version of torch on all nodes",
        )
        for kind, device in some
    ]
    everywhere = [
        f"{kind} on {device}" for kind, device in lacking if (kind, device) not in some
    ]
    if everywhere:
        found.append(
            Finding(
                severity="note",
                name="lacking-collective",
                found=f"the backend has no {', '.join(everywhere)}",
                remedy="nothing, if your training does not call them",
            )
        )
    return found


def of_gradients(
    differences: Mapping[str, Sequence[float]],
    tolerances: Mapping[str, float],
    nodes: Sequence[Node],
) -> list[Finding]:
    """Name the rank whose gradients are not those of one process.

    Args:
        differences: The largest difference of each rank's, by strategy.
        tolerances: What is no fault, by strategy.
        nodes: All nodes.

    Returns:
        An error for each strategy that is wrong.
    """
    hosts = {rank: node.hostname for node in nodes for rank in node.ranks}
    entries = []
    for strategy, by_rank in differences.items():
        most = tolerances[strategy]
        far = [rank for rank, value in enumerate(by_rank) if not value <= most]
        if not far:
            continue
        worst = max(far, key=by_rank.__getitem__)
        entries.append(
            Finding(
                severity="error",
                name="wrong-gradients",
                found=f"{strategy.upper()}'s gradients differ from those of one "
                f"process by {by_rank[worst]:.1e} on rank {worst} {hosts[worst]} "
                f"(ranks {format_ranges(far)}), expected {most:.0e} at most",
                remedy="do not train on this: see what the collectives gave above, and "
                "try without one node after another, or another torch",
            )
        )
    return entries
