"""What a command line asks for: a new run, one to resume, or nothing to do.

For rank zero, on behalf of all, before any long import.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from mpitrain.checkpoint.preemption import STOP_FILE, forget_stop
from mpitrain.config import LOGGERS, TrainConfig, seconds_of
from mpitrain.console import shown
from mpitrain.errors import Stopped, UsageError
from mpitrain.files import read_yaml, write_atomic
from mpitrain.flags import PROGRAM, read_flags
from mpitrain.plugins import require
from mpitrain.record.loggers.base import FILE_LOGGERS
from mpitrain.record.runs import Exists, RunFolder, differences, is_finished, open_run
from mpitrain.settings import Flag
from mpitrain.tools.train.task_flags import task_flags, task_in
from mpitrain.train.progress import finished_line


@dataclass(frozen=True, kw_only=True)
class PreparedRun:
    """A run that this job has opened."""

    config: TrainConfig
    folder: RunFolder
    done: str  # why there is nothing to do; empty if there is something
    status: int  # the exit status, if there is nothing to do
    limit_seconds: float | None  # how long this job may take

    @property
    def run_dir(self) -> Path:
        """The path of the folder."""
        return self.folder.path


def prepare(config: TrainConfig) -> PreparedRun:
    """Make the run folder, or open the existing one."""
    # Before a folder is made.
    for logger in {*LOGGERS}.difference(FILE_LOGGERS).intersection(config.log):
        require(logger, f"--log {logger}")
    name = config.name
    if config.dry_run and name is not None:
        name += "-dry-run"  # the name itself is for the training
    exists: Exists = "refuse" if config.resume == "never" else "resume"
    if config.new_run or config.dry_run:
        exists = "new name"
    folder = open_run(config.runs_dir, name, exists=exists)
    run_dir = folder.path
    done = ""
    if not folder.is_new:
        _refuse_changes(config, run_dir)
        if (result := is_finished(run_dir)) is not None:
            done = (
                f"{finished_line(result)}; see {shown(run_dir)}. Nothing to do: "
                "--new-run trains anew"
            )
    done, status = check_stop_file(run_dir, done)
    if not done:
        write_atomic(run_dir / "config.yaml", config.as_yaml(run_dir.name))
    return PreparedRun(
        config=config,
        folder=folder,
        done=done,
        status=status,
        limit_seconds=seconds_of(config.time_limit),
    )


def read_config(
    flags: Sequence[str], *, only_common: bool = False, further: str = ""
) -> TrainConfig:
    """Read the flags of a training; the others say what ``--help`` shows.

    With ``--task`` it imports the user's module, which has flags, too.
    """
    defaults: TrainConfig | None = None
    of_task: Sequence[Flag] = ()
    if reference := task_in(flags):
        defaults, of_task = task_flags(reference)
    return read_flags(
        TrainConfig,
        flags,
        program=PROGRAM,
        only_common=only_common,
        further=further,
        defaults=defaults,
        of_task=of_task,
    )


def check_stop_file(run_dir: Path, done: str) -> tuple[str, int]:
    """Return why there is nothing to do, `done` or a stop file, and the exit status."""
    if done or forget_stop(run_dir):
        return done, 0
    stop = shown(run_dir / STOP_FILE)
    done = f"{stop} exists, newer than the last stop: remove it, to resume"
    return done, Stopped.exit_status


def _refuse_changes(config: TrainConfig, run_dir: Path) -> None:
    before = read_yaml(run_dir / "config.yaml")  # {}: its first job ended before that
    if changed := differences(before, config.as_plain(run_dir.name), config.may_change):
        raise UsageError(
            f"run {run_dir.name} was begun with another configuration: "
            f"{'; '.join(changed)}.\nExpected the same. Type what it was begun with; "
            f"or begin another one from its checkpoint, --name OTHER --resume "
            f"{shown(run_dir)}; or anew, --new-run"
        )
