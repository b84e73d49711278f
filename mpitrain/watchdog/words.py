"""Who did not arrive, and where: what the screen says of a hang. Pure functions."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mpitrain.watchdog.page import Position, State
from mpitrain.world import in_runs, list_hosts

SILENT_SECONDS = 5.0
"""A sidecar speaks every second: one that is silent for so long is cut off."""

LIBRARY = str(Path(os.__file__).parent)

OUR_BACKEND = "mpitrain/mpi_backend/"

WAITS = (
    "torch/distributed/",
    "torch/autograd/graph.py",  # backward, in which DDP waits for its reductions
    "torch/nn/parallel/distributed.py",
    OUR_BACKEND,
    "mpitrain/topology.py",
    "mpi4py/",
)
"""Where a rank that waits for others is found: parts of files' names."""


@dataclass(frozen=True)
class Frame:
    """One call of a Python stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        short = "/".join(self.file.rsplit("/", 2)[-2:])
        return f"{short}:{self.line} in {self.function}"


@dataclass(kw_only=True)
class RankReport:
    """What the center knows of one rank."""

    rank: int
    hostname: str
    position: Position
    heard_at: float
    """When its sidecar last spoke, seconds of the center's clock."""
    progressed_at: float
    """When the rank last made progress, seconds of the center's clock."""
    stack: str | None = None
    """What faulthandler wrote when asked; ``""``: nothing."""
    kernel: str = ""
    """The process's state, a letter as in proc(5)."""

    def is_silent(self, now: float) -> bool:
        """Whether nothing was heard of it for too long."""
        return now - self.heard_at > SILENT_SECONDS


def main_stack(text: str) -> list[Frame]:
    """Read the main thread's calls from what faulthandler wrote, the latest first.

    >>> text = '''Current thread 0x01 (most recent call first):
    ...   File "/a/b/c.py", line 3 in f
    ...   File "/a/b/d.py", line 9 in <module>
    ... '''
    >>> [str(frame) for frame in main_stack(text)]
    ['b/c.py:3 in f', 'b/d.py:9 in <module>']
    """
    last = text.split("(most recent call first):")[-1]
    found = re.findall(r'^  File "(.*)", line (\d+) in (.*)$', last, flags=re.M)
    return [Frame(file, int(line), function) for file, line, function in found]


def waits(frames: Sequence[Frame]) -> bool:
    """Whether a rank with this stack waits for others."""
    return any(place in frame.file for frame in frames[:3] for place in WAITS)


def in_words(report: RankReport, now: float) -> str:
    """Say where a rank is, shortly: phase, step, and the call it is in."""
    position = report.position
    if position.state is State.LEFT:
        return f"left with status 0 (last at: {position.phase})"
    if position.state is State.ASIDE:
        return "asleep until others have done their part"
    if report.is_silent(now):
        # What it said last is a second older than the silence, and need not be so.
        return f"no word from that host for {now - report.heard_at:.0f} s"
    parts = [position.phase]
    if position.step >= 0:
        parts.append(f"{position.step} steps done")
    if report.kernel in ("T", "t"):
        parts.append("stopped by a signal (SIGSTOP)")
    elif report.kernel == "Z":
        parts.append("dead")
    else:
        frames = main_stack(report.stack or "")
        parts += [call_in_words(frames)] if frames else []
        if not frames and report.stack is not None:
            kernel = " (in the kernel, waits for a device)" * (report.kernel == "D")
            parts.append("gives no stack" + kernel)
    return ", ".join(parts)


def call_in_words(frames: Sequence[Frame]) -> str:
    """Name the line of the user's own code, and the call below it where it waits."""
    # Below torch's call our backend's own tell nothing to a user.
    inner = next((f for f in frames if OUR_BACKEND not in f.file), frames[0])
    own = next((f for f in frames if is_own(f)), inner)
    return str(own) if own == inner else f"{own}, in {inner.function}"


def is_own(frame: Frame) -> bool:
    """Whether a call is of neither Python's own library nor an installed package."""
    return not frame.file.startswith((LIBRARY, "<")) and (
        "/site-packages/" not in frame.file and "/mpitrain/" not in frame.file
    )


