"""User-defined models, data sets and loggers: ``package.module:callable``."""

from __future__ import annotations

import difflib
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any

from mpitrain.errors import UsageError


def is_reference(name: str) -> bool:
    """Whether a name is a reference to code.

    >>> is_reference("my_models:small"), is_reference("digits")
    (True, False)
    """
    return ":" in name


def load_reference(reference: str, flag: str) -> Callable[..., Any]:
    """Import ``package.module:callable``; `flag` named it.

    Modules of the current folder are found, too.
    """
    module_name, _, attribute = reference.partition(":")
    if not module_name or not attribute:
        raise UsageError(f"{flag} {reference!r}: expected package.module:callable")
    if sys.path[0] not in ("", os.getcwd()):
        sys.path.insert(0, os.getcwd())  # not before: see __main__.py
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not (module_name + ".").startswith(error.name + "."):
            raise  # their module is there; one that it imports is not
        meant = ""
        if "/" in module_name or module_name.endswith(".py"):
            dotted = module_name.removesuffix(".py").strip("./").replace("/", ".")
            meant = f" Did you mean '{dotted}:{attribute}'?"
        raise UsageError(
            f"{flag} {reference!r}: there is no module {module_name!r}.{meant} "
            "Expected package.module:callable, importable from "
            f"{os.getcwd()} or PYTHONPATH."
        ) from None
    found = getattr(module, attribute, None)
    if not callable(found):
        public = {n: it for n, it in vars(module).items() if n[0] != "_"}
        names = [name for name, value in public.items() if callable(value)]
        near = difflib.get_close_matches(attribute, names, n=5, cutoff=0.4)
        raise UsageError(
            f"{flag} {reference!r}: module {module_name!r} has no callable "
            f"{attribute!r}. It has, among {len(names)}: "
            f"{', '.join(near or names[:5]) or 'none'}."
        )
    return found  # type: ignore[no-any-return]


def call_with_known(
    function: Callable[..., Any],
    known: Mapping[str, object],
    flag: str,
    otherwise: Mapping[str, object] = MappingProxyType({}),
) -> Any:
    """Call a user's function with those of the `known` values that it takes, by name.

    A ``None`` is replaced by the parameter's default, else by a value of `otherwise`.

    >>> call_with_known(lambda num_classes: num_classes, {"num_classes": 3, "a": 1}, "")
    3
    >>> known = {"a": None, "b": None}
    >>> call_with_known(lambda a, b="own": (a, b), known, "", {"a": 1, "b": 2})
    (1, 'own')
    """
    try:
        parameters = inspect.signature(function).parameters.values()
    except (TypeError, ValueError):  # some builtins have none
        raise UsageError(
            f"{flag}: {function!r} does not tell what it takes; expected a function or "
            "class written in Python"
        ) from None
    unknown = [
        p.name
        for p in parameters
        if p.default is p.empty
        and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        and (p.name not in known or p.kind is p.POSITIONAL_ONLY)
    ]
    if unknown:
        raise UsageError(
            f"{flag}: {getattr(function, '__name__', function)!r} wants "
            f"{', '.join(unknown)}, but can be given only {', '.join(known)}, by name; "
            "expected defaults for the rest, or a function of yours around it"
        )
    values = {p.name: known[p.name] for p in parameters if p.name in known}
    for p in parameters:
        if p.name in otherwise and values.get(p.name, 0) is None:
            values[p.name] = otherwise[p.name] if p.default is p.empty else p.default
    return function(**values)
