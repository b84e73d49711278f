"""The coordinator: rank zero's sidecar sees all ranks, and decides.

It has no clock and no socket of its own: it is given messages and times, and returns
what to send and what to print. So it is tested without processes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mpitrain.watchdog.heartbeat import Position, State, beat_seconds
from mpitrain.watchdog.report import (
    RankStatus,
    hang_report,
    missing_ranks,
    position_lines,
)

HANG_STATUS = 76  # the job's exit status when it hung
STACKS_SECONDS = 2.0  # how long the sidecars may take to send stacks
GATHER_SECONDS = 0.1  # for what comes at once: a death, and a report of why
# How long a rank may take to record a death. It is printed when it has: the print wakes
# MPICH's launcher, which sees the death and kills the others within a millisecond.
RECORD_SECONDS = 0.5
SUSPENDED_SECONDS = 5.0  # longer between two calls: the job was suspended
SHOW_SECONDS = 1.2  # how long to gather positions that a user asked for
NOTICE_SECONDS = 2.0  # how long a launcher may take to notice that a rank is gone
ABORT_SECONDS = 7.0  # how long a rank that reported why the job ends may take to end it

KILLED = "died without an error message (killed by a signal, or os._exit); it was at: "

_DEATHS = {
    "terminated": "ended by SIGTERM, as a rule the launcher's or scheduler's",
    "orphaned": "the launcher is gone, and so this rank ends",
}


@dataclass(frozen=True)
class Actions:
    """Texts to print, and commands for every sidecar, the coordinator's included."""

    messages: list[str] = field(default_factory=list)
    commands: list[dict[str, Any]] = field(default_factory=list)

    def add(self, command: str, **arguments: object) -> None:
        """Add a command."""
        self.commands.append({"command": command, **arguments})


