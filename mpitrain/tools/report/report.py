"""The command: from a run folder to the page and the pictures beside it."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

from mpitrain.errors import UsageError
from mpitrain.files import write_atomic
from mpitrain.plugins import require
from mpitrain.record.cost import FILE as COSTS
from mpitrain.record.cost import cost_of
from mpitrain.record.reading import Run
from mpitrain.settings import setting
from mpitrain.tools.sweep.config import INSTALL, SETTINGS

JOULES_OF_KWH = 3.6e6


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
    price: float | None = setting(None, minimum=0.0)
    """Print the cost at this price of a GPU-hour (without GPUs: of a core-hour)."""


def report(config: ReportConfig) -> str:
    """Write the page and the pictures."""
    output = config.output or config.run / "report.html"
    if output.suffix != ".html":
        raise UsageError(f"--output {output}: expected a name that ends with .html")
    require("matplotlib", "report")
    cost = cost_values(config.run, config.price)
    try:
        if (config.run / SETTINGS).is_file():
            require("optuna", "report of a sweep", INSTALL)
            from mpitrain.tools.report.sweep import sweep_page

            text, pictures = sweep_page(config.run)
        else:
            text, pictures = _page(Run(config.run), cost, draws=config.pictures)
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
    lines = [f"{name}: {value}" for name, value in cost.items()]
    if config.price is not None and not cost:
        lines = [f"cost: not known, since {config.run} has no {COSTS}"]
    beside = f", {len(pictures)} pictures in {output.with_suffix('')}/"
    return "".join(f"{line}\n" for line in lines) + (
        f"{output}{beside * config.pictures}; elsewhere: scp {socket.gethostname()}:"
        f"{output.absolute()} ."
    )


def _page(
    run: Run, cost: dict[str, str], *, draws: bool
) -> tuple[str, dict[str, bytes]]:
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
        text = page(run, jobs, charts, cost)  # before the pictures, with their titles
        return text, {chart.name: chart.png() for chart in charts if draws}


def cost_values(run_dir: Path, price: float | None) -> dict[str, str]:
    """Return what all jobs of a run cost, by name; nothing where that is not known."""
    from mpitrain.tools.report.summary import duration, number

    if not (cost := cost_of(run_dir)):
        return {}
    kind = "GPU" if cost["gpu_hours"] else "core"
    hours = cost[f"{kind.lower()}_hours"]
    found = {"core-hours": number(cost["core_hours"]), f"{kind}-hours": number(hours)}
    if "energy_joules" in cost:
        of = ", ".join(cost["energy_parts"])
        found[f"kWh ({of})"] = number(cost["energy_joules"] / JOULES_OF_KWH)
    if "queue_seconds" in cost:
        found["in the queue"] = duration(cost["queue_seconds"])
    if price is not None:
        found[f"cost at {price:g} per {kind}-hour"] = f"{price * hours:,.2f}"
    return found
