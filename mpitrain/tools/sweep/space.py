"""The search: which flags vary, how values are sampled, and what is optimized.

From our YAML, from a sweep file of W&B, or from a function of the user's. Imports no
Optuna: a trial is anything with ``suggest_float``, ``suggest_int`` and
``suggest_categorical``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from mpitrain.config import TASK_PREFIX, TrainConfig
from mpitrain.errors import UsageError, did_you_mean, usage_errors_in
from mpitrain.flags import read_flag_file, words_of
from mpitrain.plugins import is_reference, load_reference
from mpitrain.settings import facts_of

RANKS = "ranks"  # in a space: ranks of the trial
DEFAULT_TRIALS = 20
KEYS = ("metric", "sampler", "pruner", "trials", "space")
KINDS = ("choices", "uniform", "log", "int", "log_int")

# Optuna's classes, by our names. The trials of a grid are given to it.
SAMPLERS = {
    "tpe": "TPESampler",
    "random": "RandomSampler",
    "grid": "RandomSampler",
    "cmaes": "CmaEsSampler",
    "gp": "GPSampler",
    "nsgaii": "NSGAIISampler",
}
PRUNERS = {
    "asha": "SuccessiveHalvingPruner",
    "hyperband": "HyperbandPruner",
    "median": "MedianPruner",
}
WANDB_METHODS = {"bayes": "tpe", "random": "random", "grid": "grid"}

Value = str | int | float | bool | None


class Parameter(NamedTuple):
    """One flag that varies."""

    name: str
    kind: str  # "categorical", "float" or "int": that of Optuna's ``suggest_...``
    values: Sequence[Any]  # the choices; else lowest and highest
    options: Mapping[str, Any]  # of a range: log, step
    condition: Mapping[str, Sequence[Value]]
    """It exists where each of these, which stand before it, has one of these values."""
    probabilities: Sequence[float] | None = None  # of the choices

    def applies(self, values: Mapping[str, Value]) -> bool:
        """Whether it exists beside these values."""
        return all(
            name in values and values[name] in allowed
            for name, allowed in self.condition.items()
        )

    def suggest(self, trial: Any) -> Value:
        """Let an Optuna trial choose a value."""
        suggest: Callable[..., Value] = getattr(trial, f"suggest_{self.kind}")
        values = [self.values] if self.kind == "categorical" else self.values
        return suggest(self.name, *values, **self.options)

    def grid(self) -> Sequence[Value]:
        """Return all its values."""
        if self.kind == "categorical":
            return self.values
        step = self.options.get("step", 1 if self.kind == "int" else None)
        if step is None or "log" in self.options:
            raise UsageError(f"{self.name}: a grid needs choices, or a step")
        low, high = self.values
        # 0.3 / 0.1 is a little less than 3.
        return [low + i * step for i in range(1 + int((high - low) / step + 1e-9))]


@dataclass(frozen=True, kw_only=True)
class Search:
    """What a sweep searches, and how."""

    source: Any  # as it was read, but for trials: whether two searches are the same
    metrics: Sequence[tuple[str, str]]  # ("max" or "min", name)
    sampler: Mapping[str, Any]  # its name, and what Optuna's class takes
    pruner: Mapping[str, Any] | None
    parameters: Sequence[Parameter]
    function: str  # instead of parameters: package.module:function; else empty
    trials: int | None
    is_of_script: bool = False  # any names are flags, in the spelling of the space

    @property
    def is_grid(self) -> bool:
        """Whether all combinations are tried, each once."""
        return bool(self.sampler["name"] == "grid")

    @property
    def names(self) -> set[str]:
        """The flags that vary, as far as they are known before the first trial."""
        return {parameter.name for parameter in self.parameters}

    @property
    def max_ranks(self) -> int:
        """The most ranks that the space asks for; 0 where it asks for none."""
        values: list[Any] = []
        for it in self.parameters:
            if it.name == RANKS:
                is_listed = it.kind != "float" and "log" not in it.options
                values += it.grid() if is_listed else it.values
        return max((it for it in values if type(it) is int), default=0)

    def num_trials(self, asked: int | None) -> int:
        """Return the number of trials; those of a grid are all there are."""
        if self.is_grid:
            return sum(1 for _ in self.grid())
        return asked or self.trials or DEFAULT_TRIALS

    def suggest(self, trial: Any) -> dict[str, Value]:
        """Let an Optuna trial choose the values of its flags."""
        if self.function:
            found = load_reference(self.function, "the space")(trial)
            if not isinstance(found, Mapping):
                raise UsageError(
                    f"{self.function} returned {type(found).__name__}; expected flags "
                    "by name, such as {'lr': 0.1}"
                )
            if not self.is_of_script:
                check_names(found)
            return dict(found)
        values: dict[str, Value] = {}
        # In the order of the space: a condition names only what stands before.
        for parameter in self.parameters:
            if parameter.applies(values):
                values[parameter.name] = parameter.suggest(trial)
        return values

    def grid(self, first: int = 0, **values: Value) -> Iterator[dict[str, Value]]:
        """Yield all combinations of values, from the ``first`` parameter on."""
        if first == len(self.parameters):
            yield values
            return
        parameter = self.parameters[first]
        if not parameter.applies(values):
            yield from self.grid(first + 1, **values)
            return
        for value in parameter.grid():
            yield from self.grid(first + 1, **values, **{parameter.name: value})


def check_names(names: Iterable[str], of_task: Collection[str] | None = None) -> None:
    """Check that flags may vary; ``of_task``: those of its arguments, if known."""
    facts = facts_of(TrainConfig)
    known = [
        it.name
        for it in fields(TrainConfig)  # `launch` has no facts
        if (of := facts.get(it.name)) and of.has_flag and not of.is_set_by_sweep
    ]
    known += of_task or ()
    for name in names:
        is_of_task = of_task is None and name.startswith(TASK_PREFIX)
        if name not in {*known, RANKS} and not is_of_task:
            if TASK_PREFIX + name in known:
                known = [TASK_PREFIX + name]
            raise UsageError(
                f"the space names {name!r}; expected flags of a training that a sweep "
                f"does not set, such as lr, or {RANKS}.{did_you_mean(name, known)}"
            )


def trial_flags(
    values: Mapping[str, Value], *, is_of_script: bool = False
) -> list[str]:
    """Return values as flags of a training, or of a script.

    A script's keep the spelling of the space, and a null is left out.

    >>> values = {"lr": 0.1, "weight_decay": None, "use_ema": True, "ranks": 2}
    >>> trial_flags(values)
    ['--lr', '0.1', '--weight-decay', 'None', '--use-ema']
    >>> trial_flags(values | {"shift": -1e-5}, is_of_script=True)
    ['--lr', '0.1', '--use_ema', '--shift=-1e-05']
    """
    values = {name: it for name, it in values.items() if name != RANKS}
    if not is_of_script:
        return words_of(values)
    words: list[str] = []
    for name, value in values.items():
        if isinstance(value, bool):
            words.append(f"--{name}" if value else f"--no-{name}")
        elif str(value).startswith("-"):  # argparse takes -1e-05 for a flag
            words.append(f"--{name}={value}")
        elif value is not None:
            words += [f"--{name}", str(value)]
    return words


def read_search(space: str, *, is_of_script: bool = False) -> Search:
    """Read what to search from a YAML file, or take a function of the user's."""
    if is_reference(space):
        load_reference(space, "the space")
        return _search({"space": space}, space, is_of_script=is_of_script)
    with usage_errors_in(space):
        found = read_flag_file(Path(space), "space:")
        source = {k: v for k, v in found.items() if k not in ("trials", "run_cap")}
        found = _from_wandb(found) if "parameters" in found else found
        return _search(found, source, is_of_script=is_of_script)


