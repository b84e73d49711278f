"""The result of `check`: one dictionary, printed as JSON or by one generic printer."""

from __future__ import annotations

import json
import os
import sys
import textwrap
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, TextIO

from mpitrain.mpi.world import format_ranges

FORMAT = 3  # Version of the JSON object. It grows when a field changes its meaning.

WIDTH = 100
LABEL_WIDTH = 15
EMPTY: tuple[Any, ...] = ("", None, [], ())  # values that the text leaves out

# Parts that the text shows as a table, with their columns; (): JSON only.
TABLES: dict[str, tuple[str, ...]] = {
    "nodes": (
        *("node_rank", "hostname", "ranks", "usable_cores"),
        *("num_threads", "devices", "address", "interface", "kind", "speed_mbps"),
    ),
    "ranks": (),
    "compute": ("rank", "hostname", "kind", "seconds", "num_runs", "num_wrong"),
    "bandwidth": ("num_bytes", "ms", "bus_gb_s"),
}

Severity = Literal["error", "warning", "note"]


@dataclass(frozen=True)
class Finding:
    """One problem: where it is, and what to do about it."""

    severity: Severity  # only errors change the exit status
    name: str  # its name in docs/howto/check.md
    found: str  # what was found and where; one line
    remedy: str  # what to type or to change; one line


class Report:
    """Collects the parts of the result; prints each, or all as JSON at the end."""

    def __init__(self, *, prints: bool, as_json: bool) -> None:
        self.parts: dict[str, Any] = {"format": FORMAT}
        self._prints = prints
        self._as_json = as_json
        self._is_done = False
        self._started = time.monotonic()
        self._out: TextIO = sys.stdout
        if as_json:
            sys.stdout.flush()
            # MPI, and libraries in C, print to descriptor 1: that is standard error
            # now, and the old one has the JSON object alone.
            self._out = os.fdopen(os.dup(1), "w")
            os.dup2(2, 1)

    def add(self, **parts: Any) -> None:
        """Add parts of the result."""
        self.parts |= parts
        if self._prints and not self._as_json:
            for name, value in parts.items():
                for line in lines_of(name, value):
                    print(line, file=self._out, flush=True)

    def finish(self, findings: Sequence[Finding]) -> int:
        """Add the findings, errors first, and print what is not printed yet."""
        order = ("error", "warning", "note")
        found = sorted(findings, key=lambda finding: order.index(finding.severity))
        counts = {f"num_{s}s": sum(f.severity == s for f in found) for s in order}
        status = 1 if counts["num_errors"] else 0
        self.parts |= {"status": "errors" if status else "passed", **counts}
        self.parts["findings"] = [asdict(finding) for finding in found]
        self.parts["seconds"] = round(time.monotonic() - self._started, 3)
        if self._prints and not self._is_done:
            text = json.dumps(self.parts, indent=1, allow_nan=False)
            if not self._as_json:
                last = ", ".join(f"{name[4:]}: {n}" for name, n in counts.items())
                last += f"; {self.parts['seconds']:.1f} s"
                text = "\n".join(["", *_finding_lines(found), last])
            print(text, file=self._out, flush=True)
        self._is_done = True
        return status

    def fail(self, message: str) -> None:
        """Print a JSON object about a job that ends early, on the rank that knows."""
        if self._as_json and not self._is_done:
            self._prints = True
            self.parts = {"format": FORMAT}
            remedy = "see the message on standard error"
            self.finish([Finding("error", "failed", message, remedy)])
            time.sleep(0.5)  # for mpirun to forward it


def lines_of(name: str, value: Any) -> list[str]:
    r"""Return one part of the result as text; no line for an empty part.

    >>> row = {"num_bytes": 2048, "ms": {"gloo": 1.25}, "bus_gb_s": {"gloo": 0.5}}
    >>> print(*lines_of("bandwidth", [row]), sep="\n")
    bandwidth      num bytes  gloo ms  gloo bus gb s
                   2048       1.25     0.5
    """
    label = f"{name.replace('_', ' '):{LABEL_WIDTH}}"
    if name not in TABLES:
        return _wrapped(label + text_of(value)) if value not in EMPTY else []
    rows = [_cells(row, TABLES[name]) for row in value]
    if not rows or not rows[0]:
        return []
    table = [list(rows[0]), *(list(row.values()) for row in rows)]
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    lines = [
        "  ".join(f"{cell:{n}}" for cell, n in zip(row, widths, strict=True)).rstrip()
        for row in table
    ]
    return [(" " * LABEL_WIDTH if at else label) + it for at, it in enumerate(lines)]


def text_of(value: Any) -> str:
    """Return a JSON value as text.

    >>> text_of({"num_tried": 2, "stages": {"store": 0.25}, "ranks": [0, 1, 2, 4]})
    'num tried 2, stages (store 0.25), ranks 0-2,4'
    """
    if isinstance(value, Mapping):
        shown = {key: text_of(v) for key, v in value.items() if v not in EMPTY}
        nested = {key for key, v in value.items() if isinstance(v, Mapping)}
        return ", ".join(
            f"{key.replace('_', ' ')} {f'({text})' if key in nested else text}"
            for key, text in shown.items()
        )
    if isinstance(value, list | tuple):
        if value and all(type(v) is int for v in value):
            return format_ranges(value)
        return ", ".join(map(text_of, value))
    return f"{value:.3g}" if isinstance(value, float) else str(value)


def _cells(row: Mapping[str, Any], columns: Sequence[str]) -> dict[str, str]:
    cells: dict[str, str] = {}
    for column in columns:
        value, title = row[column], column.replace("_", " ")
        if isinstance(value, Mapping):
            cells |= {f"{key} {title}": text_of(v) for key, v in value.items()}
        else:
            cells[title] = text_of(value)
    return cells


def _finding_lines(findings: Sequence[Finding]) -> list[str]:
    lines = []
    for it in findings:
        lines += _wrapped(f"{it.severity.upper():8} {it.name}: {it.found}", " " * 9)
        lines += _wrapped(f"         -> {it.remedy}", " " * 12)
    return lines


def _wrapped(text: str, indent: str = " " * LABEL_WIDTH) -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )
