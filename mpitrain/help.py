"""The text of ``--help``."""

from __future__ import annotations

import inspect
import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import MISSING
from typing import Any

from mpitrain.settings import Flag, flags_of

HELP_COLUMN = 32


def help_text(
    kind: Any,
    *,
    program: str,
    epilog: str,
    only_common: bool = False,
    others: Sequence[Flag] = (),
) -> str:
    """Return the help of a command, whose flags are those of ``kind`` and others."""
    flags = [*flags_of(kind), *others]
    kind = kind if isinstance(kind, type) else type(kind)
    positional = [flag.values for flag in flags if not flag.name]
    usage = " ".join(["usage:", program, *positional, "[flags]"])
    about = inspect.cleandoc(kind.__doc__ or "")
    lines = [usage, "", about]
    shown = [flag for flag in flags if flag.facts.is_common or not only_common]
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
    negation = f", --no-{flag.name[2:]}" * (flag.default is True)
    head = "  " + f"{flag.name}{negation} {flag.values}".strip()
    text = flag.text
    if not any(flag.default is it for it in (None, MISSING, True, False)):
        default = flag.default
        if isinstance(default, tuple):
            default = " ".join(map(str, default))
        if str(default) and "Default:" not in text:
            text = f"{text} [{default}]"
    indent, first = " " * HELP_COLUMN, head.ljust(HELP_COLUMN)
    has_room = len(head) < HELP_COLUMN - 1
    lines = textwrap.wrap(
        text,
        width=min(max(shutil.get_terminal_size().columns, 72), 100),
        initial_indent=first if has_room else indent,
        subsequent_indent=indent,
        break_on_hyphens=False,
    )
    return lines if has_room and lines else [head, *lines]
