"""The flags of ``--task``: the arguments of a user's function, typed by its signature.

    def build(config: TrainConfig = TrainConfig(epochs=3), width: int = 64) -> Trainer:

has the flag ``--task.width``, and 3 epochs if ``--epochs`` does not say otherwise.
"""

from __future__ import annotations

import contextlib
import inspect
import itertools
import re
from collections.abc import Callable, Sequence
from dataclasses import MISSING
from pathlib import Path
from types import NoneType
from typing import Any, Literal, get_args, get_origin

from mpitrain.config import TrainConfig
from mpitrain.errors import UsageError
from mpitrain.flags import read_flag_file
from mpitrain.plugins import load_reference
from mpitrain.settings import Flag, FlagFacts, flag_name, values_of

PREFIX = "task."  # of the names of flags, also in YAML files and spaces
GIVEN = "config", "world"  # arguments that the command gives
KINDS = int, float, str, bool, Path


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
            of_files.append(read_flag_file(Path(file), "lr: 0.1").get("task"))
    named = [it for it in (*of_files, *found["--task"]) if it not in (None, "None")]
    return str(named[-1]) if named else None


def task_flags(reference: str) -> tuple[TrainConfig, list[Flag]]:
    """Import a user's function; return its default configuration, and its flags.

    Raises:
        UsageError: An argument without a default cannot be a flag.
    """
    function = load_reference(reference, "--task")
    config, flags = TrainConfig(), []
    for name, it in _signature(function, reference).parameters.items():
        if name == "config" and isinstance(it.default, TrainConfig):
            config = it.default
        if name in GIVEN or it.kind in (it.VAR_POSITIONAL, it.VAR_KEYWORD):
            continue
        is_required = it.default is it.empty
        hint = it.annotation
        if not _is_flag(hint):
            hint = NoneType if is_required else type(it.default)
        if not _is_flag(hint):
            if not is_required:
                continue  # the function's own business
            raise UsageError(
                f"--task {reference}: the argument {name!r} has no default, and no "
                "type of a flag; expected int, float, str, bool, Path, Literal, or a "
                "tuple of these"
            )
        flags.append(
            Flag(
                group=TaskArguments,
                field=PREFIX + name,
                name=flag_name(PREFIX + name),
                hint=hint,
                values="" if hint is bool else values_of(hint),
                text=_text_of(function, name),
                default=MISSING if is_required else it.default,
                facts=FlagFacts(is_common=True),
            )
        )
    return config, flags


def _signature(function: Callable[..., Any], reference: str) -> inspect.Signature:
    try:
        return inspect.signature(function, eval_str=True)
    except NameError:  # of an annotation that is imported for type checkers alone
        return inspect.signature(function)
    except (TypeError, ValueError):
        raise UsageError(
            f"--task {reference} does not tell what it takes; expected a function or "
            "class written in Python"
        ) from None


def _is_flag(hint: Any) -> bool:
    """Whether words can be read as a type.

    >>> [_is_flag(hint) for hint in (int, float | None, tuple[int, ...], dict, "int")]
    [True, True, True, False, False]
    """
    if get_origin(hint) is Literal:
        return True
    kinds = [it for it in get_args(hint) if it not in (NoneType, Ellipsis)]
    if get_origin(hint) not in (None, tuple) and type(None) not in get_args(hint):
        return False
    return all(map(_is_flag, kinds)) if kinds else hint in KINDS


def _text_of(function: Callable[..., Any], name: str) -> str:
    """Return the line of an argument in a docstring of Google's style."""
    found = re.search(rf"^ *{name}: *(.+)$", inspect.getdoc(function) or "", re.M)
    return found[1] if found else ""
