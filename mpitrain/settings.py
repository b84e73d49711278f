"""A field of a configuration: its facts, and the flag that sets it.

    epochs: int = setting(10, minimum=0, is_common=True)
    '''Number of epochs.'''

A flag, its check and its help are made from that, and what a resumed run, a trial of a
sweep and a `Trainer` in a script may set.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import math
import numbers
import os
import re
import textwrap
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass
from functools import cache
from types import NoneType
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from mpitrain.errors import UsageError, did_you_mean


@dataclass(frozen=True, kw_only=True)
class FlagFacts:
    """What is known of a field besides its type, default and docstring."""

    # Values. Numbers must be finite, too.
    minimum: float = -math.inf
    above: float = -math.inf  # instead of a minimum
    below: float = math.inf
    pattern: tuple[str, str] = ("", "")  # what a text must match; the same in words
    # The flag.
    flag: str = ""  # its name, if not the field's
    metavar: str = ""  # of its value in the help; empty: the type
    is_positional: bool = False
    is_repeatable: bool = False  # a tuple whose values are given one at a time
    is_common: bool = False  # --help shows it; --help-all shows all
    # A training.
    # When a run is resumed: it changes no result, except for its rounding, and what
    # follows a bad sample or a step that is not finite.
    may_change: bool = False
    changes_bits: bool = False  # although it may change: the rounding, with --bitwise
    is_for_command: bool = False  # `Trainer` in a script ignores it
    is_for_task: bool = False  # a task without it in `Task.uses_settings` ignores it
    has_flag: bool = True
    is_set_by_sweep: bool = False  # for each trial
    in_diff: bool = True  # `mpitrain diff` names it
    # No effect unless, or if, another field has one of the values: its name, then these
    # values; without values: if it is set.
    only_with: tuple[str, ...] = ()
    not_with: tuple[str, ...] = ()


def setting(default: Any = MISSING, **facts: Any) -> Any:
    """Return the field of a dataclass with `FlagFacts`; required without a default."""
    return dataclasses.field(default=default, metadata={"facts": FlagFacts(**facts)})


class Flag(NamedTuple):
    """One flag, or one positional argument."""

    group: type  # the dataclass that declares it; its docstring is the help's title
    field: str
    name: str  # ``--log-every-steps``; empty for a positional argument
    hint: Any  # its type
    values: str  # what follows it, such as ``INT``; empty for a switch
    text: str
    default: Any
    facts: FlagFacts


def flag_name(field: str) -> str:
    """Return the flag of a field.

    >>> flag_name("log_every_steps")
    '--log-every-steps'
    """
    return "--" + field.replace("_", "-")


def facts_of(kind: Any) -> dict[str, FlagFacts]:
    """Return the facts of a configuration's fields, and of the groups nested in it."""
    found: dict[str, FlagFacts] = {}
    for field in dataclasses.fields(kind):
        if field.default_factory is MISSING:
            found[field.name] = field.metadata.get("facts", FlagFacts())
        else:
            found |= facts_of(field.default_factory())
    return found


def flags_of(kind: Any) -> Iterator[Flag]:
    """List the flags of a configuration, and those of the groups nested in it.

    A group is given as an object, whose values are the defaults.
    """
    bases = (kind if isinstance(kind, type) else type(kind)).__mro__
    hints = get_type_hints(bases[0])
    for field in dataclasses.fields(kind):
        if field.default_factory is not MISSING:
            group = getattr(kind, field.name, None)
            yield from flags_of(group or field.default_factory())
            continue
        facts, hint = field.metadata.get("facts", FlagFacts()), hints[field.name]
        if not facts.has_flag:
            continue
        owner = next(it for it in bases if field.name in inspect.get_annotations(it))
        yield Flag(
            group=owner,
            field=field.name,
            name="" if facts.is_positional else flag_name(facts.flag or field.name),
            hint=hint,
            values="" if hint is bool else facts.metavar or values_of(hint),
            text=_docs(owner)[field.name],
            default=getattr(kind, field.name, MISSING),
            facts=facts,
        )


