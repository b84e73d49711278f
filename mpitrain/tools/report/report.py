"""The command: from a run folder to the page and the pictures beside it."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

from mpitrain.errors import UsageError
from mpitrain.files import write_atomic
from mpitrain.plugins import require
from mpitrain.record.reading import Run
from mpitrain.settings import setting
from mpitrain.tools.sweep.config import INSTALL, SETTINGS


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """Show a run as a web page with charts."""

    run: Path = setting(metavar="RUN", is_positional=True)
    """A run folder, such as runs/NAME, or a sweep folder; it may still be running."""
    output: Path | None = None
    """The page to write. Default: report.html in the run's folder. Pictures go into a
    folder of the same name."""
    pictures: bool = True
    """Write each chart as PNG, too."""


def report(config: ReportConfig) -> str:
    """Write the page and the pictures."""
    output = config.output or config.run / "report.html"
    if output.suffix != ".html":
        raise UsageError(f"--output {output}: expected a name that ends with .html")
    require("matplotlib", "report")
    try:
        if (config.run / SETTINGS).is_file():
            require("optuna", "report of a sweep", INSTALL)
            from mpitrain.tools.report.sweep import sweep_page

            text, pictures = sweep_page(config.run)
        else:
            text, pictures = _page(Run(config.run), draws=config.pictures)
        write_atomic(output, text)
        if config.pictures:
            folder = output.with_suffix("")
            folder.mkdir(exist_ok=True)
            for name, png in pictures.items():
                write_atomic(folder / f"{name}.png", png)
    except OSError as error:
        raise UsageError(
            f"{error.filename or output} cannot be written: {error.strerror}. Choose "
            "another --output"
        ) from None
    beside = f", {len(pictures)} pictures in {output.with_suffix('')}/"
    return (
        f"{output}{beside * config.pictures}; elsewhere: scp {socket.gethostname()}:"
        f"{output.absolute()} ."
    )


def _page(run: Run, *, draws: bool) -> tuple[str, dict[str, bytes]]:
    from mpitrain.tools.report import curves
    from mpitrain.tools.report.analysis import jobs_of
    from mpitrain.tools.report.figures import style
    from mpitrain.tools.report.page import page
    from mpitrain.tools.report.rank_map import map_chart

    jobs = jobs_of(run)
    with style():
        charts = [
            curves.loss_chart(run),
            *curves.metric_charts(run),
            *([map_chart(run, jobs)] if jobs else []),
            curves.throughput_chart(run),
            *filter(None, [curves.rate_chart(run)]),
        ]
        text = page(run, jobs, charts)  # before the pictures, with their titles inside
        return text, {chart.name: chart.png() for chart in charts if draws}
