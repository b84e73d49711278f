"""The trials of a sweep: an Optuna study in the sweep folder, asked and told.

One process writes it; others may read it, such as ``optuna-dashboard``.
"""

from __future__ import annotations

import contextlib
import math
import random
import shlex
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState

from mpitrain.errors import MpitrainError, UsageError
from mpitrain.files import read_json
from mpitrain.flags import PROGRAM
from mpitrain.tools.sweep.config import OUTCOMES, SETTINGS, SWEEPS_DIR, script_words
from mpitrain.tools.sweep.space import (
    PRUNERS,
    RANKS,
    SAMPLERS,
    Search,
    Value,
    trial_flags,
)
from mpitrain.train.progress import format_metrics

JOURNAL = "study.journal"  # Optuna's storage, in the sweep folder
NAME = "sweep"  # of the study in it


class Trial(NamedTuple):
    """A trial that is to run."""

    number: int  # from 0
    flags: Mapping[str, Value]  # those that vary
    num_starts: int = 0  # in jobs that died before it had finished an epoch

    @property
    def name(self) -> str:
        """The name of its run folder."""
        return name_of(self.number)


def name_of(number: int) -> str:
    """Return the name of a trial's run folder."""
    return f"trial-{number:04}"


class Study:
    """The Optuna study of a sweep; for one thread of rank zero.

    Attributes:
        optuna: The study itself.
    """

    def __init__(self, path: Path, search: Search, num_trials: int, seed: int) -> None:
        self._search, self.num_trials = search, num_trials
        self._live: dict[int, optuna.trial.Trial] = {}  # asked or resumed in this job
        _repair(path / JOURNAL)
        self.optuna = study = optuna.create_study(
            study_name=NAME,
            storage=_storage(path),
            directions=[f"{mode}imize" for mode, _ in search.metrics],  # type: ignore[misc]
            load_if_exists=True,
        )
        study.set_metric_names([name for _, name in search.metrics])
        # Another seed for each job, else it would draw the same numbers again.
        seed += len(study.trials)
        self._random = random.Random(seed)
        study.sampler = _make("sampler", SAMPLERS, search.sampler, seed=seed)
        if search.pruner is not None:
            study.pruner = _make("pruner", PRUNERS, search.pruner)
        for values in search.grid() if search.is_grid else ():
            study.enqueue_trial(values, skip_if_exists=True)

    def note_ranks(self, num_ranks: int) -> int:
        """Note how many ranks this job has; return the most of any job until now."""
        most: int = max(num_ranks, self.optuna.user_attrs.get("num_ranks", 0))
        self.optuna.set_user_attr("num_ranks", most)
        return most

    def unfinished(self) -> list[Trial]:
        """Return the trials that an earlier job has begun and not finished."""
        found = []
        for begun in self.optuna.get_trials(False, (TrialState.RUNNING,)):
            number, attrs = begun.number, begun.user_attrs
            # Its id: what makes a Trial of what the storage has.
            trial = optuna.trial.Trial(self.optuna, begun._trial_id)  # noqa: SLF001
            self._live[number] = trial
            if "values" in attrs:
                found.append(Trial(number, attrs["values"], attrs.get("num_starts", 0)))
            else:  # the job ended just then
                self.fail(number, "was not begun")
        return found

    def ask(self) -> Trial | None:
        """Return another trial; ``None`` if there is none left."""
        trials = self.optuna.get_trials(deepcopy=False)
        waiting = sum(trial.state is TrialState.WAITING for trial in trials)
        if len(trials) - waiting >= self.num_trials:
            return None
        choices = [it for it in self._search.parameters if it.probabilities]
        draw = self._random.choices
        # No sampler of Optuna weighs choices: they are drawn here, and `ask` takes
        # them.
        if drawn := {it.name: draw(it.values, it.probabilities)[0] for it in choices}:
            self.optuna.enqueue_trial(drawn)
        trial = self.optuna.ask()  # of a grid: the next one that is enqueued
        self._live[trial.number] = trial
        values = self._search.suggest(trial)
        trial.set_user_attr("values", values)
        return Trial(trial.number, values)

    def set_starts(self, number: int, num_starts: int) -> None:
        """Note in how many jobs a trial was started that may have died of it."""
        self._live[number].set_user_attr("num_starts", num_starts)

    def should_prune(self, number: int, at: int, value: float) -> bool:
        """Take a trial's metric after an epoch or a step; return whether to end it."""
        if not math.isfinite(value):
            return False  # at its end it fails
        self._live[number].report(value, at)
        return self._live[number].should_prune()

    def finish(self, number: int, result: Mapping[str, Any]) -> str:
        """Take the result of a finished trial, and return it for the screen.

        Raises:
            MpitrainError: It lacks a metric, or one is not finite.
        """
        values = []
        for _, name in self._search.metrics:
            value = result.get(f"val_{name}")
            if not isinstance(value, int | float):
                known = [it[4:] for it in result if it.startswith("val_")]
                raise MpitrainError(
                    f"the metric {name!r} is {value!r}; expected a number. The "
                    f"validation has {', '.join(known) or 'none'}"
                )
            values.append(float(value))
        self.optuna.tell(number, values)
        return self.said(values)

    def said(self, values: Sequence[float]) -> str:
        """Return the values of a trial for the screen."""
        names = [name for _, name in self._search.metrics]
        return format_metrics(dict(zip(names, values, strict=True)))

    def prune(self, number: int) -> None:
        """Say that a trial was pruned."""
        self.optuna.tell(number, state=TrialState.PRUNED)

    def fail(self, number: int, error: str) -> None:
        """Say that a trial has failed."""
        self._live[number].set_user_attr("error", error)
        self.optuna.tell(number, state=TrialState.FAIL)