def check_values(kind: Any, values: Mapping[str, Any]) -> None:
    """Raise a UsageError for the first value that its field does not allow."""
    hints = _hints(kind if isinstance(kind, type) else type(kind))
    for name, facts in facts_of(kind).items():
        value, wrong = values.get(name), ""
        flag, (pattern, expected) = flag_name(facts.flag or name), facts.pattern
        # Fields of a nested group have no type here: the group has checked them.
        if name in hints and name in values and not _is_a(hints[name], value):
            raise wrong_value(flag, facts.metavar or values_of(hints[name]), value)
        if isinstance(value, int | float):
            if not math.isfinite(value):
                wrong = "be finite"
            elif value < facts.minimum:
                wrong = f"be at least {facts.minimum}"
            elif value <= facts.above:
                wrong = f"be above {facts.above}"
            elif value >= facts.below:
                wrong = f"be less than {facts.below}"
            if wrong:
                raise UsageError(f"{flag} must {wrong}, found {value!r}")
        if pattern and value is not None and not re.fullmatch(pattern, value, re.ASCII):
            raise UsageError(f"{flag} {value!r}: expected {expected}")


def wrong_value(flag: str, values: str, found: Any) -> UsageError:
    """Return the error of a value that is none of `values`, as `values_of` has them."""
    expected = re.sub("[{}]", "", values)
    for kind, text in _TYPES_IN_WORDS.items():
        expected = expected.replace(kind, text)
    *others, last = choices = re.split(r"[|,]", expected)
    either = f"{', '.join(others)} or {last}" if others else last
    word = found.lower() if isinstance(found, str) else ""
    meant = did_you_mean(word, choices) if word else ""
    return UsageError(f"{flag}: found {found!r}, expected {either}.{meant}")


_TYPES_IN_WORDS = {
    "INT": "a whole number",
    "FLOAT": "a number",
    "BOOL": "True|False",
    "TEXT": "a text",
}
_hints: Callable[[Any], dict[str, Any]] = cache(get_type_hints)


def _is_a(hint: Any, value: Any) -> bool:
    """Whether a value is one of the choices, or of the type; others are not read."""
    kinds = get_args(hint)
    if get_origin(hint) is Literal:
        return any(isinstance(value, type(it)) and value == it for it in kinds)
    if kinds and get_origin(hint) is not tuple:
        return any(_is_a(kind, value) for kind in kinds)
    if hint is NoneType:
        return value is None
    if hint is bool:
        # Its type first: an array has no truth. The names are of numpy 2 and 1.
        is_numpys = type(value).__name__ in ("bool", "bool_")
        return is_numpys or (isinstance(value, int) and value in (0, 1))
    if hint in (int, float) and isinstance(value, bool):
        return False  # though Python takes it for a number
    # numpy's numbers are numbers, too, and a path may be meant where a text is asked.
    own = {int: numbers.Integral, float: numbers.Real, str: str | os.PathLike}
    return hint not in own or isinstance(value, own[hint])


def values_of(hint: Any) -> str:
    """Name the values of a type.

    >>> values_of(int | None), values_of(Literal["a", "b"]), values_of(tuple[int, ...])
    ('INT', '{a,b}', 'INT ...')
    """
    if get_origin(hint) is Literal:
        return "{" + ",".join(map(str, get_args(hint))) + "}"
    if get_origin(hint) is tuple:
        return f"{values_of(get_args(hint)[0])} ..."
    if get_args(hint):
        kinds = (values_of(it) for it in get_args(hint) if it is not NoneType)
        return "|".join(kinds).replace("|{auto}", "|auto")
    return "TEXT" if hint is str else str(hint.__name__).upper()


@cache
def _docs(kind: type) -> dict[str, str]:
    """Return the docstrings below the fields of a dataclass, each in one line."""
    # From the source: Python keeps no docstring of a field.
    (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(tree, ast.ClassDef)
    found: dict[str, str] = {}
    for node, after in itertools.zip_longest(tree.body, tree.body[1:]):
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            text = isinstance(after, ast.Expr) and ast.literal_eval(after.value)
            found[node.target.id] = " ".join(text.split()) if text else ""
    return found
