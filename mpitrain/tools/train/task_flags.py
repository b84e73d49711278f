"""The flags of ``--task``: the arguments of a user's function, typed by its signature.

    def build(config: TrainConfig = TrainConfig(epochs=3), width: int = 64) -> Trainer:

has the flag ``--task.width``, and 3 epochs if ``--epochs`` does not say otherwise.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import NoneType, UnionType
from typing import Any, Literal, Union, get_args, get_origin

from mpitrain.config import TASK_PREFIX, TrainConfig
from mpitrain.errors import UsageError
from mpitrain.flags import read_flag_file
from mpitrain.plugins import load_reference
from mpitrain.settings import Flag, FlagFacts, flag_name, values_of

SCALARS = int, float, str, Path


class TaskArguments:
    """Arguments of --task."""


def task_in(words: Sequence[str]) -> str | None:
    """Return the value of ``--task``, by flag or file, without reading other flags.

    >>> task_in(["--lr", "0.1", "--task", "mine:build"]), task_in(["--lr=0.1"])
    ('mine:build', None)
    """
    found: dict[str, list[Any]] = {"--task": [], "--config": []}
    for word, after in itertools.zip_longest(words, words[1:], fillvalue=""):
        name, is_joined, value = word.partition("=")
        if name in found:
            found[name].append(value if is_joined else after)
    of_files = []
    for file in found["--config"]:
        with contextlib.suppress(UsageError):  # the command names it later
            values = read_flag_file(Path(file), "lr: 0.1")
            of_files += [values["task"]] if "task" in values else []
    last = [None, *of_files, *found["--task"]][-1]
    return None if last in (None, "None") else str(last)


def task_flags(reference: str) -> tuple[TrainConfig, list[Flag]]:
    """Import a user's function; return its default configuration, and its flags.

    Raises:
        UsageError: An argument has no default, or cannot be called by name.
    """
    with contextlib.suppress(ImportError):
        import torch  # noqa: F401  before a folder of the user's is on sys.path
    function = load_reference(reference, "--task", "tasks")
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        raise UsageError(
            f"--task {reference} does not tell what it takes; expected a function or "
            "class written in Python"
        ) from None
    config, flags = TrainConfig(), []
    for name, it in parameters.items():
        if name == "config" and isinstance(it.default, TrainConfig):
            config = it.default
        is_given = name in ("config", "world") and it.kind is not it.POSITIONAL_ONLY
        if is_given or it.kind in (it.VAR_POSITIONAL, it.VAR_KEYWORD):
            continue
        if it.default is it.empty or it.kind is it.POSITIONAL_ONLY:
            raise UsageError(
                f"--task {reference}: the argument {name!r} has no default, or no "
                "name; expected both, of all but config and world"
            )
        hint = _hint(function, it)
        if hint is None:
            continue  # of a kind that no word can be
        flags.append(
            Flag(
                group=TaskArguments,
                field=TASK_PREFIX + name,
                name=flag_name(TASK_PREFIX + name),
                hint=hint,
                values="" if hint is bool else values_of(hint),
                text=_text_of(function, name),
                default=it.default,
                facts=FlagFacts(is_common=True),
            )
        )
    return config, flags


def _hint(function: Callable[..., Any], parameter: inspect.Parameter) -> Any:
    """Return the type of a flag for an argument; ``None``: there can be none."""
    hint, default = parameter.annotation, parameter.default
    if isinstance(hint, str):
        # With `from __future__ import annotations` all are strings.
        module = vars(sys.modules.get(getattr(function, "__module__", ""), object))
        try:
            hint = eval(hint, dict(module))
        except Exception:  # such as a name that is imported for type checkers alone
            hint = parameter.empty
    if hint is parameter.empty:
        hint = type(default)
    if not _is_flag(hint):
        return None
    is_optional = NoneType in get_args(hint)
    return hint | None if default is None and not is_optional else hint


def _is_flag(hint: Any) -> bool:
    """Whether words can be read as a type.

    >>> [_is_flag(hint) for hint in (int, bool, float | None, tuple[int, ...])]
    [True, True, True, True]
    >>> [_is_flag(hint) for hint in (dict, "int", bool | None, tuple[int, int])]
    [False, False, False, False]
    """
    origin, kinds = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        kinds = tuple(it for it in kinds if it is not NoneType)
        return all(it in SCALARS or get_origin(it) is Literal for it in kinds)
    if origin is tuple:
        return len(kinds) == 2 and kinds[0] in SCALARS and kinds[1] is Ellipsis
    return hint in (*SCALARS, bool) or origin is Literal


def _text_of(function: Callable[..., Any], name: str) -> str:
    """Return the line of an argument in a docstring of Google's style."""
    text = inspect.getdoc(function) or ""
    found = re.search(rf"^ *{name}(?: \(.*?\))?: *(.+)$", text, re.MULTILINE)
    return found[1] if found else ""
