"""The text of ``--help``, made from a configuration's fields and their docstrings."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import shutil
import textwrap
from collections.abc import Collection, Iterator
from functools import cache
from types import NoneType
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

HELP_COLUMN = 32


class Values(NamedTuple):
    """What the help shows after a flag; an annotation of the field."""

    metavar: str


class Flag(NamedTuple):
    """One flag, or one positional argument."""

    group: type  # the dataclass that declares it; its docstring is the help's title
    name: str  # ``--log-every-steps``; empty for a positional argument
    values: str  # what follows it, such as ``INT``; empty for a switch
    text: str
    default: Any


def flags_of(kind: Any, defaults: Any = None) -> Iterator[Flag]:
    """List the flags of a configuration, and those of the groups nested in it."""
    hints = get_type_hints(kind, include_extras=True)
    for field in dataclasses.fields(kind):
        default = field.default
        if defaults is not None:
            default = getattr(defaults, field.name)
        elif field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if dataclasses.is_dataclass(default):
            yield from flags_of(type(default), default)
            continue
        owner = next(
            it for it in kind.__mro__ if field.name in inspect.get_annotations(it)
        )
        hint = hints[field.name]
        marks = getattr(hint, "__metadata__", ())  # tyro's: Positional, arg(name=...)
        name, values = field.name, ""
        for mark in marks:
            name = getattr(mark, "name", None) or name
            values = getattr(mark, "metavar", None) or values
        flag = "--" + name.replace("_", "-")
        if "Positional" in map(str, marks):
            flag = ""
            values = values or _values(hint)
        elif hint is bool:
            flag += f", --no-{flag[2:]}" if default is True else ""
        else:
            values = values or _values(hint)
        yield Flag(owner, flag, values, field_docs(owner)[field.name], default)


def help_text(
    kind: Any, *, program: str, epilog: str, only: Collection[str] | None = None
) -> str:
    """Return the help of a command."""
    flags = list(flags_of(kind))
    positional = [flag.values for flag in flags if not flag.name]
    usage = " ".join(["usage:", program, *positional, "[flags]"])
    about = inspect.cleandoc(kind.__doc__ or "")
    lines = [usage, "", about]
    shown = [flag for flag in flags if only is None or flag.name in only]
    for group in dict.fromkeys(flag.group for flag in shown):
        title = inspect.cleandoc(group.__doc__ or "").partition("\n")[0].rstrip(".")
        if group is kind:
            title = "General" if lines[-1:] != [about] else "Flags"
        lines += ["", f"{title}:"]
        for flag in shown:
            if flag.group is group:
                lines += _lines_of(flag)
    return "\n".join([*lines, "", epilog]).rstrip()


def _lines_of(flag: Flag) -> list[str]:
    head = "  " + f"{flag.name} {flag.values}".strip()
    text = flag.text
    if not any(flag.default is it for it in (None, dataclasses.MISSING, True, False)):
        default = flag.default
        if isinstance(default, tuple):
            default = " ".join(map(str, default))
        if str(default) and "Default:" not in text:
            text = f"{text} [{default}]"
    width = min(max(shutil.get_terminal_size().columns, 72), 100)
    lines = textwrap.wrap(text, width - HELP_COLUMN, break_on_hyphens=False)
    indent = " " * HELP_COLUMN
    lines = [indent + line for line in lines]
    if len(head) < HELP_COLUMN - 1:
        return [head.ljust(HELP_COLUMN) + lines[0].lstrip(), *lines[1:]]
    return [head, *lines]


def _values(hint: Any) -> str:
    """Name the values of a type.

    >>> _values(int | None), _values(Literal["a", "b"]), _values(tuple[int, ...])
    ('INT', '{a,b}', 'INT ...')
    """
    hint = getattr(hint, "__origin__", hint) if hasattr(hint, "__metadata__") else hint
    if get_origin(hint) is Literal:
        return "{" + ",".join(map(str, get_args(hint))) + "}"
    if get_origin(hint) is tuple:
        return f"{_values(get_args(hint)[0])} ..."
    if get_args(hint):
        kinds = (_values(it) for it in get_args(hint) if it is not NoneType)
        return "|".join(kinds).replace("|{auto}", "|auto")
    return "TEXT" if hint is str else str(hint.__name__).upper()


@cache
def field_docs(kind: type) -> dict[str, str]:
    """Return the docstrings below the fields of a dataclass, each in one line."""
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(tree, ast.ClassDef)
    found: dict[str, str] = {}
    for node, after in itertools.zip_longest(tree.body, tree.body[1:]):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            text = isinstance(after, ast.Expr) and ast.literal_eval(after.value)
            found[node.target.id] = " ".join(text.split()) if text else ""
    return found
