"""``python -m mpitrain watch`` of a sweep folder. Imports neither torch nor Optuna."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from mpitrain.mpi.world import format_ranges
from mpitrain.record.run_dir import read_json, read_result
from mpitrain.record.runs import is_held
from mpitrain.tools.sweep.config import OUTCOMES, PROGRESS
from mpitrain.train.progress import format_metrics, format_seconds, say

POLL_SECONDS = 1.0
GONE_SECONDS = 10.0  # a job has ended that holds no lock and was silent for so long


def watch_sweep(path: Path, *, once: bool, keep: bool) -> None:
    """Show a sweep until its job ends; with `keep` until the sweep is finished."""
    shown: list[str] = []
    while True:
        progress, result = read_json(path / PROGRESS), read_result(path)
        lines = list(sweep_lines(path.absolute().name, progress))
        if lines != shown:
            say("\n".join(lines))
        shown = lines
        status, age = result.get("status"), time.time() - progress.get("time", 0.0)
        has_ended = status != "running" or age > GONE_SECONDS
        if has_ended and not is_held(path) and (status == "finished" or not keep):
            said = next(
                filter(None, map(result.get, ("stopped", "error", "summary"))), ""
            )
            say(said if status != "running" else "no job works on it any more")
            return
        if once:
            return
        time.sleep(POLL_SECONDS)


def sweep_lines(name: str, progress: Mapping[str, Any]) -> Iterator[str]:
    """Yield what there is to show: the sweep, and the trials that run."""
    if not progress:
        yield f"sweep {name}: no trial has begun"
        return
    counts = [f"{progress[it]} {it}" for it in OUTCOMES if progress[it]]
    done = sum(progress[it] for it in OUTCOMES)
    parts = [f"sweep {name}: {done}/{progress['trials']} trials", *counts]
    if best := progress["best"]:
        values = dict(zip(progress["metrics"], best["values"], strict=True))
        parts.append(f"best {best['trial']} {format_metrics(values)}")
    if progress["busy_share"] is not None:
        parts.append(f"ranks busy {progress['busy_share']:.0%}")
    if progress["seconds_left"] is not None:
        parts.append(f"limit in {format_seconds(progress['seconds_left'])}")
    yield " | ".join(parts)
    for trial in progress["running"]:
        said = f"epoch {trial['epoch']} done, {format_metrics(trial['values'])}"
        if not trial["epoch"]:
            said = "in its first epoch"
        yield f"  {trial['trial']} on ranks {format_ranges(trial['ranks'])}: {said}"
