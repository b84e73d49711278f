"""``python -m mpitrain diff RUN RUN``: the first difference of two runs."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from mpitrain.checkpoint.layout import list_checkpoints
from mpitrain.checkpoint.storage import CheckpointReader
from mpitrain.checkpoint.tensors import OBJECTS
from mpitrain.config import TrainConfig
from mpitrain.errors import UsageError
from mpitrain.record.environment import facts_for_bits
from mpitrain.record.fingerprints import FILE, FingerprintFile, hash_of
from mpitrain.record.reading import NOT_LOGGED, Run
from mpitrain.record.runs import differences
from mpitrain.settings import facts_of, setting
from mpitrain.tools.export import is_complete, read_tensors, read_weights
from mpitrain.tools.replay.bisect import bisect

MAX_NAMED = 4  # tensors that a line names

Values: TypeAlias = Mapping[int, Mapping[str, Any]]  # by step or epoch, and by name


@dataclass(frozen=True, kw_only=True)
class DiffConfig:
    """Name the first step, micro-batch and tensor whose bits differ between two runs.

    The exit status is 0 if nothing differs that both have, 1 if something does. Record
    more with --fingerprint N. With --replay, what `replay` takes may follow --.
    """

    first: Path = setting(metavar="RUN", is_positional=True)
    """A run folder, such as runs/NAME."""
    second: Path = setting(metavar="RUN", is_positional=True)
    """The run folder to compare it with."""
    replay: bool = False
    """Compute the steps of both again, to name step, micro-batch, layer and tensor."""
    second_code: Path | None = setting(None, flag="with")
    """Replay the second run in this folder, with the code there. Default: both here."""

    def __post_init__(self) -> None:
        folder = self.second_code
        if folder is not None and not (self.replay and folder.is_dir()):
            raise UsageError(
                f"--with {folder}: expected an existing folder, and --replay"
            )


def diff(config: DiffConfig) -> tuple[list[str], bool, tuple[int, int] | None]:
    """Compare two runs; return lines to print, and whether they differ.

    Also returns the last checkpoint with equal weights, and the first step that
    differs; ``None`` if none does.
    """
    runs = Run(config.first), Run(config.second)
    values = [*_values(runs)]
    if not any(one.keys() & other.keys() for _, _, (one, other) in values):
        raise UsageError(
            f"{config.first} and {config.second} have no step and no checkpoint in "
            "common; expected two runs that have trained"
        )
    lines = []
    ignored = [it for it, facts in facts_of(TrainConfig).items() if not facts.in_diff]
    for what, (before, now) in (
        ("configuration", [run.config for run in runs]),
        ("environment", [facts_for_bits(run.environment) for run in runs]),
    ):
        changed = "; ".join(differences(before, now, ignored)) or "the same"
        lines.append(f"{what}: {changed if before and now else 'not recorded'}")
    differs = False
    steps: list[int] = []
    alike: list[int] = []  # checkpoints
    for name, unit, (one, other) in values:
        line, is_found = compare(one, other, unit)
        lines.append(f"{name}: {line}")
        differs |= is_found
        if is_found and unit == "step":
            steps.append(next(first for first, _ in _changes(one, other)))
        if name == "checkpoints":
            alike = [it for it in one.keys() & other.keys() if one[it] == other[it]]
    if not steps:
        return lines, differs, None
    last = max((it for it in alike if it < min(steps)), default=0)
    return lines, differs, (last, min(steps))


def replay(
    config: DiffConfig, steps: tuple[int, int] | None, words: Sequence[str]
) -> str:
    """Replay both runs between two steps; return what differs first, in words.

    ``words`` are for `mpitrain replay`.
    """
    if steps is None:
        return "replay: no step differs"
    runs = config.first, config.second
    return bisect(runs, steps[1], steps[0], words, config.second_code)


def _values(runs: tuple[Run, Run]) -> Iterator[tuple[str, str, Sequence[Values]]]:
    yield "steps", "step", [_steps(run) for run in runs]
    files = [FingerprintFile(run.path / FILE) for run in runs]
    for file in files:
        file.update()
    yield "losses", "step", [file.losses for file in files]
    yield "weights", "step", [file.weights for file in files]
    epochs = [{e.epoch: dict(e.values) for e in run.metrics.epochs} for run in runs]
    yield "validation", "epoch", epochs
    within = [{it.step: {**it.values} for it in r.metrics.validations} for r in runs]
    if all(within):
        yield "validation within epochs", "step", within
    yield "checkpoints", "step", _checkpoints(runs)
    yield "model.pt", "step", [_model_file(run) for run in runs]


def _model_file(run: Run) -> Values:
    file = run.path / "model.pt"
    if not file.is_file():
        return {}
    with file.open("rb") as opened:
        digest = hashlib.file_digest(opened, "sha256").hexdigest()
    return {max(_steps(run), default=0): {"SHA-256": digest}}


def _steps(run: Run) -> Values:
    found: dict[int, dict[str, float]] = {}
    for row in run.metrics.steps:
        values = {"train_loss": row.loss, "gradient_norm": row.grad_norm, "lr": row.lr}
        values |= row.losses
        of_step = found.setdefault(row.step, values)
        if of_step is values:
            continue
        # A custom loop has logged the step by several calls, maybe a name twice.
        for name, value in values.items():
            if of_step.get(name, NOT_LOGGED) is NOT_LOGGED:
                of_step[name] = value
            elif value is not NOT_LOGGED:
                names = (f"{name} ({i})" for i in itertools.count(2))
                of_step[next(it for it in names if it not in of_step)] = value
    return found


def _checkpoints(runs: tuple[Run, Run]) -> Sequence[Values]:
    """Hash weights and other objects of the same steps, up to the first difference.

    Checkpoints that are broken are left out, with a warning.
    """
    found = [{it.step: it for it in list_checkpoints(run.path)} for run in runs]
    hashes: list[dict[int, dict[str, str]]] = [{}, {}]
    for step in sorted(found[0].keys() & found[1].keys()):
        pair = [checkpoints[step] for checkpoints in found]
        if not all(is_complete(it) for it in pair):
            continue
        for checkpoint, of_run in zip(pair, hashes, strict=True):
            reader = CheckpointReader(checkpoint)
            state = read_weights(reader, average=False) | read_tensors(reader, OBJECTS)
            of_run[step] = {name: hash_of(value) for name, value in state.items()}
        if hashes[0][step] != hashes[1][step]:
            break  # later ones differ, too, and take as long to read
    return hashes


def compare(one: Values, other: Values, unit: str) -> tuple[str, bool]:
    """Describe the first difference of values by step or epoch, and by name.

    >>> before = {4: {"a": 1.0, "b": "hash"}}
    >>> compare(before, {4: {"a": 1.0, "b": "another"}}, "step")
    ('step 4 differs: b', True)
    >>> compare(before, before, "step")
    ('the same (1, up to step 4)', False)
    >>> compare({**before, 8: {}}, before, "step")
    ('the same (1, up to step 4; 2 and 1 recorded)', False)
    """
    both = sorted(one.keys() & other.keys())
    recorded = f"{len(one)} and {len(other)} recorded"
    if not both:
        return f"none in common ({recorded})", False
    for at, changed in _changes(one, other):
        shown = [
            name if isinstance(value, str) else f"{name} {value} and {its}"
            for name, (value, its) in list(changed.items())[:MAX_NAMED]
        ]
        if len(changed) > MAX_NAMED:
            shown.append(f"and {len(changed) - MAX_NAMED} more of {len(one[at])}")
        last = max((it for it in both if it < at), default=None)
        before = "" if last is None else f"; the same up to {unit} {last}"
        return f"{unit} {at} differs: {', '.join(shown)}{before}", True
    rest = "" if one.keys() == other.keys() else f"; {recorded}"
    return f"the same ({len(both)}, up to {unit} {both[-1]}{rest})", False


def _changes(one: Values, other: Values) -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield each step or epoch that differs, with pairs of values by name."""
    for at in sorted(one.keys() & other.keys()):
        pairs = {
            n: (one[at].get(n), other[at].get(n)) for n in {**one[at], **other[at]}
        }
        # As text, for which nan is nan.
        changed = {n: (a, b) for n, (a, b) in pairs.items() if repr(a) != repr(b)}
        if changed:
            yield at, changed