def load_study(path: Path) -> optuna.Study:
    """Read the study of a sweep folder."""
    if not (path / JOURNAL).is_file():
        raise UsageError(f"{path} is no sweep folder; expected one with {JOURNAL}")
    return optuna.load_study(study_name=NAME, storage=_storage(path))


def _storage(path: Path) -> JournalStorage:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
    # Of a resumed trial that has an epoch again.
    warnings.filterwarnings("ignore", "The reported value is ignored")
    return JournalStorage(JournalFileBackend(str(path / JOURNAL)))


def counts_of(study: optuna.Study) -> dict[str, int]:
    """Return how many trials are finished, pruned and failed."""
    found = Counter(trial.state.name for trial in study.get_trials(deepcopy=False))
    states = ("COMPLETE", "PRUNED", "FAIL")
    return {name: found[it] for name, it in zip(OUTCOMES, states, strict=True)}


def finished_trials(study: optuna.Study) -> list[FrozenTrial]:
    """Return the finished trials, the best by the first metric first."""
    found = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    sign = 1 if study.directions[0].name == "MINIMIZE" else -1
    return sorted(found, key=lambda trial: sign * trial.values[0])


def best_command(words: Sequence[str]) -> str:
    """Return what to type to train the best trial again, by the first metric.

    ``words``: the name of the sweep, or its folder.
    """
    if len(words) != 1:
        raise UsageError(f"--best: expected the name of one sweep, found {words}")
    path = Path(words[0])
    path = path if path.is_dir() else SWEEPS_DIR / path
    finished, settings = finished_trials(load_study(path)), read_json(path / SETTINGS)
    if not finished:
        raise UsageError(f"{path}: no trial is finished yet")
    values = finished[0].user_attrs["values"]
    num_ranks = values.get(RANKS) or settings["ranks_per_trial"]
    if settings["flags"][:1] == ["run"]:
        folder = Path("runs") / f"{path.name}-{name_of(finished[0].number)}"
        words = script_words(settings["flags"], values, folder)
    else:
        words = [*settings["flags"], *trial_flags(values)]
    return f"mpirun -np {num_ranks} {PROGRAM} {shlex.join(words)}"


def _make(
    key: str, classes: Mapping[str, str], named: Mapping[str, Any], **more: Any
) -> Any:
    options = {**more, **named}
    kind = getattr(getattr(optuna, f"{key}s"), classes[options.pop("name")])
    try:
        return kind(**options)
    except (TypeError, ValueError, ImportError) as error:
        raise UsageError(f"{key}: {error}") from None


def _repair(journal: Path) -> None:
    """Remove what a process that was killed left: its lock, half a line."""
    with contextlib.suppress(FileNotFoundError):
        for lock in journal.parent.glob(f"{journal.name}.lock*"):
            lock.unlink()
        # Optuna raises for half a record once another one follows it.
        data = journal.read_bytes()
        if not data.endswith(b"\n"):
            with journal.open("r+b") as file:
                file.truncate(data.rfind(b"\n") + 1)
