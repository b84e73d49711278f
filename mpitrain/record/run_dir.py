"""The run folder: ``runs/NAME/`` and the files in it. Imports no torch."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import sys
import threading
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from mpitrain.files import read_json
from mpitrain.mpi.world import rank_label

FLUSH_SECONDS = 3.0  # how long the end waits for a disk to take the last lines of a log


def open_log(run_dir: Path, rank: int, world_size: int, hostname: str) -> TextIO:
    """Open ``logs/rank-<rank>.log``; its first line names the process and the rank.

    MPICH's mpiexec names a rank that was killed by its process id alone.
    """
    path = log_path(run_dir, rank, world_size)
    # On a machine that does not share the filesystem with rank zero's.
    path.parent.mkdir(parents=True, exist_ok=True)
    log = path.open("a", buffering=1)
    now = datetime.now().astimezone().isoformat(timespec="seconds")
    log.write(f"pid {os.getpid()} is {rank_label(rank, world_size, hostname)}, {now}\n")
    return log


def log_path(run_dir: Path, rank: int, world_size: int) -> Path:
    """Return the path of a rank's log."""
    return run_dir / "logs" / f"{rank_name(rank, world_size)}.log"


def start_logging(log: TextIO, *, is_rank_zero: bool) -> LogFile:
    """Send log records to this rank's log, and rank zero's warnings to the screen."""
    logger = logging.getLogger("mpitrain")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    to_file = LogFile(log)
    to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger.addHandler(to_file)
    if is_rank_zero:
        to_screen = Screen()
        to_screen.setLevel(logging.WARNING)
        to_screen.setFormatter(logging.Formatter("warning: %(message)s"))
        logger.addHandler(to_screen)
    return to_file


class Screen(logging.StreamHandler[TextIO]):
    """Writes to standard error, beside a progress bar if there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record."""
        bars = sys.modules.get("tqdm")
        if bars is None:
            super().emit(record)
        else:  # it takes the bar away before, and draws it again
            bars.tqdm.write(self.format(record), file=sys.stderr)


class LogFile(logging.Handler):
    """Writes lines into a rank's log, in a thread: no disk stops a training."""

    def __init__(self, log: TextIO) -> None:
        super().__init__()
        self._log = log
        self._pid = os.getpid()
        self._waiting: queue.SimpleQueue[str | threading.Event | None]
        self._waiting = queue.SimpleQueue()
        threading.Thread(target=self._run, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record."""
        self.write(self.format(record))

    def write(self, text: str) -> None:
        """Write a text, and end its line."""
        if os.getpid() == self._pid:
            self._waiting.put(text)
        else:  # a process that was forked off has no thread
            self._put(text)

    def flush(self) -> None:
        """Wait until all is written, or until a disk has had its time."""
        if os.getpid() == self._pid:
            is_done = threading.Event()
            self._waiting.put(is_done)
            is_done.wait(FLUSH_SECONDS)

    def close(self) -> None:
        """Close the file when all is written; does not wait for it."""
        super().close()
        self._waiting.put(None)

    def _run(self) -> None:
        while (item := self._waiting.get()) is not None:
            if isinstance(item, str):
                self._put(item)
            else:
                item.set()
        with contextlib.suppress(OSError):
            self._log.close()

    def _put(self, text: str) -> None:
        with contextlib.suppress(OSError, ValueError):  # full; closed
            self._log.write(text + "\n")


def rank_name(rank: int, world_size: int) -> str:
    """Return ``rank-N``, with as many digits on all ranks."""
    return f"rank-{rank:0{len(str(world_size - 1))}}"


def read_result(run_dir: Path) -> dict[str, Any]:
    """Read ``result.json``; nothing where it cannot be read."""
    return read_json(run_dir / "result.json")
