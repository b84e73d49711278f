"""The trials of a sweep: an Optuna study in the sweep folder, asked and told.

One process writes it; others may read it, such as ``optuna-dashboard``.
"""

from __future__ import annotations

import contextlib
import math
import shlex
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from mpitrain.errors import MpitrainError, UsageError
from mpitrain.flags import PROGRAM
from mpitrain.record.run_dir import read_json
from mpitrain.tools.sweep.config import OUTCOMES, SETTINGS, SWEEPS_DIR
from mpitrain.tools.sweep.space import RANKS, Search, Value, flags_of

JOURNAL = "study.journal"  # Optuna's storage, in the sweep folder
NAME = "sweep"  # of the study in it

DIRECTIONS = {
    "max": optuna.study.StudyDirection.MAXIMIZE,
    "min": optuna.study.StudyDirection.MINIMIZE,
}
SAMPLERS: dict[str, Any] = {
    "tpe": optuna.samplers.TPESampler,
    "random": optuna.samplers.RandomSampler,
    "grid": optuna.samplers.RandomSampler,  # its trials are enqueued
    "cmaes": optuna.samplers.CmaEsSampler,
    "gp": optuna.samplers.GPSampler,
    "nsgaii": optuna.samplers.NSGAIISampler,
}
PRUNERS: dict[str, Any] = {
    "asha": optuna.pruners.SuccessiveHalvingPruner,
    "hyperband": optuna.pruners.HyperbandPruner,
    "median": optuna.pruners.MedianPruner,
}


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A trial that is to run."""

    number: int  # from 0
    values: Mapping[str, Value]  # of the flags that vary
    num_starts: int = 0
    """How often it was started in jobs that ended while it ran, not asked to stop."""

    @property
    def name(self) -> str:
        """The name of its run folder."""
        return f"trial-{self.number:04}"

    @property
    def flags(self) -> list[str]:
        """The flags that vary."""
        return flags_of(self.values)

    def num_ranks(self, otherwise: int) -> int:
        """Return how many ranks it takes."""
        return int(str(self.values.get(RANKS) or otherwise))


class Study:
    """The Optuna study of a sweep; for one thread of rank zero."""

    def __init__(self, path: Path, search: Search, num_trials: int, seed: int) -> None:
        self._search, self.num_trials = search, num_trials
        self._live: dict[int, optuna.trial.Trial] = {}  # those that run, by number
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        journal = path / JOURNAL
        _repair(journal)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what is experimental in Optuna
            self._study = optuna.create_study(
                study_name=NAME,
                storage=JournalStorage(JournalFileBackend(str(journal))),
                directions=[DIRECTIONS[mode] for mode, _ in search.metrics],
                load_if_exists=True,
            )
            # Another seed for each job, else it would draw the same numbers again.
            self._study.sampler = self._sampler(seed + len(self._study.trials))
            if search.pruner is not None:
                options = {k: v for k, v in search.pruner.items() if k != "name"}
                kind = PRUNERS[search.pruner["name"]]
                self._study.pruner = _make(kind, options, "pruner")
            self._study.set_metric_names([name for _, name in search.metrics])
        if search.is_grid:
            for values in search.grid():
                self._study.enqueue_trial(values, skip_if_exists=True)

    def _sampler(self, seed: int) -> optuna.samplers.BaseSampler:
        options = {k: v for k, v in self._search.sampler.items() if k != "name"}
        kind = SAMPLERS[self._search.sampler["name"]]
        return _make(kind, {"seed": seed, **options}, "sampler")  # type: ignore[no-any-return]

    def unfinished(self) -> list[Trial]:
        """Return the trials that an earlier job has begun and not finished."""
        found = []
        for begun in self._study.get_trials(False, (TrialState.RUNNING,)):
            attrs = begun.user_attrs
            # Its id: what makes a Trial of what the storage has.
            trial = optuna.trial.Trial(self._study, begun._trial_id)  # noqa: SLF001
            self._live[begun.number] = trial
            if "values" not in attrs:  # the job ended just then
                self.fail(begun.number, "was not begun")
                continue
            number, num_starts = begun.number, attrs.get("num_starts", 0)
            found += [
                Trial(number=number, values=attrs["values"], num_starts=num_starts)
            ]
        return found

    def ask(self) -> Trial | None:
        """Return another trial; ``None`` if there is none left."""
        begun = [t for t in self.all() if t.state is not TrialState.WAITING]
        if len(begun) >= self.num_trials:
            return None
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            trial = self._study.ask()
            values = self._search.suggest(trial)
        trial.set_user_attr("values", values)
        self._live[trial.number] = trial
        return Trial(number=trial.number, values=values)

    def set_starts(self, trial: Trial, num_starts: int) -> None:
        """Note how often a trial was started, or that it was asked to stop (0)."""
        self._live[trial.number].set_user_attr("num_starts", num_starts)

    def should_prune(self, number: int, epoch: int, value: float) -> bool:
        """Take a trial's metric after an epoch; return whether to end the trial."""
        if not math.isfinite(value):
            return False  # at its end it fails
        trial = self._live[number]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a resumed trial reports an epoch again
            trial.report(value, epoch)
        return trial.should_prune()

    def finish(self, number: int, result: Mapping[str, Any]) -> None:
        """Take the result of a finished trial.

        Raises:
            MpitrainError: It has no such metric, or one that is not finite.
        """
        values = [self.metric_of(result, name) for _, name in self._search.metrics]
        self._study.tell(number, values)

    @staticmethod
    def metric_of(result: Mapping[str, Any], name: str) -> float:
        """Return a metric of ``result.json``; an MpitrainError if it is not there."""
        value = result.get(f"val_{name}")
        if not isinstance(value, int | float):
            known = [it.removeprefix("val_") for it in result if it.startswith("val_")]
            raise MpitrainError(
                f"the metric {name!r} is {value!r}; expected a number. The validation "
                f"has {', '.join(known) or 'none'}"
            )
        return float(value)

    def prune(self, number: int) -> None:
        """Say that a trial was pruned."""
        self._study.tell(number, state=TrialState.PRUNED)

    def fail(self, number: int, error: str) -> None:
        """Say that a trial has failed."""
        self._live[number].set_user_attr("error", error)
        self._study.tell(number, state=TrialState.FAIL)

    def all(self) -> Sequence[FrozenTrial]:
        """Return all trials."""
        return self._study.get_trials(deepcopy=False)

    def counts(self) -> dict[str, int]:
        """Return how many trials are finished, pruned and failed."""
        return counts_of(self._study)

    def best(self) -> FrozenTrial | None:
        """Return the best finished trial, by the first metric; ``None`` without one."""
        return best_of(self._study)


