"""Which of rank zero's addresses is taken: pure functions over what nodes found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mpitrain.errors import LaunchError, agreed
from mpitrain.launch.interfaces import KINDS, Interface
from mpitrain.world import list_hosts

UNKNOWN = Interface(name="", kind="virtual")
"""What stands for an interface that could not be found."""


@dataclass(frozen=True, kw_only=True)
class Offer:
    """An address of rank zero's host at which it listens."""

    address: str
    """Numeric, IPv4 or IPv6."""
    port: int
    """Bound on that address alone."""
    interface: Interface
    """The interface that has it."""
    is_named: bool = False
    """Whether the host's own name resolves to it: meant for jobs."""

    def __str__(self) -> str:
        return f"{self.address} ({self.interface})"


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """What came of one node's connection to one offer."""

    source: str = ""
    """The node's own address that it came from; empty if it failed."""
    interface: Interface | None = None
    """The interface with that address."""
    failure: str = ""
    """Why it failed, such as ``"refused"``; empty if it did not."""


@dataclass(frozen=True, kw_only=True)
class NodeReport:
    """What one node found."""

    attempts: tuple[Attempt, ...] = ()
    """One for each offer."""
    other_interfaces: tuple[str, ...] | None = None
    """The interfaces it has, where it lacks the one that was asked for."""


def check_interface(name: str, reports: Mapping[str, NodeReport]) -> None:
    """Check that every node has the interface that was asked for.

    Args:
        name: The interface.
        reports: What each node found, by host name; equal on all ranks.

    Raises:
        LaunchError: Some do not, with the ones that they have.
    """
    lacking: dict[str, list[str]] = {}
    for host, report in reports.items():
        if report.other_interfaces is not None:
            has = ", ".join(sorted(report.other_interfaces)) or "none"
            lacking.setdefault(has, []).append(host)
    if lacking:
        raise agreed(
            LaunchError(
                f"no interface {name!r} that is up and has an address on\n"
                + "\n".join(
                    f"  {list_hosts(hosts)}, where there is {has}"
                    for has, hosts in lacking.items()
                )
                + "\nExpected one that every node has: --interface NAME. Without the "
                "flag the best one that works is taken."
            )
        )


def choose(
    host: str, offers: Sequence[Offer], attempts: Mapping[str, Sequence[Attempt]]
) -> int:
    """Choose the best offer that every other node reached.

    A connection is of the class and the speed of its slower end. The best class wins;
    then the higher speed; then an address that the host's own name resolves to; then
    IPv4; then the order of the system.

    Args:
        host: Rank zero's host, for the message.
        offers: Where it listens.
        attempts: What each of the other nodes found for each offer, by host name.

    Returns:
        The index of the chosen offer.

    Raises:
        LaunchError: There is none.
    """

    def rank(index: int) -> tuple[int, int, bool, bool, int]:
        offer = offers[index]
        ends = [offer.interface]
        ends += [tried[index].interface or UNKNOWN for tried in attempts.values()]
        return (
            max(KINDS.index(end.kind) for end in ends),
            -min(end.speed_mbps for end in ends),
            not offer.is_named,
            ":" in offer.address,
            index,
        )

    usable = [
        index
        for index in range(len(offers))
        if not any(tried[index].failure for tried in attempts.values())
    ]
    if usable:
        return min(usable, key=rank)
    raise agreed(
        LaunchError(
            f"no address of rank zero's host {host} is reached by all other nodes.\n"
            + ("\n".join(_rows(offers, attempts)) or "  It has none that is up.")
            + "\nExpected one network that joins all nodes. Look for a firewall, or "
            "leave those hosts out of the job."
        )
    )


def _rows(
    offers: Sequence[Offer], attempts: Mapping[str, Sequence[Attempt]]
) -> list[str]:
    """Word who reached what, one line for each offer."""
    rows = []
    for index, offer in enumerate(offers):
        found: dict[str, list[str]] = {}
        for host, tried in attempts.items():
            found.setdefault(tried[index].failure or "reached", []).append(host)
        words = [
            f"{result}: {list_hosts(hosts)}" for result, hosts in sorted(found.items())
        ]
        rows.append(f"  {offer}: " + "; ".join(words))
    return rows
