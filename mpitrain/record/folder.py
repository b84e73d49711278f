"""The run folder: ``runs/<name>/`` and the files in it. Imports no torch."""

from __future__ import annotations

import json
import logging
import math
import os
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, TextIO

from mpitrain.errors import UsageError
from mpitrain.world import place


def reserve(runs_dir: Path, name: str | None) -> Path:
    """Make a new run folder. For one rank of the job.

    Args:
        runs_dir: Folder of all runs; made if need be.
        name: The run's name; ``None`` to make one from the date.

    Returns:
        The folder's absolute path.

    Raises:
        UsageError: A run of that name exists, or the folder cannot be made.
    """
    wanted = name or datetime.now().astimezone().strftime("%Y-%m-%d-%H%M%S")
    attempt = 1
    while True:
        suffix = f"-{attempt}" if attempt > 1 else ""
        path = (runs_dir / (wanted + suffix)).absolute()
        try:
            runs_dir.mkdir(parents=True, exist_ok=True)
            path.mkdir()
            (path / "logs").mkdir()
            write_json(path / "result.json", {"status": "running"})
            return path
        except FileExistsError:
            if name is None and runs_dir.is_dir():
                attempt += 1  # two runs started within a second
                continue
            raise UsageError(
                f"run folder {path} exists. Expected a new name: choose another "
                "--name, or move that folder away."
            ) from None
        except OSError as error:
            raise UsageError(
                f"cannot make the run folder {path}: {error.strerror}. "
                "Choose another --runs-dir."
            ) from None


def open_log(run_dir: Path, rank: int, world_size: int, hostname: str) -> TextIO:
    """Open this rank's log; its first line says who writes it.

    A rank that is killed leaves no words of its own, and MPICH's mpiexec names a dead
    rank by its process id alone: the first line tells which rank that was.

    Args:
        run_dir: The run folder.
        rank: This process's rank.
        world_size: Number of ranks.
        hostname: This machine's name.

    Returns:
        The open file ``logs/rank-<rank>.log``, flushed line by line.
    """
    folder = run_dir / "logs"
    # On a machine that does not share the filesystem with rank zero's.
    folder.mkdir(parents=True, exist_ok=True)
    width = len(str(world_size - 1))
    log = (folder / f"rank-{rank:0{width}}.log").open("a", buffering=1)
    now = datetime.now().astimezone().isoformat(timespec="seconds")
    log.write(f"pid {os.getpid()} is {place(rank, world_size, hostname)}, {now}\n")
    return log


def start_logging(log: TextIO, *, is_rank_zero: bool) -> None:
    """Let our loggers write into this rank's log; rank zero's warnings to the screen.

    Args:
        log: This rank's open log.
        is_rank_zero: Whether this rank has the screen.
    """
    logger = logging.getLogger("mpitrain")
    logger.setLevel(logging.INFO)
    logger.propagate = False
    to_file = logging.StreamHandler(log)
    to_file.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger.addHandler(to_file)
    if is_rank_zero:
        to_screen = logging.StreamHandler()
        to_screen.setLevel(logging.WARNING)
        to_screen.setFormatter(logging.Formatter("warning: %(message)s"))
        logger.addHandler(to_screen)


def write_whole(path: Path, text: str) -> None:
    """Write a file so that readers see the old or the new one, never a part."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    beside.write_text(text)
    os.replace(beside, path)


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write a JSON file whole."""
    write_whole(path, json.dumps(finite(values), indent=2, allow_nan=False) + "\n")


def finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """Put ``None`` for numbers that are not finite: JSON has no word for them.

    >>> finite({"loss": float("nan"), "step": 3})
    {'loss': None, 'step': 3}
    """
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in values.items()
    }


class Metrics:
    """``metrics.jsonl``: one JSON object a line, flushed by the line."""

    def __init__(self, run_dir: Path) -> None:
        self._file = (run_dir / "metrics.jsonl").open("a", buffering=1)

    def write(self, event: str, **values: object) -> None:
        """Add a line; floats are written whole, so that they read back as they were."""
        row = finite({"event": event, **values})
        self._file.write(json.dumps(row, allow_nan=False) + "\n")

    def close(self) -> None:
        """Close the file."""
        self._file.close()