def missing(reports: Sequence[RankReport], now: float) -> list[int]:
    """Find the ranks that the others wait for.

    Args:
        reports: Of all ranks, with their stacks.
        now: Seconds of the center's clock.

    Returns:
        Their ranks, ascending; empty where each waits for some other.
    """
    # Nobody waits for those that sleep while others work.
    reports = [r for r in reports if r.position.state is not State.ASIDE]
    away = [r.rank for r in reports if r.is_silent(now) or r.kernel in set("TtZ")]
    left = [r.rank for r in reports if r.position.state is State.LEFT]
    rest = [r for r in reports if r.rank not in {*away, *left}]
    busy = [r.rank for r in rest if not waits(main_stack(r.stack or ""))]
    if len(busy) < len(rest) or left:  # some wait, and for these
        away += busy
    if not away and left:
        away = left  # all others wait, and for these
    if away or len(reports) == 1:
        return sorted(away or busy)
    first = min((r.position.step for r in reports), default=-1)
    behind = [r.rank for r in reports if r.position.step == first]
    return sorted(behind) if len(behind) < len(reports) else []


def table(
    reports: Sequence[RankReport], ranks: Collection[int], now: float
) -> list[str]:
    """Say where some ranks are, those at the same place in one line."""
    places: dict[str, list[RankReport]] = {}
    heard: dict[str, float] = {}  # the last word of each host that is silent
    for report in reports:
        if report.is_silent(now):
            last = heard.get(report.hostname, report.heard_at)
            heard[report.hostname] = max(last, report.heard_at)
    for report in reports:
        if report.is_silent(now):
            report = replace(report, heard_at=heard[report.hostname])
        if report.rank in ranks:
            places.setdefault(in_words(report, now), []).append(report)
    return [f"  {name(found)}: {where}" for where, found in places.items()]


def name(reports: Sequence[RankReport]) -> str:
    """Name ranks and their hosts, shortly.

    Args:
        reports: Of the ranks to name.

    Returns:
        Such as ``"rank 2 gpu03"`` or ``"ranks 0-2,4 gpu01, gpu02"``.
    """
    ranks = in_runs([report.rank for report in reports])
    hosts = list_hosts(report.hostname for report in reports)
    return f"rank{'s' * (len(reports) > 1)} {ranks} {hosts}"


def verdict(
    reports: Sequence[RankReport], world_size: int, now: float, logs: str | None
) -> str:
    """Word a hang: the ranks that did not arrive first, then those that wait.

    Args:
        reports: Of all ranks that were ever heard, by rank.
        world_size: Number of ranks.
        now: Seconds of the center's clock.
        logs: The folder of the ranks' logs, which hold the stacks; ``None``: the stack
            of the rank that is blamed is part of the text.

    Returns:
        Several lines; the first names a rank as every message does.
    """
    quiet = min(now - report.progressed_at for report in reports)
    unheard = sorted(set(range(world_size)) - {report.rank for report in reports})
    away = missing(reports, now)
    blamed = next((r for r in reports if r.rank in away), reports[0])
    lines = [
        f"[rank {blamed.rank}/{world_size} {blamed.hostname}] hang: no rank has made "
        f"progress for {quiet:.0f} s"
    ]
    if unheard:
        s = "s" * (len(unheard) > 1)
        lines.append(f"never heard of: rank{s} {in_runs(unheard)}")
    others = [r.rank for r in reports if r.rank not in away]
    if away:
        lines += ["did not arrive:", *table(reports, away, now)]
        if others:
            lines += ["waiting for them:", *table(reports, others, now)]
    else:
        waiting = any(waits(main_stack(r.stack or "")) for r in reports)
        lines += [
            "every rank waits for another: look for a collective that not all call"
            if waiting
            else "no rank waits for another; all are in code of their own",
            *table(reports, others, now),
        ]
    if logs:
        lines.append(f"The stacks of all ranks are in {logs}")
    elif blamed.stack:
        lines.append(f"The stacks of rank {blamed.rank}:\n{blamed.stack.rstrip()}")
    return "\n".join(lines)


def positions(reports: Sequence[RankReport], world_size: int, now: float) -> str:
    """Say where every rank is, for somebody who asked."""
    ranks = range(world_size)
    return "\n".join(["where the ranks are:", *table(reports, ranks, now)])
