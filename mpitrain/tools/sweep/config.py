"""What a sweep is asked for: its flags, and the flags of each training.

Imports neither torch nor Optuna.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from mpitrain.config import NAME_PATTERN, TrainConfig
from mpitrain.console import shown
from mpitrain.errors import UsageError
from mpitrain.files import read_json, write_json
from mpitrain.flags import PROGRAM, read_flags
from mpitrain.launch.run_target import read_script, read_words
from mpitrain.plugins import require
from mpitrain.record.run_dir import read_result
from mpitrain.record.runs import differences, open_run
from mpitrain.settings import flag_name, setting
from mpitrain.tools.sweep.space import (
    Search,
    Value,
    check_names,
    read_search,
    trial_flags,
)
from mpitrain.tools.train.prepare import PreparedRun, check_stop_file, read_config

INSTALL = "optuna cmaes scipy"
SWEEPS_DIR = Path("sweeps")
SETTINGS = "sweep.json"  # what a sweep was begun with, in its folder
PROGRESS = "progress.json"  # what `watch` shows, in the same folder
DIR = "{dir}"  # in an argument of a script: the run folder of the trial
OUTCOMES = ("finished", "pruned", "failed")  # of trials


@dataclass(frozen=True, kw_only=True)
class SweepConfig:
    """Search hyperparameters. Flags of every training follow after --, or a script.

    `-- run script.py --out {dir}` runs a script that uses `mpitrain.Trainer`.
    `sweep --best NAME` prints the command of the best trial.
    """

    space: str = setting(metavar="SPACE", is_positional=True)
    """A YAML file with the search space, also one of W&B; or package.module:function
    that takes an Optuna trial."""
    trials: int | None = setting(None, minimum=1)
    """Number of trials, also those that fail or are pruned. Default: that of the
    space, else 20. A grid always runs every combination."""
    ranks_per_trial: int = setting(1, minimum=1)
    """Ranks that train one model, unless the space sets `ranks`."""
    hours: float | None = setting(None, above=0)
    """Stop the job after this many hours; the same command resumes the sweep."""
    name: str | None = None
    """Name of the sweep and its folder. Default: that of the space."""
    sweeps_dir: Path = SWEEPS_DIR
    """Folder that holds the sweep folders."""
    share_gpus: bool = False
    """Allow two trials to train on one GPU, where its ranks share it."""

    def __post_init__(self) -> None:
        if not re.fullmatch(NAME_PATTERN, self.path.name):
            raise UsageError(
                f"--name {self.path.name!r} cannot be the name of a folder; expected "
                "letters, digits and _ . + = - (not first)"
            )

    @property
    def path(self) -> Path:
        """The sweep folder."""
        return self.sweeps_dir / (self.name or Path(self.space.rpartition(":")[2]).stem)


def read_sweep(words: Sequence[str]) -> SweepConfig:
    """Read the flags of a sweep, without those of the training."""
    program = f"{PROGRAM} sweep"
    return read_flags(SweepConfig, words, program=program, files=False)


@dataclass(frozen=True, kw_only=True)
class PreparedSweep(PreparedRun):
    """A sweep whose folder this job has opened; `config` is what all trials share."""

    options: SweepConfig
    search: Search
    flags: Sequence[str]  # of every training; or ``run``, a script and its arguments
    has_trials: bool  # that earlier jobs have begun

    def trial_words(self, name: str, values: Mapping[str, Value]) -> list[str]:
        """Return the flags of a trial's training; of a script, what follows `run`."""
        if self.search.is_of_script:
            return script_words(self.flags, values, self.run_dir / name)[1:]
        words = [*self.flags, *trial_flags(values), "--name", name]
        words += ["--runs-dir", str(self.run_dir)]
        if "wandb" in self.config.log and self.config.wandb_group is None:
            words += ["--wandb-group", self.run_dir.name]
        return words


def prepare(options: SweepConfig, flags: Sequence[str]) -> PreparedSweep:
    """Make the sweep folder, or open the existing one. For rank zero."""
    require("optuna", "sweep", INSTALL)
    search, training = read_training(options, flags)
    folder = open_run(options.sweeps_dir, options.path.name, exists="resume")
    path, settings = folder.path, {"flags": list(flags), "space": search.source}
    settings["ranks_per_trial"] = options.ranks_per_trial
    if (path / "metrics.jsonl").exists():
        raise UsageError(f"{path} is the folder of a run; expected another --name")
    if changed := differences(read_json(path / SETTINGS), settings, ()):
        raise UsageError(
            f"sweep {path.name} was begun with other settings: {'; '.join(changed)}.\n"
            "Expected the same, or another --name"
        )
    write_json(path / SETTINGS, settings)
    done, before = "", read_result(path)
    is_finished = before.get("status") == "finished"
    if is_finished and search.num_trials(options.trials) <= before["trials"]:
        done = (
            f"finished: {before.get('summary')}; see {shown(path)}. Nothing to do: "
            "another --name begins another sweep, more --trials continue this one"
        )
    done, status = check_stop_file(path, done)
    return PreparedSweep(
        config=training,
        folder=folder,
        done=done,
        status=status,
        options=options,
        search=search,
        flags=tuple(flags),
        has_trials=any(path.glob("trial-*")),
        limit_seconds=None if options.hours is None else 3600 * options.hours,
    )


def read_training(
    options: SweepConfig, flags: Sequence[str]
) -> tuple[Search, TrainConfig]:
    """Read the search and the flags of every training; check the names in the space."""
    is_of_script = flags[:1] == ["run"]
    search = read_search(options.space, is_of_script=is_of_script)
    training = _read_script(flags[1:]) if is_of_script else read_config(flags)
    if search.is_grid and (options.trials or search.trials):
        raise UsageError(
            f"found {options.trials or search.trials} trials, but the sampler grid "
            "tries all combinations; expected no number of trials"
        )
    for name, facts in training.changed.items():
        if facts.is_set_by_sweep:
            hours = " Expected --hours before --" * (name == "time_limit")
            raise UsageError(
                f"{flag_name(name)} has no place in the trainings of a sweep.{hours}"
            )
    if not is_of_script:
        check_names(search.names, dict(training.task_arguments))
    return search, training


def _read_script(words: Sequence[str]) -> TrainConfig:
    """Check what follows ``run``; return a configuration with its launch."""
    request = read_words(words)
    target = request.target
    if target.kind == "program":
        raise UsageError(
            "found run --no-python after --; expected a script, or -m and a module, "
            "that trains by mpitrain.Trainer"
        )
    if not any(DIR in word for word in target.args):
        raise UsageError(
            f"all trials would write into one folder: no argument of {target.name} has "
            f"{DIR}, which stands for the run folder of a trial.\n"
            f"Type such as: -- run {target.name} --out {DIR}"
        )
    if target.kind == "script":
        read_script(target.name)
    # `run` has no limit by default; a trial that hangs would keep its ranks for ever.
    hang_timeout = request.config.hang_timeout or TrainConfig().launch.hang_timeout
    return TrainConfig(launch=replace(request.config, hang_timeout=hang_timeout))


def script_words(
    words: Sequence[str], values: Mapping[str, Value], folder: Path
) -> list[str]:
    """Return ``run``, a script and its arguments, with a trial's folder and flags.

    >>> script_words(["run", "a.py", "--out={dir}"], {"lr": 0.1}, Path("runs/1"))
    ['run', 'a.py', '--out=runs/1', '--lr', '0.1']
    """
    words = [word.replace(DIR, str(folder)) for word in words]
    return [*words, *trial_flags(values, is_of_script=True)]