class Coordinator:
    """What is known of all ranks, and what follows from it.

    `now` is in seconds of any clock that never goes back, in all methods.
    """

    def __init__(self, world_size: int, now: float) -> None:
        self._world_size = world_size
        self._began = now
        self._decided_at = now
        self._awake_since = now  # the last time that the job was not suspended
        self._statuses: dict[int, RankStatus] = {}
        self._stacks_asked_at: float | None = None  # because of a hang
        self._shown_at: float | None = None  # a user wants to see all positions
        self._gone: list[tuple[int, str]] = []  # ranks that ended without a report
        self._gone_at = 0.0
        self._gone_text = ""
        self._is_gone_printed = False
        self._is_recorded = False  # by the rank that was asked to
        self._failing_at: float | None = None
        self._is_ended = False
        self.logs: str | None = None  # the folder of the ranks' logs
        # After so long without a word of a host the job ends; 0: after the hang limit.
        self.lost_host_seconds = 0.0

    @property
    def is_settled(self) -> bool:
        """Whether the coordinator has nothing left to print."""
        return self._is_ended or self._is_gone_printed or self._failing_at is not None

    @property
    def is_gathering(self) -> bool:
        """Whether it will have something to print within moments."""
        return bool(self._gone) and not self.is_settled

    def receive(self, rank: int, message: Mapping[str, Any], now: float) -> None:
        """Process a message from a rank's sidecar."""
        fields = {name: message[name] for name in Position._fields}
        position = Position(**fields | {"state": State(message["state"])})
        status = RankStatus(
            rank=rank,
            hostname=message["hostname"],
            position=position,
            heard_at=now,
            process_state=message.get("process_state", ""),
            stack=message.get("stack"),
            beat_seconds=beat_seconds(self._world_size),
        )
        before = self._statuses.get(rank)
        if before is not None and status.stack is None:
            status.stack = before.stack
        self._statuses[rank] = status
        if position.state is State.FAILING and self._failing_at is None:
            self._failing_at = now
        if message.get("show") and self._stacks_asked_at is None:
            self._shown_at = now if self._shown_at is None else self._shown_at
        self._is_recorded |= "recorded" in message
        if "gone" in message and position.state is not State.DONE:
            if not self._gone:
                self._gone_at = now
            self._gone.append((rank, str(message["gone"])))

    def decide(self, now: float) -> Actions:
        """Return what to do now; to be called several times a second."""
        actions = Actions()
        if self._is_ended:
            return actions
        if self._is_suspended(now):
            self._awake_since = now
        self._decided_at = now
        # First what a rank reports itself, then deaths, then silence: each of these
        # follows from the one before.
        if self._failing_at is not None:
            if now - self._failing_at > ABORT_SECONDS:
                self._abort(actions, 1)  # the reason is printed; mpirun lingers
        elif self._gone:
            self._handle_gone(actions, now - self._gone_at)
        elif self._stacks_asked_at is not None:
            self._await_stacks(actions, now, self._stacks_asked_at)
        elif (lost := self._lost_host(now)) is not None:
            limit = f"{self.lost_host_seconds:.0f} s"
            text = f"{self._label(lost)} its host is lost: no word from it for {limit}"
            self._abort(actions, HANG_STATUS, text)
        elif self._is_hung(now):
            self._stacks_asked_at = now
            self._forget_stacks()
            actions.add("dump_stacks")
        if self._shown_at is not None and now - self._shown_at > SHOW_SECONDS:
            self._shown_at = None
            lines = position_lines(self._sorted(), range(self._world_size), now)
            actions.messages.append("\n".join(["where the ranks are:", *lines]))
            self._forget_stacks()
        return actions

    def _handle_gone(self, actions: Actions, seconds: float) -> None:
        if seconds > GATHER_SECONDS and not self._gone_text:
            self._gone_text = self._describe_gone()
            gone = {rank for rank, _ in self._gone}
            reporting = min(self._statuses.keys() - gone, default=0)
            actions.add("record", text=self._gone_text, reporting_rank=reporting)
        is_due = self._is_recorded or seconds > GATHER_SECONDS + RECORD_SECONDS
        if self._gone_text and is_due and not self._is_gone_printed:
            self._is_gone_printed = True
            actions.messages.append(self._gone_text)
            actions.add("recorded")
        if seconds > NOTICE_SECONDS:
            self._abort(actions, 1)

    def _await_stacks(self, actions: Actions, now: float, asked_at: float) -> None:
        if not self._is_hung(now):
            self._stacks_asked_at = None  # it went on after all
            return
        is_due = now - asked_at > STACKS_SECONDS
        if is_due or all(s.stack is not None for s in self._statuses.values()):
            statuses = self._sorted()
            text = hang_report(statuses, self._world_size, now, self.logs)
            missing = missing_ranks(statuses, now)
            # A rank that waits for others can run, and so record the text.
            reporting = next((s.rank for s in statuses if s.rank not in missing), 0)
            self._abort(actions, HANG_STATUS, text, reporting)

    def _abort(
        self, actions: Actions, status: int, text: str = "", reporting_rank: int = 0
    ) -> None:
        self._is_ended = True
        if text:
            actions.messages.append(text)
        actions.add("abort", status=status, text=text, reporting_rank=reporting_rank)

    def _is_hung(self, now: float) -> bool:
        """Return whether no rank at work has made progress within its limit.

        Ranks train together, so that one that stands still soon stops all; as long as
        one still makes progress, nobody hangs.
        """
        at_work = self._at_work()
        if len(self._statuses) < self._world_size:
            # Some sidecar has not connected. Its rank may be anywhere in the start.
            limit = max((s.position.limit_seconds for s in at_work), default=0.0)
            if not limit or now - max(self._began, self._awake_since) <= limit:
                return False
        # The last position of a rank whose host is cut off is old: use others' limits.
        limits = [s.position.limit_seconds for s in at_work if not s.is_silent(now)]
        limits = limits or [s.position.limit_seconds for s in at_work]
        if not limits or min(limits) <= 0.0:
            return False
        return all(
            (max(limits) if s.is_silent(now) else s.position.limit_seconds)
            < now - max(s.progressed_at, self._awake_since)
            for s in at_work
        )

    def _is_suspended(self, now: float) -> bool:
        """Return whether the whole job is stopped: Ctrl-Z, or SLURM's suspend.

        A scheduler stops the sidecars, too, and then much time passes between two
        calls; Ctrl-Z at mpirun stops all ranks, and all may be one. A stop of some is a
        hang: ranks that wait for it, or are idle, run. Those that end may be gone.
        """
        ending = (State.DONE, State.FAILING)
        here = [s for s in self._statuses.values() if s.position.state not in ending]
        return now - self._decided_at > SUSPENDED_SECONDS or (
            bool(here) and all(s.process_state in ("T", "t") for s in here)
        )

    def _at_work(self) -> list[RankStatus]:
        return [s for s in self._statuses.values() if s.position.state is State.RUNNING]

    def _describe_gone(self) -> str:
        """Name the first rank that was gone before the launcher ended others."""
        first = [entry for entry in self._gone if entry[1] != "terminated"]
        rank, cause = first[0] if first else self._gone[0]
        status = self._statuses[rank]
        position = status.position
        steps = f", {position.step} steps done" if position.step >= 0 else ""
        death = f"{_DEATHS.get(cause, cause)}; it was at: "
        death = KILLED if cause == "killed" else death
        return f"{self._label(status)} {death}{position.phase}{steps}"

    def _label(self, status: RankStatus) -> str:
        return f"[rank {status.rank}/{self._world_size} {status.hostname}]"

    def _lost_host(self, now: float) -> RankStatus | None:
        """Return a rank of a host that is silent while the others stand still."""
        late = now - self.lost_host_seconds
        if not self.lost_host_seconds or self._awake_since > late:
            return None
        at_work = self._at_work()
        heard = {s.hostname for s in at_work if s.heard_at > late}
        moved = any(s.progressed_at > late for s in at_work)
        silent = [s for s in at_work if s.hostname not in heard]
        return silent[0] if silent and heard and not moved else None

    def _forget_stacks(self) -> None:
        for status in self._statuses.values():
            status.stack = None

    def _sorted(self) -> list[RankStatus]:
        return [self._statuses[rank] for rank in sorted(self._statuses)]
