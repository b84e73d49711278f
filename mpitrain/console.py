"""The terminal: lines beside a progress bar, paths as a person writes them."""

from __future__ import annotations

import sys
from pathlib import Path


def say(line: str) -> None:
    """Print a line on the terminal, above the progress bar if there is one."""
    bars = sys.modules.get("tqdm")
    if bars is None:
        print(line, flush=True)
    else:
        bars.tqdm.write(line, file=sys.stdout)
        sys.stdout.flush()


def shown(path: Path) -> str:
    """Write a path as a person would: relative to here where it is below."""
    here = Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)
