"""The center: rank zero's sidecar, which sees all ranks and decides.

No clock and no socket of its own: it is told what is heard and when, and answers with
what to send and what to say; so that it is tested as it is.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mpitrain.watchdog.page import Position, State
from mpitrain.watchdog.words import RankReport, missing, positions, verdict

HANG_STATUS = 76
"""The job's exit status when it hung."""

STACKS_SECONDS = 2.0
"""How long the sidecars may take to send stacks."""

GATHER_SECONDS = 0.1
"""How long to gather what comes at once: a rank's death, and that it was told why."""

RECORD_SECONDS = 0.25
"""How long a rank may take to record it. Said after that: with what is said MPICH's
launcher wakes up, sees the death, and kills the others within a millisecond."""

SUSPENDED_SECONDS = 5.0
"""A longer time between two looks, and the whole job was suspended and goes on now."""

SHOW_SECONDS = 1.2
"""How long to gather positions that somebody asked to see."""

NOTICE_SECONDS = 2.0
"""How long a launcher may take to notice that a rank is gone."""

ABORT_SECONDS = 7.0
"""How long a rank that said why the job ends may take to end it."""


@dataclass(kw_only=True)
class Orders:
    """What the center wants done."""

    say: list[str] = field(default_factory=list)
    """For the screen."""
    to_all: list[dict[str, Any]] = field(default_factory=list)
    """For every sidecar, its own included."""


