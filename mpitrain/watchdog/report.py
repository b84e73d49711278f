"""The texts of the watchdog: which ranks did not arrive, and where all ranks are."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from mpitrain.mpi.world import format_ranges, list_hosts
from mpitrain.watchdog.heartbeat import Position, State

SILENT_BEATS = 5  # a sidecar is cut off when so many of its reports are missing
_STANDARD_LIBRARY = str(Path(os.__file__).parent)
_BACKEND = "mpitrain/backend/"

# A rank whose stack ends in one of these files waits for others.
WAITING_FILES = (
    *("torch/distributed/", "torch/nn/parallel/distributed.py", "mpi4py/"),
    "torch/autograd/graph.py",  # backward, in which DDP waits for its reductions
    *("mpitrain/mpi/", _BACKEND),
)


class Frame(NamedTuple):
    """One call of a Python stack."""

    file: str
    line: int
    function: str

    def __str__(self) -> str:
        short = "/".join(self.file.rsplit("/", 2)[-2:])
        return f"{short}:{self.line} in {self.function}"


@dataclass(kw_only=True)
class RankStatus:
    """What the coordinator knows of one rank; times are of its clock."""

    rank: int
    hostname: str
    position: Position
    heard_at: float  # when its sidecar last reported
    stack: str | None = None  # what faulthandler wrote when asked; ``""``: nothing
    process_state: str = ""  # a letter as in proc(5)
    beat_seconds: float = 1.0  # how often its sidecar reports

    def is_silent(self, now: float) -> bool:
        """Return whether its sidecar has not reported for too long."""
        return now - self.heard_at > SILENT_BEATS * self.beat_seconds

    @property
    def progressed_at(self) -> float:
        """When the rank last made progress."""
        return self.heard_at - self.position.age_seconds

    @property
    def frames(self) -> list[Frame]:
        """See `main_stack`."""
        return main_stack(self.stack or "")


def main_stack(text: str) -> list[Frame]:
    """Read the main thread's calls, the innermost first, from faulthandler's output.

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


def is_waiting(frames: Sequence[Frame]) -> bool:
    """Return whether a rank with this stack waits for others."""
    return any(part in frame.file for frame in frames[:3] for part in WAITING_FILES)


def describe_position(status: RankStatus, now: float) -> str:
    """Describe where a rank is: phase, step, and the call it is in."""
    position = status.position
    if position.state is State.LEFT:
        return f"left with status 0 (last at: {position.phase})"
    if position.state is State.IDLE:
        return "asleep until others have done their part"
    if status.is_silent(now):
        # Its last position is older than the silence, and need not hold any more.
        return f"no word from that host for {now - status.heard_at:.0f} s"
    parts = [position.phase]
    if position.step >= 0:
        parts.append(f"{position.step} steps done")
    if status.process_state in ("T", "t"):
        parts.append("stopped by a signal (SIGSTOP)")
    elif status.process_state == "Z":
        parts.append("dead")
    elif frames := status.frames:
        parts.append(describe_call(frames))
    elif status.stack is not None:
        why = " (in the kernel, waits for a device)" * (status.process_state == "D")
        parts.append(f"gives no stack{why}")
    return ", ".join(parts)


def describe_call(frames: Sequence[Frame]) -> str:
    """Name the line of the user's code, and the library call below it."""
    # The backend's calls below torch's mean nothing to a user.
    inner = next((f for f in frames if _BACKEND not in f.file), frames[0])
    user = next((f for f in frames if _is_user_code(f)), inner)
    return str(user) if user == inner else f"{user}, in {inner.function}"


def _is_user_code(frame: Frame) -> bool:
    return not frame.file.startswith((_STANDARD_LIBRARY, "<")) and (
        "/site-packages/" not in frame.file and "/mpitrain/" not in frame.file
    )


def missing_ranks(statuses: Sequence[RankStatus], now: float) -> list[int]:
    """Return the ranks that the others wait for; empty: each waits for some other."""
    # Nobody waits for ranks that sleep while others work.
    statuses = [s for s in statuses if s.position.state is not State.IDLE]
    stopped = {"T", "t", "Z"}
    away = [s.rank for s in statuses if s.is_silent(now) or s.process_state in stopped]
    left = [s.rank for s in statuses if s.position.state is State.LEFT]
    rest = [s for s in statuses if s.rank not in {*away, *left}]
    busy = [s.rank for s in rest if not is_waiting(s.frames)]
    if len(busy) < len(rest) or left:  # some wait, and for these
        away += busy
    if not away and left:
        away = left  # all others wait, and for these
    if away or len(statuses) == 1:
        return sorted(away or busy)
    first = min((s.position.step for s in statuses), default=-1)
    behind = [s.rank for s in statuses if s.position.step == first]
    return sorted(behind) if len(behind) < len(statuses) else []


def position_lines(
    statuses: Sequence[RankStatus], ranks: Collection[int], now: float
) -> list[str]:
    """Describe where some ranks are, a line for all at the same place."""
    heard: dict[str, float] = {}  # the last report of each host that is silent
    for status in statuses:
        if status.is_silent(now):
            last = heard.get(status.hostname, status.heard_at)
            heard[status.hostname] = max(last, status.heard_at)
    by_place: dict[str, list[RankStatus]] = {}
    for status in statuses:
        if status.is_silent(now):
            status = replace(status, heard_at=heard[status.hostname])
        if status.rank in ranks:
            by_place.setdefault(describe_position(status, now), []).append(status)
    return [f"  {_name(found)}: {place}" for place, found in by_place.items()]


def _name(statuses: Sequence[RankStatus]) -> str:
    """Return such as ``"rank 2 gpu03"`` or ``"ranks 0-2,4 gpu01, gpu02"``."""
    ranks = format_ranges([status.rank for status in statuses])
    hosts = list_hosts(status.hostname for status in statuses)
    return f"rank{'s' * (len(statuses) > 1)} {ranks} {hosts}"


def hang_report(
    statuses: Sequence[RankStatus], world_size: int, now: float, logs: str | None
) -> str:
    """Describe a hang: the ranks that did not arrive first, then those that wait.

    Without a folder of `logs` the text has the stacks of the first missing rank.
    """
    quiet = min(now - status.progressed_at for status in statuses)
    unknown = sorted(set(range(world_size)) - {status.rank for status in statuses})
    missing = missing_ranks(statuses, now)
    first = next((s for s in statuses if s.rank in missing), statuses[0])
    lines = [
        f"[rank {first.rank}/{world_size} {first.hostname}] hang: no rank has made "
        f"progress for {quiet:.0f} s"
    ]
    if unknown:
        which = f"rank{'s' * (len(unknown) > 1)} {format_ranges(unknown)}"
        lines.append(f"never connected: {which}")
    others = [s.rank for s in statuses if s.rank not in missing]
    if missing:
        lines += ["did not arrive:", *position_lines(statuses, missing, now)]
        if others:
            lines += ["waiting for them:", *position_lines(statuses, others, now)]
    else:
        has_waiting = any(is_waiting(status.frames) for status in statuses)
        lines += [
            "every rank waits for another: look for a collective that not all call"
            if has_waiting
            else "no rank waits for another; all run their own code",
            *position_lines(statuses, others, now),
        ]
    if logs:
        lines.append(f"The stacks of all ranks are in {logs}")
    elif first.stack:
        lines.append(f"The stacks of rank {first.rank}:\n{first.stack.rstrip()}")
    return "\n".join(lines)
