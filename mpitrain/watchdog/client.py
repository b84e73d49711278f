"""The rank's side of the watchdog: starts the sidecar, and writes the heartbeat."""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mpitrain.watchdog.heartbeat import Heartbeat, State, above_standard, memory_file
from mpitrain.watchdog.process import status_of
from mpitrain.watchdog.sidecar import DUMP_SIGNAL

_PROGRAM = (
    "import sys; sys.path.append(sys.argv.pop(1)); "
    "from mpitrain.watchdog.sidecar import main; main()"
)
_PACKAGE_ROOT = Path(__file__).parents[2]


class Watchdog:
    """Starts the sidecar, before MPI: MPI_Init itself can wait forever.

    From then on SIGUSR1 shows where every rank is. `rank` and `world_size` are the
    launcher's; `connect` corrects them. MPICH's launcher sees by `launcher_sockets`
    that this process is gone, and kills the others within milliseconds: the sidecar
    holds them, too, until it has said who was first. Raises an OSError if the sidecar
    cannot be started. ``lost_host_seconds`` is how long a host may be silent, where the
    job would be started again; 0: as long as a rank may stand still.
    """

    def __init__(
        self,
        *,
        rank: int,
        world_size: int,
        launcher_sockets: Sequence[int],
        start_timeout_seconds: float,
        lost_host_seconds: float = 0.0,
    ) -> None:
        # Called in a thread with a status and a text: records the text unless it is
        # empty, and ends the job unless the status is ``None``.
        self.on_command = _end_process
        self.start_timeout_seconds = start_timeout_seconds
        self.hang_timeout_seconds = 0.0  # after the first step; 0: forever
        self.is_connected = False  # whether the sidecars of all ranks know each other
        self.counts_steps = False  # whether optimizers tell of their steps
        self._steps = -1
        self._pid = os.getpid()
        memory, dump, terminated = memory_file(), memory_file(), memory_file()
        self._heartbeat = Heartbeat(memory)
        self._dump, self._terminated = dump, terminated
        # In C, without the interpreter's lock.
        faulthandler.register(DUMP_SIGNAL, dump, all_threads=True)
        chain = signal.getsignal(signal.SIGUSR1) is not signal.SIG_DFL
        faulthandler.register(signal.SIGUSR1, dump, all_threads=True, chain=chain)
        faulthandler.register(signal.SIGTERM, terminated, all_threads=False, chain=True)
        self._control, theirs = (
            socket.socket(fileno=above_standard(sock.detach()))
            for sock in socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        )
        rank_info = {
            "rank": rank,
            "world_size": world_size,
            "hostname": socket.gethostname(),
            "start_timeout": start_timeout_seconds,
            "lost_host_seconds": lost_host_seconds,
            "launcher_sockets": list(launcher_sockets),
        }
        descriptors = [theirs.fileno(), memory, dump, terminated]
        # Before the sidecar reads it: it would see no limit.
        self.start("starting MPI")
        self._process = subprocess.Popen(
            [
                # Without site and the user's variables and folder: sooner, and no .pth
                # file, sitecustomize or module of theirs runs here.
                *(sys.executable, "-I", "-S", "-c", _PROGRAM, str(_PACKAGE_ROOT)),
                *(map(str, descriptors)),
                json.dumps(rank_info),
            ],
            stdin=subprocess.DEVNULL,
            pass_fds=[*descriptors, *launcher_sockets],
            start_new_session=True,  # signals to this rank's group are not for it
        )
        theirs.close()
        if not self._control.recv(16):  # it watches before anything can happen
            raise OSError("the watchdog's process did not start")
        self._ports: queue.SimpleQueue[int] = queue.SimpleQueue()
        threading.Thread(target=self._receive, name="watchdog", daemon=True).start()

    def on_sigterm(self, handler: Callable[[int, Any], object]) -> None:
        """Call a handler at SIGTERM; the sidecar still sees that it came."""
        # faulthandler chains to the handler that it finds: so it must come last.
        faulthandler.unregister(signal.SIGTERM)
        signal.signal(signal.SIGTERM, handler)
        faulthandler.register(
            signal.SIGTERM, self._terminated, all_threads=False, chain=True
        )

    # --- the heartbeat ----------------------------------------------------------------

    def start(self, step: str) -> None:
        """Record that the start reached one of its steps."""
        self._heartbeat.beat(f"start: {step}", -1, self.start_timeout_seconds)

    def progress(self, phase: str) -> None:
        """Record progress; `phase` is what comes next, such as ``"evaluation"``."""
        self._heartbeat.beat(phase, self._steps, self._limit())

    def step_done(self) -> None:
        """Record that this rank finished an optimizer step."""
        self._steps += 1
        self._heartbeat.beat("training", self._steps, self.hang_timeout_seconds)

    def idle(self) -> None:
        """Record that what comes next is not watched."""
        self.hang_timeout_seconds = 0.0
        self._steps = -1
        self._heartbeat.beat("outside the job", -1, 0.0)

    def expect_steps(self, phase: str) -> None:
        """Record that the first step comes next: data and compilers take their time."""
        self._steps = 0
        self._heartbeat.beat(phase, 0, self._limit())

    def _limit(self) -> float:
        limit = self.hang_timeout_seconds
        if limit and self._steps == 0:
            return max(limit, self.start_timeout_seconds)
        return limit

    def set_state(self, state: State) -> None:
        """Record that this rank leaves, fails, sleeps or is done."""
        # A worker that was forked has the same memory.
        if os.getpid() == self._pid:
            self._heartbeat.set_state(state)

    # --- the sidecar ------------------------------------------------------------------

    def listen(self, address: str, token: str, rank: int, world_size: int) -> int:
        """Let other sidecars connect to this one; return the port.

        Rank zero's is the coordinator, another one a relay. `address` is empty where
        there are no others; `token` is what they send first.
        """
        rank_info = {"rank": rank, "world_size": world_size}
        self._send(rank_info=rank_info, listen=address, token=token)
        try:
            port = self._ports.get(timeout=10)
        except queue.Empty:
            raise OSError("the watchdog's process does not answer") from None
        if address and not port:
            raise OSError(f"the watchdog's process cannot listen on {address}")
        return port

    def connect(
        self, places: Sequence[tuple[str, int]], token: str, rank: int, world_size: int
    ) -> None:
        """Let this sidecar report to the first of `places` that it reaches."""
        rank_info = {"rank": rank, "world_size": world_size}
        self._send(rank_info=rank_info, connect=places, token=token)

    def log_to(self, path: Path) -> None:
        """Let stacks be written into this rank's log."""
        self._send(log=str(path))

    def close(self) -> None:
        """Let the sidecar go: this process exits normally."""
        # Called at the exit of forked processes, too.
        if os.getpid() != self._pid:
            return
        self.set_state(State.DONE)
        with contextlib.suppress(OSError):
            self._control.shutdown(socket.SHUT_RDWR)
        self.end_stopped_sidecar()

    def end_stopped_sidecar(self) -> None:
        """Kill a sidecar that is stopped: mpirun waits for whoever holds its pipes."""
        status = status_of(self._process.pid)
        if status is not None and status[0] in ("T", "t"):
            self._process.kill()

    def _send(self, **message: object) -> None:
        with contextlib.suppress(OSError):
            self._control.send(json.dumps(message).encode())

    def _receive(self) -> None:
        for data in iter(self._read_control, b""):
            message = json.loads(data)
            if "dump" in message:
                with contextlib.suppress(Exception):
                    faulthandler.dump_traceback(self._dump, all_threads=True)
            elif "text" in message:
                self.on_command(message["end"], message["text"])
                if message["text"]:
                    self._send(recorded=True)
            else:
                self._ports.put(message["port"])

    def _read_control(self) -> bytes:
        with contextlib.suppress(OSError):
            return self._control.recv(1 << 20)
        return b""


def _end_process(status: int | None, text: str) -> None:  # noqa: ARG001
    """Obey a command before there is a job."""
    if status is not None:
        os._exit(status)
