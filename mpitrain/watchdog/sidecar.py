"""The process beside a rank: tells the center where it is, and ends it when told.

Started by `watched.Watched` as a process of its own. What it does on its own, without
the center: it ends its rank when the launcher is gone, when the center is gone or
silent for too long, and when MPI does not start in time; and when its rank went without
a word and the launcher does not notice, it ends the launcher.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import socket
import sys
import time
from collections.abc import Sequence
from typing import Any

from mpitrain.watchdog.center import HANG_STATUS, SUSPENDED_SECONDS, Center
from mpitrain.watchdog.links import Hub, Link
from mpitrain.watchdog.page import Page, State
from mpitrain.watchdog.process import (
    Ancestry,
    oom_kills,
    quietly_kill,
    status_of,
)
from mpitrain.watchdog.voice import Voice

DUMP_SIGNAL = signal.SIGRTMIN + 7
"""Makes the rank write its stacks; a signal that scripts leave alone."""

POLL_SECONDS = 0.25
BEAT_SECONDS = 1.0
"""How often each side of a link speaks."""

DUMP_SECONDS = 0.8
"""How long a rank may take to write its stacks: a signal handler in C, at once."""

STACK_BYTES = 1 << 18
"""More of a rank's stacks is not passed on."""

GRACE_SECONDS = 3.0
"""From telling a rank to end the job to killing it."""

RECORD_SECONDS = 0.7
"""How long the center and the rank that records may take for a rank that is gone."""


