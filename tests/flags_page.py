"""Write `docs/reference/flags.md` from the configuration: `make flags`."""

from __future__ import annotations

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, get_args, get_origin, get_type_hints

from mpitrain import TrainConfig
from mpitrain.launch.run_script.target import RunConfig
from mpitrain.schedulers.hostfile import HostfileConfig
from mpitrain.schedulers.jobscript import JobscriptConfig
from mpitrain.schedulers.supervisor import SuperviseConfig
from mpitrain.tools.bench.config import BenchDataConfig, BenchScalingConfig
from mpitrain.tools.check.config import CheckConfig
from mpitrain.tools.export import ExportConfig
from mpitrain.tools.fetch import FetchConfig
from mpitrain.tools.report.report import ReportConfig
from mpitrain.tools.watch import WatchConfig

PAGE = Path(__file__).parents[1] / "docs/reference/flags.md"

COMMANDS: dict[str, Any] = {
    "": TrainConfig,
    "run": RunConfig,
    "check": CheckConfig,
    "jobscript": JobscriptConfig,
    "hostfile": HostfileConfig,
    "supervise": SuperviseConfig,
    "watch": WatchConfig,
    "report": ReportConfig,
    "export": ExportConfig,
    "fetch": FetchConfig,
    "bench data": BenchDataConfig,
    "bench scaling": BenchScalingConfig,
}

HEAD = """# Flags

`make flags` writes this page from the configuration. `--config FILE.yaml` reads the
flags of a training, or of `run`, from a file with the same names; flags on the command
line take precedence. `--no-random-flip` undoes `--random-flip`, and so on.
"""


def docs_of(kind: Any) -> dict[str, str]:
    """Return the docstring below each field of a class, without its bases."""
    body = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(body, ast.ClassDef)
    found = {}
    for field, text in zip(body.body, body.body[1:], strict=False):
        if isinstance(field, ast.AnnAssign) and isinstance(text, ast.Expr):
            assert isinstance(field.target, ast.Name)
            found[field.target.id] = " ".join(str(ast.literal_eval(text.value)).split())
    return found


def rows_of(kind: Any, group: Any = None) -> Iterator[tuple[str, str, str, str]]:
    """Return heading, flag, default and help of each field, groups included."""
    hints = get_type_hints(kind, include_extras=True)
    homes = [it for it in reversed(kind.__mro__) if dataclasses.is_dataclass(it)]
    for field in dataclasses.fields(kind):
        default: Any = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        if dataclasses.is_dataclass(default):
            yield from rows_of(type(default), default)
            continue
        default = getattr(group, field.name, default)
        home = next(it for it in homes if field.name in it.__annotations__)
        heading = (home.__doc__ or "").partition("\n")[0]
        extras = getattr(hints[field.name], "__metadata__", ())
        name = next((it.name for it in extras if getattr(it, "name", None)), field.name)
        is_positional = "Positional" in str(home.__annotations__[field.name]) or any(
            "POSITIONAL" in str(it).upper() for it in extras
        )
        flag = name.upper() if is_positional else "--" + name.replace("_", "-")
        told = docs_of(home)[field.name]
        choices = choices_of(hints[field.name])
        if choices and not all(choice in told for choice in choices):
            told += f" One of {', '.join(choices)}."
        yield heading, flag, shown(default), told


def choices_of(hint: Any) -> list[str]:
    """Return the values of a `Literal`, which may be a part of the type."""
    if get_origin(hint) is Literal:
        return list(map(str, get_args(hint)))
    return [it for part in get_args(hint) for it in choices_of(part)]


def shown(default: object) -> str:
    """Return a default as it is typed; nothing where the help tells it."""
    if any(default is it for it in (None, False, dataclasses.MISSING)):
        return ""
    if isinstance(default, tuple):
        return " ".join(map(str, default))
    return str(default)


def page() -> str:
    """Return the page."""
    lines = [HEAD]
    for command, kind in COMMANDS.items():
        lines.append(f"\n## {command or 'Training'}\n")
        rows = list(rows_of(kind))
        headings = list(dict.fromkeys(row[0] for row in rows))
        for heading in headings:
            if len(headings) > 1:
                lines.append(f"\n### {heading.rstrip('.')}\n")
            lines.append("| flag | default | |\n|---|---|---|")
            for of, flag, default, text in rows:
                if of == heading:
                    told = f"`{default}`" if default else ""
                    lines.append(f"| `{flag}` | {told} | {text.replace('|', '/')} |")
    return "\n".join(lines).replace("\n\n\n", "\n\n") + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