def _search(found: Mapping[str, Any], source: Any, *, is_of_script: bool) -> Search:
    for key in found:
        if key not in KEYS:
            meant = did_you_mean(str(key), KEYS)
            raise UsageError(f"found {key!r}.{meant} Expected {', '.join(KEYS)}")
    listed = found.get("metric", "max:accuracy")
    metrics = []
    for metric in listed if isinstance(listed, list) else [listed]:
        mode, _, name = str(metric).partition(":")
        if mode not in ("min", "max") or not name:
            raise UsageError(f"metric {metric!r}: expected max:NAME or min:NAME")
        metrics.append((mode, name.removeprefix("val_")))
    sampler = _named(found.get("sampler", "tpe"), "sampler", SAMPLERS)
    pruner = found.get("pruner") and _named(found["pruner"], "pruner", PRUNERS)
    space, trials = found.get("space"), found.get("trials")
    is_function = isinstance(space, str) and is_reference(space)
    if pruner and len(metrics) > 1:
        raise UsageError("a pruner needs one metric; found several")
    if is_function and sampler["name"] == "grid":
        raise UsageError("the sampler grid needs a space in YAML, found a function")
    if not is_function and (not isinstance(space, dict) or not space):
        raise UsageError("expected `space:` and flags below it, such as lr")
    if trials is not None and not (type(trials) is int and trials > 0):
        raise UsageError(f"trials: found {trials!r}, expected a number above 0")
    parameters: list[Parameter] = []
    for word, values in space.items() if isinstance(space, dict) else ():
        before = [parameter.name for parameter in parameters]
        name = str(word) if is_of_script else str(word).replace("-", "_")
        parameters.append(_parameter(name, values, before))
        if sampler["name"] == "grid":
            parameters[-1].grid()  # raises where there are no steps
        if parameters[-1].probabilities and sampler["name"] != "random":
            raise UsageError(
                f"{word}: probabilities need random search (W&B: `method: random`), "
                f"found the sampler {sampler['name']}"
            )
    return Search(
        source=source,
        metrics=metrics,
        sampler=sampler,
        pruner=pruner,
        parameters=parameters,
        function=space if isinstance(space, str) else "",
        trials=trials,
        is_of_script=is_of_script,
    )


