"""The process beside a rank: reports where it is, and ends it when told to.

`client.Watchdog` starts it. Without the coordinator it ends its rank when the
launcher is gone, when the coordinator is gone or silent for too long, and when MPI does
not start in time; it ends a launcher that does not notice that the rank died.
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
import threading
import time
from collections.abc import Sequence
from typing import Any

from mpitrain.watchdog.coordinator import (
    HANG_STATUS,
    KILLED,
    NOTICE_SECONDS,
    SUSPENDED_SECONDS,
    Coordinator,
)
from mpitrain.watchdog.heartbeat import Heartbeat, State, beat_seconds
from mpitrain.watchdog.links import CoordinatorClient, CoordinatorServer
from mpitrain.watchdog.process import (
    LauncherProcesses,
    memory_limit,
    oom_kills,
    send_signal,
    status_of,
)

DUMP_SIGNAL = signal.SIGRTMIN + 7  # the rank writes its stacks; scripts leave it alone
POLL_SECONDS = 0.25
DUMP_SECONDS = 1.3  # for a rank to write its stacks
DUMP_BY_PYTHON_SECONDS = 0.5  # of that, for a thread of it; then in a signal handler
MAX_STACK_BYTES = 1 << 18  # more of a rank's stacks is not passed on
GRACE_SECONDS = 3.0  # from telling a rank to end the job to killing it
RECORD_SECONDS = 0.7  # for the coordinator and the recording rank, at a death
LOG_SECONDS = 0.5  # how long a line in a log may block
SETTLE_SECONDS = 1.5  # for the coordinator to print why the job ends
RELAY_SECONDS = NOTICE_SECONDS + 0.5  # until the coordinator has ended the job
CLAIM_SECONDS = 4.0  # how long a claim of the output is held
OOM_SECONDS = 5.0  # an earlier kill for lack of memory is no cause of a death now


class Sidecar:
    """One rank's sidecar. It and the rank talk over `control`.

    `dump` and `terminated` are files in memory: the rank writes its stacks into them
    when asked, and at SIGTERM.
    """

    def __init__(
        self,
        control: socket.socket,
        heartbeat: Heartbeat,
        dump: int,
        terminated: int,
        rank_info: dict[str, Any],
    ) -> None:
        self.rank_pid = os.getppid()
        self.control = control
        self.heartbeat = heartbeat
        self.dump = dump
        self.dump_read = 0
        self.terminated = terminated
        self.rank_info = rank_info
        self.launcher = LauncherProcesses(self.rank_pid)
        self.console = Console()
        # The last two counts, and when: the kernel may take long to end a process.
        self.oom_kills, self.oom_at = [oom_kills()] * 2, time.monotonic()
        self.client: CoordinatorClient | None = None  # or else, on rank zero:
        self.coordinator: Coordinator | None = None
        # Of the coordinator, or of a relay for other ranks.
        self.server: CoordinatorServer | None = None
        self.kill_at: float | None = None
        self.dump_due_at: float | None = None
        self.dump_signal_at: float | None = None
        self.poll_at = self.awake_since = time.monotonic()
        self.send_at = 0.0
        self.terminations = (0, 0.0)  # bytes that SIGTERM wrote, and when
        self.sent_state = State.RUNNING
        self.is_recorded = False  # why a rank is gone: printed, and in the run folder

    def run(self) -> None:
        """Watch until the rank is gone."""
        self.control.send(b"ready")
        while True:
            ready = self._wait()
            now = time.monotonic()
            # The rank's end of the socket is closed: it has ended, or is another
            # program.
            if self.control in ready and not self._read_control():
                return None if self._has_exec() else self._handle_death(now)
            # A worker that the rank has forked may have the socket, and outlive it.
            if os.getppid() != self.rank_pid:
                return self._handle_death(now)
            if now >= self.poll_at:
                if now > self.poll_at + SUSPENDED_SECONDS:
                    self.awake_since = now  # this process itself was suspended
                self.poll_at = now + POLL_SECONDS
                self._check_stacks(now)
                self._check_launcher(now)
                self._check_start(now)
                self._check_terminations(now)
                self._count_oom_kills(now)
            self._exchange(ready, now)
            if self.kill_at is not None and now > self.kill_at:
                send_signal(self.rank_pid, signal.SIGKILL)

    # --- the rank ---------------------------------------------------------------------

    def _wait(self) -> list[socket.socket]:
        # Not `select`, which takes no descriptor above 1,023.
        poll = select.poll()
        by_number = {s.fileno(): s for s in [self.control, *self._sockets()]}
        for number in by_number:
            poll.register(number, select.POLLIN)
        is_gathering = self.coordinator is not None and self.coordinator.is_gathering
        seconds = 0.05 if is_gathering else POLL_SECONDS
        return [by_number[n] for n, _ in poll.poll(seconds * 1000)]

    def _sockets(self) -> list[socket.socket]:
        sockets = self.client.sockets() if self.client else []
        return sockets + (self.server.sockets() if self.server else [])

    def _read_control(self) -> bool:
        data = b""
        with contextlib.suppress(OSError):
            data = self.control.recv(65536)
        if not data:
            return False
        message = json.loads(data)
        self.rank_info |= message.get("rank_info", {})
        self.console.log = message.get("log", self.console.log)
        if "listen" in message:
            size, address, port = self.rank_info["world_size"], message["listen"], 0
            with contextlib.suppress(OSError):
                if address:
                    token, is_zero = message["token"], self.rank_info["rank"] == 0
                    self.server = CoordinatorServer(
                        address, token, size, answers=is_zero
                    )
                    port = self.server.port
            if self.rank_info["rank"] == 0 and (port or not address):
                self.coordinator = Coordinator(size, time.monotonic())
                seconds = self.rank_info["lost_host_seconds"]
                self.coordinator.lost_host_seconds = seconds
            self.control.send(json.dumps({"port": port}).encode())
        if "recorded" in message:
            self._send(recorded=True)
        if self.coordinator is not None and self.console.log:
            self.coordinator.logs = os.path.dirname(self.console.log)  # noqa: PTH120
        if "connect" in message:
            places = [(address, port) for address, port in message["connect"]]
            rank = self.rank_info["rank"]
            seconds = 5.0 * beat_seconds(self.rank_info["world_size"])
            self.client = CoordinatorClient(places, message["token"], rank, seconds)
        return True

    def _has_exec(self) -> bool:
        """Return whether the process has become another program, without a client."""
        # The kernel closes a dying process's files before it is dead.
        end = time.monotonic() + 0.5
        while self.heartbeat.read().state is not State.DONE and time.monotonic() < end:
            if os.getppid() != self.rank_pid or self._process_state() == "Z":
                return False
            time.sleep(0.01)
        return True

    def _process_state(self) -> str:
        status = status_of(self.rank_pid)
        return status[0] if status else "Z"

    def _send(self, **more: object) -> None:
        position = self.heartbeat.read()._asdict()
        message = {"hostname": self.rank_info["hostname"], **position, **more}
        if self.coordinator is not None:
            self.coordinator.receive(self.rank_info["rank"], message, time.monotonic())
        elif self.client is not None:
            self.client.send(message)

    def _handle_death(self, now: float) -> None:
        """Report how the rank died, and make sure that the launcher notices."""
        position = self.heartbeat.read()
        state = position.state
        is_single = self.rank_info["world_size"] == 1
        if state is State.DONE or (is_single and not position.limit_seconds):
            return
        is_unreported = state in (State.RUNNING, State.IDLE)
        if self.kill_at is None:
            cause = self._cause_of_death(now)
            self._send(gone=cause)
            is_alone = is_unreported and not self._has_coordinator() and not is_single
            is_unexplained = is_alone and cause == "killed"
            if is_unexplained and self.console.claim_output(self.launcher):
                self.console.print(f"{self._name()} {KILLED}{position.phase}")
        # The coordinator stays until it has printed what there is to print, and so does
        # a relay: others of its node may be going, too.
        end = now + (SETTLE_SECONDS if self.coordinator else RELAY_SECONDS)
        while self._is_needed() and time.monotonic() <= end:
            time.sleep(0.05)
            self._exchange(self._sockets(), time.monotonic())
        # The launcher ends the other ranks, too, once it sees that this one is gone.
        if self.kill_at is None and is_unreported and self._has_coordinator():
            end = now + RECORD_SECONDS
            while not self.is_recorded and time.monotonic() < end:
                time.sleep(0.02)
                self._exchange(self._sockets(), time.monotonic())
        # Now MPICH's launcher sees the death, and Open MPI's the end of the output.
        self.console.close(self.rank_info["launcher_sockets"])
        if not is_single:
            self.launcher.end_if_it_lingers(now)
        time.sleep(max(0.0, self.console.claimed_until - time.monotonic()))

    def _is_needed(self) -> bool:
        """Whether other sidecars still need this one, whose rank is gone."""
        if self.coordinator is not None:
            return not self.coordinator.is_settled
        return (
            self.server is not None
            and self.client is not None
            and (not self.client.is_closed)
        )

    def _cause_of_death(self, now: float) -> str:
        # It may have come since the last look.
        self._check_terminations(now)
        if self.terminations[0] and now - self.terminations[1] < 3.0:
            return "terminated"
        if oom_kills() > self.oom_kills[0]:
            limit = memory_limit()
            text = "killed by the kernel for lack of memory (OOM)"
            return f"{text}; the limit of its cgroup is {limit}" if limit else text
        return "killed" if self.launcher.outlives_ranks else "orphaned"

    def _count_oom_kills(self, now: float) -> None:
        if now > self.oom_at + OOM_SECONDS:
            self.oom_kills, self.oom_at = [self.oom_kills[1], oom_kills()], now

    def _has_coordinator(self) -> bool:
        is_connected = self.client is not None and self.client.is_established
        return self.coordinator is not None or is_connected

    def _check_terminations(self, now: float) -> None:
        """Note when SIGTERM came; a child that was forked off the rank writes, too."""
        size = os.fstat(self.terminated).st_size
        if size > self.terminations[0]:
            self.terminations = (size, now)

    def _check_launcher(self, now: float) -> None:
        """End a rank whose launcher is gone: nobody else will."""
        if self.kill_at is not None or self.launcher.is_alive:
            return
        if self._process_state() != "Z":  # else its proxy has ended with it
            self._send(gone="orphaned")
            self.console.write_log("the launcher is gone: this rank ends")
            self.kill_at = now + 0.5

    def _check_stacks(self, now: float) -> None:
        """Pass on the stacks: this sidecar asked for them, or a user sent SIGUSR1."""
        has_new = os.fstat(self.dump).st_size > self.dump_read
        is_asked = self.dump_due_at is not None
        if self.dump_signal_at is not None and (has_new or now > self.dump_signal_at):
            self.dump_signal_at = None
            if not has_new:
                send_signal(self.rank_pid, DUMP_SIGNAL)
        if not has_new and (self.dump_due_at is None or now < self.dump_due_at):
            return
        time.sleep(0.05)  # the handler may still be writing
        self.dump_due_at = None
        size = os.fstat(self.dump).st_size
        begin = max(self.dump_read, size - MAX_STACK_BYTES)  # main thread comes last
        text = os.pread(self.dump, size - begin, begin).decode(errors="replace")
        self.dump_read = size
        state = self._process_state()
        self._send(stack=text, process_state=state, show=not is_asked)
        self.console.write_log(text)

    # --- the coordinator --------------------------------------------------------------

    def _exchange(self, ready: Sequence[socket.socket], now: float) -> None:
        if self.server is not None:
            for rank, message in self.server.receive(ready):
                rank = message.setdefault("rank", rank)  # relays pass on others'
                if self.coordinator is not None:
                    self.coordinator.receive(rank, message, now)
                elif self.client is not None:
                    self.client.send(message)
        state = self.heartbeat.read().state
        if now > self.send_at or state is not self.sent_state:
            self.send_at = now + beat_seconds(self.rank_info["world_size"])
            self.sent_state = state
            self._send(process_state=self._process_state())
            if state is State.FAILING and not self._has_coordinator():
                self.console.claim_output(self.launcher)  # the rank says why it ends
            if self.server is not None and self.coordinator is not None:
                self.server.broadcast({"command": "ping"})
        if self.coordinator is not None:
            actions = self.coordinator.decide(now)
            for text in actions.messages:
                self.console.print(text)
            for command in actions.commands:
                if self.server is not None:
                    self.server.broadcast(command)
                self._obey(command, now)
        if self.client is not None:
            for command in self.client.receive(ready):
                if self.server is not None:
                    self.server.broadcast(command)
                self._obey(command, now)
        if self.client is not None:  # it may have been told to detach
            if self.client.is_closed and not self.client.leave_relay() and self.server:
                self.server.close()  # those that report through this one see it
                self.server = None
            self._check_coordinator(now)

    def _check_coordinator(self, now: float) -> None:
        """End a rank that is cut off from rank zero and stands still for that."""
        if self.client is None or self.kill_at is not None:
            return
        if not self.client.is_established:
            self.client.retry(now)
            return
        position = self.heartbeat.read()
        limit = position.limit_seconds
        progressed_at = now - min(position.age_seconds, now - self.awake_since)
        if self.client.is_closed:
            # Its host is alive, and perhaps its rank: then mpirun ends the job.
            is_cut_off = limit > 0 and now - progressed_at > limit
        else:
            heard_at = max(self.client.heard_at, self.awake_since)
            last = max(heard_at, progressed_at if limit else 0)
            limit = limit or self.rank_info["start_timeout"]
            is_cut_off = now - last > limit
        if is_cut_off:
            text = f"no word from rank zero for {limit:.0f} s: this rank ends"
            self.console.write_log(text)
            self.kill_at = now

    def _obey(self, command: dict[str, Any], now: float) -> None:
        name = command["command"]
        text = ""
        if command.get("reporting_rank") == self.rank_info["rank"]:
            text = command["text"]  # this rank is to record it
        if name == "dump_stacks":
            # By a thread that holds Python's lock: a handler of a signal does not, and
            # may crash while another thread runs. Where the thread cannot get the lock,
            # no other one runs (Python 3.11; seen once in some fifty hangs).
            with contextlib.suppress(OSError):
                self.control.send(b'{"dump": true}')
            self.dump_signal_at = now + DUMP_BY_PYTHON_SECONDS
            self.dump_due_at = now + DUMP_SECONDS
        elif name == "abort":
            self.kill_at = now + GRACE_SECONDS
            self._send_to_rank(command["status"], text)
        elif name == "record":
            self._send_to_rank(None, text)
        elif name == "recorded":
            self.is_recorded = True
        elif name == "detach":
            self.client = None

    def _send_to_rank(self, status: int | None, text: str) -> None:
        with contextlib.suppress(OSError):
            self.control.send(json.dumps({"end": status, "text": text}).encode())

    def _check_start(self, now: float) -> None:
        if self._has_coordinator() or self.kill_at is not None:
            return
        position = self.heartbeat.read()
        waited = min(position.age_seconds, now - self.awake_since)
        # Rank zero first: its end ends the others before they say the same.
        if 0 < position.limit_seconds < waited - 3.0 * (self.rank_info["rank"] > 0):
            seen = f"{self.launcher.num_ranks} of {self.rank_info['world_size']}"
            if self.console.claim_output(self.launcher):
                self.console.print(
                    f"{self._name()} hang: {position.phase} for {waited:.0f} s\n"
                    f"Processes started on this host: {seen}. Do all run mpitrain? "
                    "Look at the others, the other hosts, and the network between them."
                )
            self.kill_at = now + GRACE_SECONDS
            self._send_to_rank(HANG_STATUS, "")

    def _name(self) -> str:
        info = self.rank_info
        return f"[rank {info['rank']}/{info['world_size']} {info['hostname']}]"


class Console:
    """Where a sidecar writes: the rank's stderr, and the rank's log if it has one."""

    def __init__(self) -> None:
        self.log: str | None = None
        self.claimed_until = 0.0  # this sidecar must live so long to hold its claim
        self._claim: socket.socket | None = None

    def print(self, text: str) -> None:
        """Write to stderr."""
        with contextlib.suppress(OSError):
            os.write(2, (text + "\n").encode())

    def claim_output(self, launcher: object) -> bool:
        """Return whether this is the first sidecar of this job and host that claims.

        Without a coordinator they agree by an abstract socket address, which only one
        socket of a host can have.
        """
        if self._claim is not None:
            return False
        self._claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            self._claim.bind(f"\0mpitrain-{os.getuid()}-{launcher}")
        except OSError:
            return False
        self.claimed_until = time.monotonic() + CLAIM_SECONDS
        return True

    def write_log(self, text: str) -> None:
        """Write into the rank's log, for a moment at most.

        A file server that does not answer is what ranks hang for most often.
        """
        path = self.log
        if not path or not text:
            return

        def write() -> None:
            with contextlib.suppress(OSError), open(path, "a") as log:  # noqa: PTH123
                log.write(f"watchdog: {text.rstrip()}\n")

        thread = threading.Thread(target=write, daemon=True)
        thread.start()
        thread.join(LOG_SECONDS)

    def close(self, launcher_sockets: Sequence[int]) -> None:
        """Close what mpirun reads: it waits for the end of it before it exits."""
        with contextlib.suppress(OSError):
            for descriptor in launcher_sockets:
                os.close(descriptor)
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, 1)
            os.dup2(null, 2)


def main() -> None:
    """Watch the process that started this one."""
    control, heartbeat, dump, terminated = (int(word) for word in sys.argv[1:5])
    for number in (
        *(signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT),
        *(signal.SIGUSR1, signal.SIGUSR2, signal.SIGPIPE),
    ):
        # Schedulers signal all processes of a job: this one tells how its rank ends.
        signal.signal(number, signal.SIG_IGN)
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (limit, limit))  # one for each rank
    sock, rank_info = socket.socket(fileno=control), json.loads(sys.argv[5])
    sidecar = Sidecar(sock, Heartbeat(heartbeat), dump, terminated, rank_info)
    try:
        sidecar.run()
    finally:
        # Whatever happened here: the ranks live.
        if sidecar.server and sidecar.coordinator:
            sidecar.server.broadcast({"command": "detach"})
