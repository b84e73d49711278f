"""User-defined models, data sets and loggers: ``package.module:callable``.

An installed package may give its loggers, tasks and sites names, by entry points of the
groups ``mpitrain.loggers``, ``mpitrain.tasks`` and ``mpitrain.sites``.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import entry_points
from types import MappingProxyType
from typing import Any

from mpitrain.errors import UsageError, did_you_mean


def is_reference(name: str) -> bool:
    """Whether a name is a reference to code."""
    return ":" in name


def require(package: str, flag: str, install: str = "") -> None:
    """Check, without importing it, that a package that not everybody has is installed.

    ``install``: what pip is to install, if not what has the package's name.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or spec.origin is None:  # a mere folder, such as wandb's own
        raise UsageError(
            f"{flag} needs {package}, which is not installed. Type: "
            f"{sys.executable} -m pip install {install or package}"
        )


def plugins_of(group: str) -> dict[str, str]:
    """Return the names that installed packages give, with what they stand for."""
    return {it.name: it.value for it in entry_points(group=f"mpitrain.{group}")}


def load_reference(reference: str, flag: str, plugins: str = "") -> Callable[..., Any]:
    """Import ``package.module:callable``, or what one of the `plugins` names.

    `flag` named it. Modules of the current folder are found, too.
    """
    if plugins and not is_reference(reference):
        known = plugins_of(plugins)
        if reference not in known:
            raise UsageError(
                f"{flag} {reference!r}: no installed package has an entry point of "
                f"that name in mpitrain.{plugins}.{did_you_mean(reference, known)} "
                "Expected package.module:callable"
            )
        reference = known[reference]
    # importlib takes "./mine.py" for a relative name.
    module_name, _, attribute = reference.removeprefix("./").partition(":")
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
        names = [n for n, v in vars(module).items() if callable(v) and n[0] != "_"]
        raise UsageError(
            f"{flag} {reference!r}: module {module_name!r} has no callable "
            f"{attribute!r}.{did_you_mean(attribute, names)}"
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