def _named(found: Any, key: str, known: Iterable[str]) -> dict[str, Any]:
    named = found if isinstance(found, dict) else {"name": found}
    name = str(named.get("name"))
    if name not in known:
        meant = did_you_mean(name, known)
        raise UsageError(f"{key} {name!r}: expected one of {', '.join(known)}.{meant}")
    return named


def _parameter(name: str, found: Any, before: Sequence[str]) -> Parameter:
    if not isinstance(found, dict):
        found = {"choices": found if isinstance(found, list) else [found]}
    rest = dict(found)
    given = rest.pop("if", {})
    if not isinstance(given, dict):
        raise UsageError(f"{name}: if: expected flags and values, found {given!r}")
    condition = {}
    for key, it in given.items():
        other = str(key) if str(key) in before else str(key).replace("-", "_")
        condition[other] = [*map(_number, it if isinstance(it, list) else [it])]
    if unknown := condition.keys() - before:
        other = min(unknown)
        meant = did_you_mean(other, before)
        raise UsageError(f"{name}: if: {other!r} does not stand before it.{meant}")
    probabilities = rest.pop("probabilities", None) if "choices" in rest else None
    kind, values = next(iter(rest.items()), ("", None))
    if len(rest) != 1 or kind not in KINDS or not isinstance(values, list):
        raise UsageError(
            f"{name}: found {found!r}; expected a list of choices, a value, or one of "
            + ", ".join(f"{it}: [...]" for it in KINDS)
        )
    if kind == "choices":
        if not values or not all(isinstance(it, Value) for it in values):
            raise UsageError(f"{name}: expected a list of numbers and words")
        if probabilities is not None:
            probabilities = _probabilities(name, probabilities, len(values))
        choices = [*map(_number, values)]
        return Parameter(name, "categorical", choices, {}, condition, probabilities)
    is_int, is_log = kind.endswith("int"), kind.startswith("log")
    try:
        low, high, *step = map(_whole if is_int else float, values)
    except (TypeError, ValueError, OverflowError):
        low, high, step = 1, 0, []
    # Optuna would raise for others at the first trial, in the server.
    is_right = low <= high and all(map(math.isfinite, (low, high, *step)))
    is_right &= all(it > 0 for it in step) and len(step) <= (not is_log)
    if not is_right or (is_log and low <= 0):
        expected = "[lowest, highest] above 0" if is_log else "[lowest, highest, step]"
        raise UsageError(f"{name}: {kind}: found {values!r}, expected {expected}")
    options = {"log": True} if is_log else {"step": step[0]} if step else {}
    kind = "int" if is_int else "float"
    return Parameter(name, kind, (low, high), options, condition)


