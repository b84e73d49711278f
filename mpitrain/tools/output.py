"""The output of tools: text to the screen or into a file, and tables in Markdown."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from mpitrain.errors import UsageError
from mpitrain.record.run_dir import write_atomic


def deliver(text: str, file: Path | None) -> None:
    """Write text to a file as a whole, or to standard output if `file` is ``None``.

    Raises:
        UsageError: The file cannot be written; its old content is still there.
    """
    if file is None:
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    # The file is replaced, which must never happen to /dev/null.
    if file.exists() and not file.is_file():
        raise UsageError(f"--output {file} is no file; expected the name of one")
    try:
        write_atomic(file, text)
    except OSError as error:
        raise UsageError(
            f"--output {file} cannot be written: {error.strerror}"
        ) from None


def markdown_table(rows: Sequence[Sequence[str]]) -> str:
    """Return a table whose first column is text and whose others are numbers.

    Args:
        rows: The titles, and the rows; of equal length.

    >>> print(markdown_table([("data", "workers"), ("folder", "0")]))
    | data   | workers |
    |:-------|--------:|
    | folder |       0 |
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    rule = ":" + "-" * (widths[0] + 1)
    rule += "".join("|" + "-" * (width + 1) + ":" for width in widths[1:])
    lines = []
    for first, *others in rows:
        cells = [first.ljust(widths[0])]
        cells += [it.rjust(n) for it, n in zip(others, widths[1:], strict=True)]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([lines[0], f"|{rule}|", *lines[1:]])