class Sidecar:
    """One rank's sidecar.

    Args:
        control: Messages from and to the rank.
        page: Where the rank is.
        dump: File in memory to which the rank writes its stacks when asked.
        terminated: File in memory that is not empty after SIGTERM.
        told: What the rank knows before MPI: ``rank`` and ``world_size`` as the
            launcher says, ``hostname``, ``rank_variables``, ``start_timeout``.
    """

    def __init__(
        self,
        control: socket.socket,
        page: Page,
        dump: int,
        terminated: int,
        told: dict[str, Any],
    ) -> None:
        self.rank_pid = os.getppid()
        self.control = control
        self.page = page
        self.dump = dump
        self.dump_read = 0
        self.terminated = terminated
        self.told = told
        self.launcher = Ancestry(self.rank_pid, told["rank_variables"])
        self.oom_kills = oom_kills()
        self.link: Link | None = None
        self.hub: Hub | None = None
        self.center: Center | None = None
        self.kill_at: float | None = None
        self.answer_stacks_at: float | None = None
        self.poll_at = self.awake_since = time.monotonic()
        self.beat_at = 0.0
        self.terminations = (0, 0.0)  # bytes that SIGTERM wrote, and when
        self.state = State.RUNNING  # as it was last told
        self.voice = Voice()

    def run(self) -> None:
        """Watch until the rank is gone."""
        self.control.send(b"ready")
        while True:
            ready = self._wait()
            now = time.monotonic()
            if self.control in ready and not self._hear_rank():
                return None if self._is_another() else self._rank_is_gone(now)
            if os.getppid() != self.rank_pid:
                return self._rank_is_gone(now)
            if now >= self.poll_at:
                if now > self.poll_at + SUSPENDED_SECONDS:
                    self.awake_since = now  # this process itself was suspended
                self.poll_at = now + POLL_SECONDS
                self._look_after_stacks(now)
                self._look_after_launcher(now)
                self._look_after_start(now)
                self._look_after_terminations(now)
            self._look_after_links(ready, now)
            if self.kill_at is not None and now > self.kill_at:
                quietly_kill(self.rank_pid, signal.SIGKILL)

    # --- the rank ---------------------------------------------------------------------

    def _wait(self) -> list[socket.socket]:
        sockets = [self.control]
        sockets += self.link.sockets() if self.link else []
        sockets += self.hub.sockets() if self.hub else []
        poll = select.poll()
        by_number = {s.fileno(): s for s in sockets}
        for number in by_number:
            poll.register(number, select.POLLIN)
        soon = self.center is not None and self.center.is_gathering
        seconds = 0.05 if soon else POLL_SECONDS
        return [by_number[n] for n, _ in poll.poll(seconds * 1000)]

    def _hear_rank(self) -> bool:
        """Obey the rank; return whether it is still there."""
        try:
            data = self.control.recv(65536)
        except OSError:
            return False
        if not data:
            return False
        message = json.loads(data)
        self.told |= message.get("told", {})
        self.voice.log = message.get("log", self.voice.log)
        if "listen" in message:
            # Rank zero: be the center, on the address that all nodes reach.
            size = self.told["world_size"]
            self.center = Center(size, time.monotonic())
            port = 0
            if message["listen"]:
                self.hub = Hub(message["listen"], message["token"], size)
                port = self.hub.port
            self.control.send(json.dumps({"port": port}).encode())
        if self.center is not None and self.voice.log:
            self.center.logs = os.path.dirname(self.voice.log)  # noqa: PTH120
        if "connect" in message:
            address, port = message["connect"]
            self.link = Link(address, port, message["token"], self.told["rank"])
        return True

    def _is_another(self) -> bool:
        """Whether the process lives on without us: it has become another program."""
        end = time.monotonic() + 0.5
        while self.page.read().state is not State.DONE and time.monotonic() < end:
            if os.getppid() != self.rank_pid or self._kernel_state() == "Z":
                return False
            time.sleep(0.01)
        return True

    def _position(self) -> dict[str, Any]:
        position = self.page.read()
        return {
            "state": int(position.state),
            "phase": position.phase,
            "step": position.step,
            "age_seconds": position.age_seconds,
            "limit_seconds": position.limit_seconds,
            "hostname": self.told["hostname"],
        }

    def _send(self, **more: object) -> None:
        """Tell the center where the rank is."""
        message = self._position() | more
        if self.center is not None:
            self.center.hear(self.told["rank"], message, time.monotonic())
        elif self.link is not None:
            self.link.send(message)

    def _rank_is_gone(self, now: float) -> None:
        """Tell the center how the rank went, and see that the launcher noticed."""
        state = self.page.read().state
        alone = self.told["world_size"] == 1
        if state is State.DONE or (alone and not self.page.read().limit_seconds):
            return
        if self.kill_at is None:
            how = "killed"
            self._look_after_terminations(now)
            if self.terminations[0] and now - self.terminations[1] < 3.0:
                how = "terminated"
            elif oom_kills() > self.oom_kills:
                how = "oom"
            elif not self.launcher.lives:
                how = "orphaned"
            self._send(gone=how)
            if (
                not self._has_center()
                and not alone
                and state in (State.RUNNING, State.ASIDE)
                and how == "killed"
                and self.voice.take_the_word(self.launcher)
            ):
                self.voice.say(
                    f"{self._place()} ended without a word: killed by a signal, or by "
                    f"os._exit; it was at: {self.page.read().phase}"
                )
        # The center stays until it has said what there is to say.
        end = now + 1.5
        while self.center and not self.center.is_settled and time.monotonic() < end:
            time.sleep(0.05)
            links = self.hub.sockets() if self.hub else []
            self._look_after_links(links, time.monotonic())
        is_early = state in (State.RUNNING, State.ASIDE)
        if self.kill_at is None and is_early and self._has_center():
            time.sleep(max(0.0, now + RECORD_SECONDS - time.monotonic()))
        self.voice.let_go(self.told["launcher_sockets"])
        if not alone:
            self.launcher.end_if_it_stays(now)
        time.sleep(max(0.0, self.voice.stay_until - time.monotonic()))

    def _has_center(self) -> bool:
        return self.center is not None or (self.link is not None and self.link.stands)

    def _look_after_terminations(self, now: float) -> None:
        """Note when SIGTERM came; a child that was forked off the rank writes, too."""
        size = os.fstat(self.terminated).st_size
        if size > self.terminations[0]:
            self.terminations = (size, now)

    # --- the launcher -----------------------------------------------------------------

    def _look_after_launcher(self, now: float) -> None:
        """End a rank that nobody will end any more: its launcher is gone."""
        if self.kill_at is None and not self.launcher.lives:
            self._send(gone="orphaned")
            self.voice.note("the launcher is gone: this rank ends")
            self.kill_at = now + 0.5

    # --- stacks -----------------------------------------------------------------------

    def _look_after_stacks(self, now: float) -> None:
        """Pass on what the rank wrote: because we asked, or somebody sent SIGUSR1."""
        size = os.fstat(self.dump).st_size
        if self.answer_stacks_at is not None:
            if size == self.dump_read and now < self.answer_stacks_at:
                return
            time.sleep(0.05)  # the handler may be in the middle of it
            self.answer_stacks_at = None
            text = self._new_dump()
            self._send(stack=text, kernel=self._kernel_state())
            self.voice.note(text)
        elif size > self.dump_read:
            time.sleep(0.05)
            text = self._new_dump()
            self._send(stack=text, kernel=self._kernel_state(), shown=True)
            self.voice.note(text)

    def _new_dump(self) -> str:
        size = os.fstat(self.dump).st_size
        begin = max(self.dump_read, size - STACK_BYTES)  # the main thread's comes last
        text = os.pread(self.dump, size - begin, begin)
        self.dump_read = size
        return text.decode(errors="replace")

    def _kernel_state(self) -> str:
        status = status_of(self.rank_pid)
        return status[0] if status else "Z"

    # --- the center -------------------------------------------------------------------

    def _look_after_links(self, ready: Sequence[socket.socket], now: float) -> None:
        if self.hub is not None and self.center is not None:
            for rank, message in self.hub.receive(ready):
                self.center.hear(rank, message, now)
        state = self.page.read().state
        if now > self.beat_at or state is not self.state:
            self.beat_at = now + BEAT_SECONDS
            self.state = state
            self._send(kernel=self._kernel_state())
            if state is State.FAILING and not self._has_center():
                self.voice.take_the_word(self.launcher)  # the rank says why it ends
            if self.hub is not None:
                self.hub.broadcast({"do": "nothing"})
        if self.center is not None:
            orders = self.center.decide(now)
            for text in orders.say:
                self.voice.say(text)
            for order in orders.to_all:
                if self.hub is not None:
                    self.hub.broadcast(order)
                self._obey(order, now)
        if self.link is not None:
            for order in self.link.receive(ready):
                self._obey(order, now)
            self._look_after_center(now)

    def _look_after_center(self, now: float) -> None:
        """End a rank that is cut off from rank zero, and stands still for that."""
        if self.link is None or self.kill_at is not None:
            return
        if not self.link.stands:
            self.link.try_again(now)
            return
        position = self.page.read()
        limit = position.limit_seconds
        moved = now - min(position.age_seconds, now - self.awake_since)
        if self.link.is_closed:
            # Its host is there, and its rank perhaps, too: then mpirun sees to the job.
            silent = limit > 0 and now - moved > limit
        else:
            limit = limit or self.told["start_timeout"]
            heard_at = max(self.link.heard_at, self.awake_since)
            silent = now - max(heard_at, moved if position.limit_seconds else 0) > limit
        if silent:
            self.voice.note(f"no word from rank zero for {limit:.0f} s: this rank ends")
            self.kill_at = now

    def _obey(self, order: dict[str, Any], now: float) -> None:
        if order["do"] == "stacks":
            quietly_kill(self.rank_pid, DUMP_SIGNAL)
            self.answer_stacks_at = now + DUMP_SECONDS
        elif order["do"] == "end":
            self._end_rank(order["status"], self._mine(order), now)
        elif order["do"] == "record":
            self._tell_rank(None, self._mine(order))
        elif order["do"] == "go alone":
            self.link = None

    def _mine(self, order: dict[str, Any]) -> str:
        """Return an order's text where this rank shall record it."""
        return order["text"] if order["speaker"] == self.told["rank"] else ""

    def _end_rank(self, status: int, text: str, now: float) -> None:
        """Let the rank end the job with a status, or else kill it."""
        self.kill_at = now + GRACE_SECONDS
        self._tell_rank(status, text)

    def _tell_rank(self, status: int | None, text: str) -> None:
        message = {"end": status, "text": text}
        with contextlib.suppress(OSError):
            self.control.send(json.dumps(message).encode())

    # --- the start --------------------------------------------------------------------

    def _look_after_start(self, now: float) -> None:
        """End a rank that waits too long for others before the center is known."""
        if self._has_center() or self.kill_at is not None:
            return
        position = self.page.read()
        waited = min(position.age_seconds, now - self.awake_since)
        # Rank zero first: its end ends the others before they say the same.
        if 0 < position.limit_seconds < waited - 3.0 * (self.told["rank"] > 0):
            seen = f"{self.launcher.num_ranks} of {self.told['world_size']}"
            if self.voice.take_the_word(self.launcher):
                self.voice.say(
                    f"{self._place()} hang: {position.phase} for {waited:.0f} s\n"
                    f"Processes started on this host: {seen}. Look at the others, at "
                    "the other hosts, and at the network between them."
                )
            self._end_rank(HANG_STATUS, "", now)

    def _place(self) -> str:
        told = self.told
        return f"[rank {told['rank']}/{told['world_size']} {told['hostname']}]"


def main() -> None:
    """Watch over the process that started this one."""
    control, page, dump, terminated = (int(word) for word in sys.argv[1:5])
    for number in (
        *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT),
        *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGPIPE),
    ):
        signal.signal(number, signal.SIG_IGN)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # one for each rank
    sidecar = Sidecar(
        socket.socket(fileno=control),
        Page(page),
        dump,
        terminated,
        json.loads(sys.argv[5]),
    )
    try:
        sidecar.run()
    finally:
        if sidecar.hub is not None:  # whatever happened here: the ranks live
            sidecar.hub.broadcast({"do": "go alone"})