def _probabilities(name: str, found: Any, num: int) -> Sequence[float]:
    shares: list[Any] = [_number(it) for it in found] if isinstance(found, list) else []
    is_right = all(type(it) in (int, float) and 0 <= it <= 1 for it in shares)
    if len(shares) == num and is_right and abs(math.fsum(shares) - 1) < 1e-6:
        return shares
    raise UsageError(
        f"{name}: probabilities: found {found}, expected {num} numbers from 0 to 1 "
        "whose sum is 1"
    )


def _whole(value: Any) -> int:
    if isinstance(value, float) and not value.is_integer():
        raise ValueError  # `int` would cut it in silence
    return int(value)


def _number(value: Value) -> Value:
    """Return a number for what YAML takes for a word.

    >>> [_number(it) for it in ("1e-4", "-1E5", "v1.2.3e4", "1.2.3e4", 2, None)]
    [0.0001, -100000.0, 'v1.2.3e4', '1.2.3e4', 2, None]
    """
    number = r"[-+]?(\d+\.?\d*|\.\d+)e[-+]?\d+"
    if isinstance(value, str) and re.fullmatch(number, value, re.IGNORECASE):
        return float(value)
    return value


def _from_wandb(found: Mapping[str, Any]) -> dict[str, Any]:
    """Translate a sweep file of W&B (docs.wandb.ai/models/sweeps)."""
    method, metric = found.get("method", "bayes"), found.get("metric") or {}
    parameters = found["parameters"]
    if not isinstance(parameters, dict) or not isinstance(metric, dict):
        raise UsageError("parameters, metric: expected names and values")
    if not isinstance(method, str) or method not in WANDB_METHODS:
        raise UsageError(f"method {method!r}: expected {', '.join(WANDB_METHODS)}")
    ours: dict[str, Any] = {
        "sampler": WANDB_METHODS[method],
        "trials": found.get("run_cap"),
        "space": {k: _wandb_parameter(k, v) for k, v in parameters.items()},
    }
    if "name" in metric:
        mode = "max" if metric.get("goal") == "maximize" else "min"
        ours["metric"] = f"{mode}:{str(metric['name']).removeprefix('val/')}"
    if early := found.get("early_terminate"):
        known: dict[str, Any] = {"type": "hyperband", "eta": 3, "s": 2}
        known |= {"min_iter": 1, "max_iter": None}
        given = known | early if isinstance(early, dict) else {}
        is_right = given.keys() == known.keys() and given["type"] == "hyperband"
        numbers: list[Any] = [given.get(it) for it in ("eta", "s", "min_iter")]
        (eta, s, least), most = numbers, given.get("max_iter")
        numbers += [] if most is None else [most]
        if not is_right or not all(type(it) is int and it > 0 for it in numbers):
            expected = "type: hyperband, eta, and min_iter or max_iter and s above 0"
            raise UsageError(f"early_terminate: found {early}; expected {expected}")
        if most is not None:  # the first bracket of W&B's s
            least = max(1, most // eta**s)
        options = {"reduction_factor": eta, "min_resource": least}
        ours["pruner"] = {"name": "hyperband", **options}
    return ours


def _wandb_parameter(name: str, found: Any) -> Any:
    given = found if isinstance(found, dict) else {}
    keys = given.keys() - {"distribution"}
    if keys in ({"value"}, {"values"}, {"values", "probabilities"}):
        choices = given.get("values", [given.get("value")])
        return {"choices": choices, "probabilities": given.get("probabilities")}
    low, high = (_number(given.get(it)) for it in ("min", "max"))
    whole = isinstance(low, int) and isinstance(high, int)
    kind = given.get("distribution") or ("int_uniform" if whole else "uniform")
    is_range = keys == {"min", "max"} or kind == "q_uniform"
    if is_range and low is not None and high is not None:
        if kind == "log_uniform":  # of exponents of e
            with suppress(TypeError, ValueError, OverflowError):  # falls through
                return {"log": [math.exp(float(low)), math.exp(float(high))]}
        ours = {"uniform": "uniform", "int_uniform": "int", "log_uniform_values": "log"}
        if str(kind) in ours:
            return {ours[kind]: [low, high]}
        if kind == "q_uniform":
            return {"uniform": [low, high, given.get("q", 1)]}
    raise UsageError(
        f"{name}: found {found!r}; expected value, values (and probabilities), or "
        "min and max with uniform, q_uniform (and q), int_uniform, log_uniform_values "
        "or log_uniform"
    )