class Center:
    """What is known of all ranks, and what follows.

    Args:
        world_size: Number of ranks.
        now: Seconds of any clock that only goes forward; so everywhere here.
    """

    def __init__(self, world_size: int, now: float) -> None:
        self._world_size = world_size
        self._began = now
        self._looked_at = now
        self._awake_since = now  # the last time that the job was not suspended
        self._reports: dict[int, RankReport] = {}
        self._asked_at: float | None = None  # for stacks, because of a hang
        self._shown_at: float | None = None  # somebody wants to see where all are
        self._gone: list[tuple[int, str]] = []  # ranks that went without a word
        self._gone_at = 0.0
        self._gone_text = ""
        self._gone_told = False
        self._failing_at: float | None = None
        self._ended = False
        self.logs: str | None = None
        """The folder of the ranks' logs, where there is one."""

    @property
    def is_settled(self) -> bool:
        """Whether nothing is left for the center to say."""
        return self._ended or self._gone_told or self._failing_at is not None

    @property
    def is_gathering(self) -> bool:
        """Whether it will have something to say within moments."""
        return bool(self._gone) and not self.is_settled

    def hear(self, rank: int, message: Mapping[str, Any], now: float) -> None:
        """Take in what a sidecar says of its rank.

        Args:
            rank: Whose sidecar.
            message: What it sent; see `sidecar`.
            now: When it came.
        """
        position = Position(
            state=State(message["state"]),
            phase=str(message["phase"]),
            step=int(message["step"]),
            age_seconds=float(message["age_seconds"]),
            limit_seconds=float(message["limit_seconds"]),
        )
        report = RankReport(
            rank=rank,
            hostname=str(message["hostname"]),
            position=position,
            heard_at=now,
            progressed_at=now - position.age_seconds,
            kernel=str(message.get("kernel", "")),
            stack=message.get("stack"),
        )
        before = self._reports.get(rank)
        if before is not None and report.stack is None:
            report.stack = before.stack
        self._reports[rank] = report
        if position.state is State.FAILING and self._failing_at is None:
            self._failing_at = now
        if message.get("shown") and self._asked_at is None and self._shown_at is None:
            self._shown_at = now
        if "gone" in message and position.state is not State.DONE:
            if not self._gone:
                self._gone_at = now
            self._gone.append((rank, str(message["gone"])))

    def decide(self, now: float) -> Orders:
        """Say what is to be done now; to be called several times a second."""
        orders = Orders()
        if self._ended:
            return orders
        if self._is_suspended(now):
            self._awake_since = now
        self._looked_at = now
        if self._failing_at is not None:
            if now - self._failing_at > ABORT_SECONDS:
                self._end(orders, 1, "")  # it is told why; mpirun did not end it
        elif self._gone:
            since = now - self._gone_at
            if since > GATHER_SECONDS and not self._gone_text:
                self._record_gone(orders)
            if since > GATHER_SECONDS + RECORD_SECONDS and not self._gone_told:
                self._gone_told = True
                orders.say.append(self._gone_text)
            if since > NOTICE_SECONDS:
                self._end(orders, 1, "")
        elif self._asked_at is not None:
            self._await_stacks(orders, now)
        elif self._is_hung(now):
            self._asked_at = now
            for report in self._reports.values():
                report.stack = None
            orders.to_all.append({"do": "stacks"})
        if self._shown_at is not None and now - self._shown_at > SHOW_SECONDS:
            self._shown_at = None
            orders.say.append(positions(self._sorted(), self._world_size, now))
            for report in self._reports.values():
                report.stack = None
        return orders

    def _await_stacks(self, orders: Orders, now: float) -> None:
        assert self._asked_at is not None
        if not self._is_hung(now):
            self._asked_at = None  # it went on after all
            return
        due = now - self._asked_at > STACKS_SECONDS
        if due or all(r.stack is not None for r in self._reports.values()):
            reports = self._sorted()
            text = verdict(reports, self._world_size, now, self.logs)
            away = missing(reports, now)
            # Whoever waits for others can run, and write into the record.
            speaker = next((r.rank for r in reports if r.rank not in away), 0)
            self._end(orders, HANG_STATUS, text, speaker)

    def _end(self, orders: Orders, status: int, text: str, speaker: int = 0) -> None:
        self._ended = True
        if text:
            orders.say.append(text)
        orders.to_all.append(
            {"do": "end", "status": status, "text": text, "speaker": speaker}
        )

    def _is_hung(self, now: float) -> bool:
        """Whether every rank stands still for longer than it may.

        Training goes on together, so that one rank that stands still soon stops all;
        as long as one still tells of progress nobody hangs.
        """
        at_work = self._at_work()
        if len(self._reports) < self._world_size:
            # Some sidecar has not come. Its rank may be anywhere in the start.
            limit = max((r.position.limit_seconds for r in at_work), default=0.0)
            if not limit or now - max(self._began, self._awake_since) <= limit:
                return False
        # What a rank said last is old where its host was cut off: the others' limits
        # hold for it.
        heard = [r.position.limit_seconds for r in at_work if not r.is_silent(now)]
        heard = heard or [r.position.limit_seconds for r in at_work]
        if not heard or min(heard) <= 0.0:
            return False
        return all(
            (max(heard) if r.is_silent(now) else r.position.limit_seconds)
            < now - max(r.progressed_at, self._awake_since)
            for r in at_work
        )

    def _is_suspended(self, now: float) -> bool:
        """Whether the whole job is stopped: Ctrl-Z, or SLURM's suspend.

        A scheduler stops the sidecars, too, and then much time passes between two
        looks; Ctrl-Z at mpirun stops all ranks.
        """
        at_work = self._at_work()
        return now - self._looked_at > SUSPENDED_SECONDS or (
            len(at_work) > 1 and all(r.kernel in ("T", "t") for r in at_work)
        )

    def _at_work(self) -> list[RankReport]:
        return [r for r in self._reports.values() if r.position.state is State.RUNNING]

    def _record_gone(self, orders: Orders) -> None:
        self._gone_text = text = self._gone_in_words()
        gone = {rank for rank, _ in self._gone}
        speaker = min(self._reports.keys() - gone, default=0)
        orders.to_all.append({"do": "record", "text": text, "speaker": speaker})

    def _gone_in_words(self) -> str:
        """Blame the first rank that was gone before the launcher ended any."""
        first = [entry for entry in self._gone if entry[1] != "terminated"]
        rank, how = first[0] if first else self._gone[0]
        report = self._reports[rank]
        position = report.position
        steps = f", {position.step} steps done" if position.step >= 0 else ""
        what = {
            "terminated": "ended by SIGTERM, as a rule the launcher's or scheduler's",
            "orphaned": "the launcher is gone, and so this rank ends",
            "oom": "killed by the kernel for want of memory (OOM)",
        }.get(how, "ended without a word: killed by a signal, or by os._exit")
        return (
            f"[rank {rank}/{self._world_size} {report.hostname}] {what}; it was at: "
            f"{position.phase}{steps}"
        )

    def _sorted(self) -> list[RankReport]:
        return [self._reports[rank] for rank in sorted(self._reports)]
