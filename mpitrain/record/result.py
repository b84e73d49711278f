"""How a job and a run ended, in ``result.json``."""

from __future__ import annotations

import contextlib
import json
import logging
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mpitrain.errors import Stopped
from mpitrain.files import write_json
from mpitrain.launch.job import Job
from mpitrain.mpi.collectives import MPI_PROCESS
from mpitrain.record.cost import cost_of
from mpitrain.record.run_dir import log_path, open_log, progress_of, read_result
from mpitrain.record.runs import is_finished

logger = logging.getLogger("mpitrain")

STEP_LINE = b'{"event": "step"'
COUNTS = ("skipped_samples", "skipped_steps")  # of epochs, and of a test


def record_job(run_dir: Path, log: Callable[[str], object] | None = None) -> None:
    """Let a run folder say how the job that runs fails; local.

    Of several folders, as of the folds of a cross-validation, it is the last one. The
    rank that prints the error calls ``log`` with it, in a script writes it into its
    log, and then into ``result.json``.
    """
    if (job := Job.current) is None or MPI_PROCESS.sub_worlds:
        return  # a part of the ranks, such as a trial of a sweep, is not the job
    is_first, job.run_dir = job.run_dir is None, run_dir.resolve()
    rank, size = job.comm.rank, job.comm.size
    job.watchdog.log_to(log_path(job.run_dir, rank, size))

    # Both ask the job for its folder when it fails: it may be another one by then.
    def write_log(text: str) -> None:
        if job.run_dir is not None and not is_finished(job.run_dir):
            with open_log(job.run_dir, rank, size, socket.gethostname()) as file:
                file.write(f"{text}\n")

    def write_result(text: str) -> None:
        if job.run_dir is not None:
            record_failure(job.run_dir, text, job.guard.status)

    if is_first:
        job.guard.on_failure += [log or write_log, write_result]


def record_failure(run_dir: Path, message: str, status: int = 1) -> None:
    """Write into ``result.json`` that the run failed; from the rank that knows it.

    A run that is finished stays so. With the ``status`` of `Stopped` it was stopped.
    """
    if is_finished(run_dir):
        return
    before = read_result(run_dir)
    was_stopped = before.get("status") == "stopped"
    values: dict[str, Any] = {"status": "failed", "error": message}
    if status == Stopped.exit_status:
        reason = message.rpartition("Stopped: ")[2]
        reason = before["stopped"] if was_stopped and "stopped" in before else reason
        values = {"status": "stopped", "stopped": reason}
    # Rank zero has the counts in its memory, and may be the one that is gone.
    record = run_dir / "metrics.jsonl"
    progress = progress_of(record)
    if was_stopped:  # it was not gone then; a loop may have written none
        progress = {k: max(num, before.get(k, 0)) for k, num in progress.items()}
    values |= {**progress, **cost_if_known(run_dir)}
    update_result(run_dir, **values)
    # Last: a long record takes longer to read than the end of a job waits.
    if not was_stopped and (counts := _counts_of(record)):
        update_result(run_dir, **values, **counts)


def _counts_of(path: Path) -> dict[str, Any]:
    """Return what the lines of a record add up to, and its last metrics."""
    sums: dict[str, Any] = {}
    values: dict[str, Any] = {}
    seconds = 0.0  # since the last epoch
    for row in _rows_but_steps(path):
        event = row.get("event")
        # A custom loop counts its seconds itself.
        if event == "begin" and "steps_per_epoch" in row and not sums:
            sums = {"train_seconds": 0.0, **dict.fromkeys(COUNTS, 0)}
        if event == "throughput":
            seconds += row.get("seconds", 0.0)
        if event in ("epoch", "validation", "test"):
            kind = "test_" if event == "test" else "val_"
            of_data = (k for k in row if k.startswith(kind))
            values |= {k: row[k] for k in of_data if k != f"{kind}samples"}
        if event in ("epoch", "test") and sums:
            for name in COUNTS:
                sums[name] += row.get(name, 0)
        if event == "epoch" and sums:
            sums["train_seconds"] += row.get("epoch_seconds", 0.0)
            seconds = 0.0
    if sums:
        sums["train_seconds"] += seconds
    return sums | values


def _rows_but_steps(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a record but those of steps, and one that is cut."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        for line in file:
            # Most are of steps: to parse a million of them takes seconds.
            if not line.startswith(STEP_LINE):
                with contextlib.suppress(ValueError):
                    yield json.loads(line)


def cost_if_known(run_dir: Path) -> dict[str, Any]:
    """Return the cost of the jobs of a run, for its result; empty if unknown."""
    return {"cost": cost} if (cost := cost_of(run_dir)) else {}


def update_result(run_dir: Path, **values: Any) -> None:
    """Write a status and more into ``result.json``; a warning where that cannot be.

    The error, or the reason of a stop, of the status before is dropped.
    """
    before = read_result(run_dir)
    kept = {k: it for k, it in before.items() if k not in ("stopped", "error")}
    try:
        write_json(run_dir / "result.json", {**kept, **values})
    except OSError as error:  # a full disk, say, which must not hide the first error
        logger.warning("result.json cannot be written: %s", error.strerror)
