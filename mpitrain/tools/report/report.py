"""The command: from run folders to the page and the pictures beside it."""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from tyro.conf import Positional, arg

from mpitrain.errors import UsageError
from mpitrain.files import write_atomic
from mpitrain.plugins import require
from mpitrain.record.reading import Run
from mpitrain.tools.sweep.config import INSTALL, SETTINGS

MAX_RUNS = 8


@dataclass(frozen=True, kw_only=True)
class ReportConfig:
    """Show a run, or several side by side, as a web page with charts."""

    runs: Annotated[Positional[tuple[Path, ...]], arg(metavar="RUN [RUN ...]")]
    """Run folders, such as runs/NAME, or a sweep folder; they may still be running."""
    output: Path | None = None
    """The page to write. Default: report.html in the run's folder; for several
    runs report-NAME-NAME.html here. Pictures go into a folder of the same name."""
    pictures: bool = True
    """Write each chart as PNG, too."""


def report(config: ReportConfig) -> str:
    """Write the page and the pictures."""
    if not 1 <= len(config.runs) <= MAX_RUNS:
        raise UsageError(
            f"found {len(config.runs)} runs; expected 1 to {MAX_RUNS}: "
            "python -m mpitrain report runs/NAME"
        )
    output = config.output or config.runs[0] / "report.html"
    if len(config.runs) > 1 and config.output is None:
        names = "-".join(path.absolute().name for path in config.runs)
        output = Path(f"report-{names}"[:200] + ".html")
    if output.suffix != ".html":
        raise UsageError(f"--output {output}: expected a name that ends with .html")
    require("matplotlib", "report")
    try:
        if any((path / SETTINGS).is_file() for path in config.runs):
            if len(config.runs) > 1:
                raise UsageError(
                    f"found {len(config.runs)} folders, one of them of a sweep; "
                    "expected a sweep alone: python -m mpitrain report sweeps/NAME"
                )
            require("optuna", "report of a sweep", INSTALL)
            from mpitrain.tools.report.sweep import sweep_page

            text, pictures = sweep_page(config.runs[0])
        else:
            found = [Run(path) for path in config.runs]
            text, pictures = _page(found, draws=config.pictures)
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


def _page(found: Sequence[Run], *, draws: bool) -> tuple[str, dict[str, bytes]]:
    from mpitrain.tools.report import curves
    from mpitrain.tools.report.analysis import ReportedRun
    from mpitrain.tools.report.figures import RUN_COLOURS, style
    from mpitrain.tools.report.page import page
    from mpitrain.tools.report.rank_map import map_chart

    runs = [ReportedRun(run=it, colour=RUN_COLOURS[i]) for i, it in enumerate(found)]
    with style():
        charts = [
            curves.loss_chart(runs),
            *curves.metric_charts(runs),
            *(map_chart(it, i, len(runs)) for i, it in enumerate(runs) if it.jobs),
            curves.throughput_chart(runs),
        ]
        text = page(runs, charts)  # before the pictures, which have their titles inside
        return text, {chart.name: chart.png() for chart in charts if draws}
