"""A process for each logger, which can slow down, hang or crash nothing but itself.

A thread would not do: wandb replaces `sys.exit`, waits in `atexit` and signals the main
thread. Nor would `multiprocessing`: its spawn runs the user's script again, its fork
copies MPI and CUDA. So this is a new interpreter that reads pickled calls from a pipe.
"""

from __future__ import annotations

import json
import logging
import os
import pickle
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import IO, Any

from mpitrain.mpi.launchers import PREFIXES
from mpitrain.plugins import call_with_known, load_reference
from mpitrain.record.background import BackgroundWriter
from mpitrain.record.loggers.base import RunInfo

logger = logging.getLogger("mpitrain")

NO_TELEMETRY = {"WANDB_ERROR_REPORTING": "false", "MLFLOW_DISABLE_TELEMETRY": "true"}
MAX_WAITING = 100_000  # calls that may wait for a logger: some 50 MB
ORPHAN_SECONDS = 5.0  # how long a logger may take to end after its rank was killed


class LoggerProcess:
    """Runs one logger in a process; none of its methods waits for it but `join`."""

    def __init__(
        self,
        name: str,
        info: RunInfo,
        wandb_options: Mapping[str, Any],
        say: Callable[[str], object],
    ) -> None:
        self.name = name
        self._log = info.run_dir / "logs" / f"loggers-{info.rank}.log"
        self._say = say
        self._is_disabled = False
        self._process: subprocess.Popen[bytes] | None = None
        self._has_ended = threading.Event()
        self._writer = BackgroundWriter(f"--log {name}", self._write, MAX_WAITING)
        self._put((name, info, wandb_options), num_calls=0)
        self.start = self._writer.start

    def send(self, method: str, *calls: tuple[Any, ...]) -> None:
        """Let the logger call a method for each tuple of arguments, or drop them.

        ``finalize`` is the last one, and never dropped.
        """
        if method == "finalize":
            self._put((method, calls), num_calls=0)
        elif calls and not self._is_disabled:
            self._put((method, calls), len(calls))

    def join(self, seconds: float) -> bool:
        """Wait for its end; return whether it has ended."""
        return self._has_ended.wait(max(0.0, seconds))

    def close(self) -> None:
        """Kill the process if it still runs; warn of points that are missing."""
        was_disabled, self._is_disabled = self._is_disabled, True
        self._writer.close()
        num, how = self._writer.num_dropped, "was too slow"
        if not self.join(0):
            if self._process is not None:
                self._process.kill()
            num += self._writer.num_waiting
            how = "did not finish in time and was killed"
        elif was_disabled or not num:
            return
        logger.warning("--log %s %s: %d points are missing", self.name, how, num)

    def _put(self, message: object, num_calls: int) -> None:
        try:
            self._writer.put(pickle.dumps(message), num_calls)
        except Exception as error:  # what cannot be pickled
            self._disable(f"{type(error).__name__}: {error}")

    def _write(self, data: bytes) -> int:
        """Write into the pipe; the first time start the process, which takes long."""
        try:
            if self._process is None and not self._has_ended.is_set():
                self._process = self._spawn()
                threading.Thread(target=self._listen, args=(self._process,)).start()
            assert self._process is not None
            assert self._process.stdin is not None
            return os.write(self._process.stdin.fileno(), data)
        except Exception as error:
            if self._process is None:
                self._disable(f"{type(error).__name__}: {error}")
                self._has_ended.set()
            return len(data)  # else it has ended, and `_listen` says why

    def _spawn(self) -> subprocess.Popen[bytes]:
        # A library that starts MPI there would take itself for this rank.
        kept = {k: v for k, v in os.environ.items() if not k.startswith(PREFIXES)}
        code = f"import sys; sys.path[:] = {sys.path!r}; import {__name__} as process; "
        self._log.parent.mkdir(parents=True, exist_ok=True)
        with self._log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-c", f"{code}process.main()"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env={**NO_TELEMETRY, **kept},
                start_new_session=True,  # signals to the rank's group are not for it
            )

    def _listen(self, process: subprocess.Popen[bytes]) -> None:
        with process:
            for line in process.stdout or ():
                kind, text = json.loads(line)
                (self._say if kind == "say" else self._disable)(text)
        if process.returncode:
            self._disable(f"its process ended with status {process.returncode}")
        self._has_ended.set()

    def _disable(self, reason: str) -> None:
        was_disabled, self._is_disabled = self._is_disabled, True
        if not was_disabled:
            logger.warning(
                "--log %s failed and is disabled: %s (%s). Training continues",
                *(self.name, reason, self._log),
            )


def main() -> None:
    """Run one logger: calls come from stdin, answers go to stdout."""
    messages = os.fdopen(os.dup(0), "rb")
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    # A process that the logger starts must not keep the rank's pipes open.
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    os.dup2(2, 1)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()

    def answer(kind: str, text: str) -> None:
        with suppress(OSError):  # the rank is gone
            answers.write(json.dumps((kind, text)) + "\n")

    try:
        _serve(messages, lambda line: answer("say", line))
    except BaseException as error:  # also `sys.exit` in a logger
        answer("error", f"{type(error).__name__}: {error}")
        with suppress(OSError):  # a full disk
            traceback.print_exc()
    os._exit(0)  # threads of the logger do not delay it


def _serve(messages: IO[bytes], say: Callable[[str], object]) -> None:
    name, info, wandb_options = pickle.load(messages)
    known = {**vars(info), "info": info, "wandb_options": wandb_options, "say": say}
    from mpitrain.record.loggers.builtin import BUILTIN

    kind = BUILTIN.get(name) or load_reference(name, "--log", "loggers")
    target = call_with_known(kind, known, f"--log {name}")
    target.log_hyperparams(info.config)
    method = ""
    # Saved after each call: of a logger that is killed all until then is on the disk.
    while method != "finalize":
        try:
            method, calls = pickle.load(messages)
        except (EOFError, pickle.UnpicklingError):  # the rank failed or was killed
            method, calls = "finalize", (("failed",),)
        for arguments in calls:  # Lightning's loggers have no log_images
            getattr(target, method, lambda *_: None)(*arguments)
        if method != "finalize":
            target.save()


def _end_with(rank_pid: int) -> None:
    # A logger that hangs in a call does not see that the pipe has ended.
    while os.getppid() == rank_pid:
        time.sleep(0.5)
    time.sleep(ORPHAN_SECONDS)
    os._exit(1)
