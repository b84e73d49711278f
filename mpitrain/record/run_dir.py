"""The run folder: ``runs/NAME/`` and the files in it. Imports no torch."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import sys
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from mpitrain.console import say
from mpitrain.files import read_json
from mpitrain.mpi.world import rank_label
from mpitrain.record.background import BackgroundWriter

TAIL_BYTES = 1 << 16  # of a record, in which its last step is
MAX_WAITING = 100_000  # lines that may wait for the disk
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
    logger.propagate = False  # to the user's handlers, on every rank
    to_file = LogFile(log)
    to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger.addHandler(to_file)
    if is_rank_zero:
        to_screen = Screen()
        to_screen.setLevel(logging.WARNING)
        to_screen.setFormatter(logging.Formatter("warning: %(message)s"))
        logger.addHandler(to_screen)
    return to_file


class Screen(logging.Handler):
    """Writes to standard error, beside a progress bar if there is one."""

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record."""
        try:
            say(self.format(record), sys.stderr)
        except OSError:
            pass  # nobody reads it any more
        except Exception:
            self.handleError(record)


class LogFile(logging.Handler):
    """Writes lines into a rank's log, in a thread: no disk stops a training."""

    def __init__(self, log: TextIO) -> None:
        super().__init__()
        self._log, self._pid = log, os.getpid()
        self._writer = BackgroundWriter(
            log.name, self._write_bytes, MAX_WAITING, log.close
        )
        self._writer.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Write a record."""
        self.write(self.format(record))

    def write(self, text: str) -> None:
        """Write a text, and end its line."""
        data = f"{text}\n".encode(errors="backslashreplace")
        if os.getpid() == self._pid:
            self._writer.put(data)
        else:  # a fork has no thread, and its copy of the lock may be held for ever
            with contextlib.suppress(OSError):
                self._write_bytes(data)

    def flush(self) -> None:
        """Wait until all is written, or until a disk has had its time."""
        if os.getpid() == self._pid:
            self._writer.flush(FLUSH_SECONDS)

    def close(self) -> None:
        """Write what waits, as `flush`, and close the file."""
        super().close()
        self.flush()
        if os.getpid() == self._pid:
            self._writer.close()

    def _write_bytes(self, data: bytes) -> int:
        return os.write(self._log.fileno(), data)


def rank_name(rank: int, world_size: int) -> str:
    """Return ``rank-N``, with as many digits on all ranks."""
    return f"rank-{rank:0{len(str(world_size - 1))}}"


def read_result(run_dir: Path) -> dict[str, Any]:
    """Read ``result.json``; nothing where it cannot be read."""
    return read_json(run_dir / "result.json")


def progress_of(path: Path) -> dict[str, int]:
    """Return the last ``steps`` and ``epochs`` of a record, from its last lines."""
    found: dict[str, int] = {}
    with contextlib.suppress(OSError), path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
        for line in file:
            with contextlib.suppress(ValueError, KeyError, TypeError):  # of a cut line
                row = json.loads(line)
                if row["event"] in ("step", "epoch"):
                    found["steps"] = int(row["step"])
                    # The line of the last epoch may be far before these.
                    epochs = int(row["epoch"]) - (row["event"] == "step")
                    found["epochs"] = max(0, epochs)  # a loop may count from 0
    return found
