"""The terminal: lines beside a progress bar, paths as a person writes them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TextIO

# Flags that are answered on the terminal, instead of running the command.
HELP_FLAGS = frozenset({"-h", "--help", "--help-all", "--version"})


def say(line: str, file: TextIO | None = None) -> None:
    """Print a line on the terminal, above the progress bar if there is one."""
    file, bars = file or sys.stdout, sys.modules.get("tqdm")
    if file is None:  # closed
        return
    if bars is None:
        print(line, file=file, flush=True)
    else:  # it takes the bar away before, and draws it again
        bars.tqdm.write(line, file=file)
        file.flush()


def shown(path: Path) -> str:
    """Write a path as a person would: relative to here where it is below."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
