"""What a command finds: nothing yet, a run to go on with, or one that is over.

For rank zero, on behalf of all, before any long import.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import yaml

from mpitrain.errors import UsageError
from mpitrain.record.folder import read_result, write_whole
from mpitrain.record.loggers.choice import refuse_missing
from mpitrain.record.progress import finished_words
from mpitrain.record.recorder import shown
from mpitrain.record.runs import differences, is_finished, open_run
from mpitrain.train.config import MAY_CHANGE, TrainConfig
from mpitrain.train.stopping import CAN_GO_ON, STOP_FILE


@dataclass(frozen=True, kw_only=True)
class Beginning:
    """Where a training begins."""

    config: TrainConfig
    """What was asked."""
    run_dir: Path
    """The run folder."""
    run_id: str
    """The run's own, in all of its jobs."""
    is_new: bool
    """Whether no job has written into the folder before."""
    over: str = ""
    """Why there is nothing to do, in words; empty where there is."""
    status: int = 0
    """The exit status, where there is nothing to do."""
    warning: str = ""
    """What the user should know; may be empty."""


def begin(config: TrainConfig) -> Beginning:
    """Make the run folder, or take the one that is there.

    Args:
        config: What was asked.

    Raises:
        UsageError: It cannot be had, or was begun with another configuration; or a
            library that was asked for is missing.
    """
    refuse_missing(config)
    name = config.name
    if config.dry_run and name is not None:
        name += "-dry-run"  # the name itself is for the training
    folder = open_run(
        config.runs_dir,
        name,
        exists="new name"
        if config.new_run or config.dry_run
        else "refuse"
        if config.resume == "never"
        else "go on",
    )
    run_dir = folder.path
    over, status = "", 0
    if not folder.is_new:
        _refuse_changes(config, run_dir)
        result = is_finished(run_dir)
        if result is not None:
            over = (
                f"{finished_words(result)}; see {shown(run_dir)}. Nothing to do: "
                "--new-run trains anew"
            )
    stop = run_dir / STOP_FILE
    if not over and stop.exists() and not forget_stop(run_dir):
        over = f"{shown(stop)} is there, newer than the last stop: remove it, to go on"
        status = CAN_GO_ON
    if not over:
        write_whole(run_dir / "config.yaml", config.as_yaml(run_dir.name))
    return Beginning(
        config=config,
        run_dir=run_dir,
        run_id=folder.run_id,
        is_new=folder.is_new,
        over=over,
        status=status,
        warning=""
        if folder.has_lock
        else f"{run_dir} is on a file system without locks: nobody would notice a "
        "second job that writes into it",
    )


def forget_stop(run_dir: Path) -> bool:
    """Remove the stop file by which a run has stopped already; return whether."""
    stop, result = run_dir / STOP_FILE, run_dir / "result.json"
    is_old = (
        read_result(run_dir).get("status") == "stopped"
        and stop.stat().st_mtime <= result.stat().st_mtime
    )
    if is_old:
        stop.unlink()
    return is_old


def _refuse_changes(config: TrainConfig, run_dir: Path) -> None:
    """Make sure that a run goes on as it was begun."""
    try:
        before = yaml.safe_load((run_dir / "config.yaml").read_text())
    except (OSError, ValueError, yaml.YAMLError):
        return  # its first job ended before it was written
    now = config.as_plain(run_dir.name)
    changed = differences(before, now, MAY_CHANGE) if isinstance(before, dict) else []
    if changed:
        raise UsageError(
            f"run {run_dir.name} was begun otherwise: {'; '.join(changed)}.\nExpected "
            "the same training. Type what it was begun with; or begin another one from "
            f"where it is, --name OTHER --resume {shown(run_dir)}; or anew, --new-run"
        )