def load_study(path: Path) -> optuna.Study:
    """Read the study of a sweep folder."""
    journal = path / JOURNAL
    if not journal.is_file():
        raise UsageError(f"{path} is no sweep folder; expected one with {JOURNAL}")
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    storage = JournalStorage(JournalFileBackend(str(journal)))
    return optuna.load_study(study_name=NAME, storage=storage)


def counts_of(study: optuna.Study) -> dict[str, int]:
    """Return how many trials are finished, pruned and failed."""
    found = Counter(trial.state.name for trial in study.get_trials(deepcopy=False))
    states = ("COMPLETE", "PRUNED", "FAIL")
    return {name: found[it] for name, it in zip(OUTCOMES, states, strict=True)}


def metrics_of(study: optuna.Study) -> list[str]:
    """Return the names of the metrics that are optimized."""
    return study.metric_names or []


def best_of(study: optuna.Study) -> FrozenTrial | None:
    """Return the best finished trial, by the first metric; ``None`` without one."""
    found = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    sign = 1 if study.directions[0].name == "MINIMIZE" else -1
    return min(found, key=lambda trial: sign * trial.values[0], default=None)


def best_command(words: Sequence[str]) -> str:
    """Return what to type to train the best trial of a sweep again.

    ``words``: the name of the sweep, or its folder.
    """
    if len(words) != 1:
        raise UsageError(f"--best: expected the name of one sweep, found {words}")
    path = Path(words[0])
    path = path if path.is_dir() else SWEEPS_DIR / path
    best, settings = best_of(load_study(path)), read_json(path / SETTINGS)
    if best is None:
        raise UsageError(f"{path}: no trial is finished yet")
    values = best.user_attrs["values"]
    num_ranks = values.get(RANKS) or settings["ranks_per_trial"]
    flags = shlex.join([*settings["flags"], *flags_of(values)])
    return f"mpirun -np {num_ranks} {PROGRAM} {flags}"


def _make(kind: Any, options: Mapping[str, Any], what: str) -> Any:
    try:
        return kind(**options)
    except (TypeError, ValueError, ImportError) as error:
        raise UsageError(f"{what}: {error}") from None


def _repair(journal: Path) -> None:
    """Remove what a process that was killed left: its lock, half a line."""
    with contextlib.suppress(FileNotFoundError):
        for lock in journal.parent.glob(f"{journal.name}.lock*"):
            lock.unlink()
        data = journal.read_bytes()
        if not data.endswith(b"\n"):
            with journal.open("r+b") as file:
                file.truncate(data.rfind(b"\n") + 1)
