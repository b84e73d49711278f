"""What `python -m mpitrain report` is asked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """Show a run as a page and pictures, while it runs, too; several side by side."""

    runs: Annotated[Positional[tuple[Path, ...]], arg(metavar="RUN [RUN ...]")]
    """Run folders, such as runs/NAME."""
    output: Path | None = None
    """The page to write. Default: report.html in the run's folder; of several runs
    report-NAME-NAME.html here. The pictures go into a folder beside it, named as it
    without .html."""
    pictures: bool = True
    """Write the pictures, too: PNG, as talks want them."""
