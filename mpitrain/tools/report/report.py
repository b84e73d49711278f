"""From run folders to the page and the pictures beside it."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

from mpitrain.errors import UsageError
from mpitrain.record.reading import Run
from mpitrain.record.run_dir import write_atomic
from mpitrain.tools.report.config import ReportConfig

PAGE = "report.html"

MOST_RUNS = 8
"""Curves that eyes can tell apart."""


def report(config: ReportConfig) -> str:
    """Write the page, and the pictures.

    Args:
        config: Which runs, and where to.

    Returns:
        Where the page is, and how to look at it from elsewhere, in a line.

    Raises:
        UsageError: A folder is no run's, matplotlib is not there, or nothing can be
            written.
    """
    if not 1 <= len(config.runs) <= MOST_RUNS:
        raise UsageError(
            f"found {len(config.runs)} runs; expected 1 to {MOST_RUNS}: "
            "python -m mpitrain report runs/NAME"
        )
    runs = [Run(path) for path in config.runs]
    try:
        import matplotlib  # noqa: F401 - to tell whether it is there
    except ImportError:
        raise UsageError(
            "report wants matplotlib, which is not in this environment.\n"
            f"Type: {sys.executable} -m pip install matplotlib"
        ) from None
    from mpitrain.tools.report.curves import Shown, curves
    from mpitrain.tools.report.map_chart import map_chart
    from mpitrain.tools.report.page import page
    from mpitrain.tools.report.stage_bars import stage_chart
    from mpitrain.tools.report.style import Chart, png_of

    shown = [Shown(run=run, colour=f"run-{i}") for i, run in enumerate(runs)]
    loss, accuracy, speed, step_time = curves(shown)
    maps = [map_chart(it, is_alone=len(shown) == 1) for it in shown]
    charts: list[Chart] = [loss, accuracy, *maps, stage_chart(shown), speed, step_time]
    output = config.output or config.runs[0] / PAGE
    if len(runs) > 1 and config.output is None:
        output = Path(f"report-{'-'.join(run.name for run in runs)}"[:200] + ".html")
    if output.suffix != ".html":
        raise UsageError(f"--output {output}: expected a name that ends with .html")
    try:
        write_atomic(output, page(shown, charts))
        if config.pictures:
            folder = output.with_suffix("")
            folder.mkdir(exist_ok=True)
            for chart in charts:
                write_atomic(folder / f"{chart.name}.png", png_of(chart))
    except OSError as error:
        raise UsageError(
            f"{error.filename or output} cannot be written: {error.strerror}. Choose "
            "another --output"
        ) from None
    return told(output, len(charts) if config.pictures else 0)


def told(output: Path, num_pictures: int) -> str:
    """Say where the page is, and how to look at it from elsewhere."""
    beside = f", {num_pictures} pictures in {output.with_suffix('')}/"
    host = socket.gethostname()
    return (
        f"{output}{beside if num_pictures else ''}; elsewhere: scp "
        f"{host}:{output.absolute()} ."
    )
