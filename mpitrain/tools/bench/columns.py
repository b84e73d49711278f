"""Figures in Markdown, so that they stand in columns on a screen, too."""

from __future__ import annotations

from collections.abc import Sequence


def markdown(lines: Sequence[Sequence[str]], num_words: int = 1) -> str:
    """Write lines down as a table.

    Args:
        lines: The head, and then the others; as many cells each.
        num_words: So many columns are words, from the left; the others are numbers.

    >>> print(markdown([("data", "workers"), ("folder", "0")]))
    | data   | workers |
    |:-------|--------:|
    | folder |       0 |
    """
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    rule = "|".join(
        ":" + "-" * (width + 1) if at < num_words else "-" * (width + 1) + ":"
        for at, width in enumerate(widths)
    )
    found = [
        " | ".join(
            cell.ljust(width) if at < num_words else cell.rjust(width)
            for at, (cell, width) in enumerate(zip(line, widths, strict=True))
        )
        for line in lines
    ]
    return "\n".join(
        [f"| {found[0]} |", f"|{rule}|", *(f"| {it} |" for it in found[1:])]
    )
