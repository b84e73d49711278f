"""The page: one file of HTML that asks nobody for anything."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib import resources

from mpitrain import __version__
from mpitrain.tools.report import tables
from mpitrain.tools.report.curves import Shown
from mpitrain.tools.report.style import COLOURS, HALF, NARROW, WIDE, Chart, svg_of
from mpitrain.tools.report.tables import Table

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""What the page may load: nothing. There is no script in it."""


def page(shown: Sequence[Shown], charts: Sequence[Chart]) -> str:
    """Write the page.

    Args:
        shown: The runs.
        charts: In their order.
    """
    names = " and ".join(escape(it.run.name) for it in shown)
    body = _head_of(shown[0]) if len(shown) == 1 else _heads_of(shown)
    figures = "\n".join(_figure(chart) for chart in charts)
    folded = (
        tables.tables(shown[0])
        if len(shown) == 1
        else [tables.comparison(shown), tables.differences(shown)]
    )
    details = "\n".join(_details(table) for table in folded if table.rows)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<title>{names}</title>
<link rel="icon" href="data:,">
<style>
{_colours()}
{resources.files(__package__).joinpath("page.css").read_text()}
</style>
</head>
<body>
<main>
{body}
<div class="charts">
{figures}
</div>
<section aria-label="Tables">
{details}
</section>
<footer>Written by <code>python -m mpitrain report</code>, mpitrain {__version__}.
Times are those of the machine that wrote this page.</footer>
</main>
</body>
</html>
"""


def _colours() -> str:
    light, dark = (
        " ".join(f"--{name}: {both[i]};" for name, both in COLOURS.items())
        for i in (0, 1)
    )
    return (
        f":root {{ color-scheme: light dark; {light} }}\n"
        f"@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}"
    )


def _status(shown: Shown) -> str:
    status = shown.run.status
    known = status if status in ("finished", "failed", "stopped") else "running"
    return f'<span class="status {known}">{escape(status)}</span>'


def _head_of(shown: Shown) -> str:
    values = "".join(
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(what)}</span></div>'
        for value, what in tables.tiles(shown)
    )
    return f"""<header>
<h1>{escape(shown.run.name)} {_status(shown)}</h1>
<p>{escape(tables.status_of(shown.run))}</p>
</header>
{_errors([shown])}
<div class="tiles">{values}</div>"""


def _heads_of(shown: Sequence[Shown]) -> str:
    items = "".join(
        f'<li><i style="background: var(--{it.colour})"></i>{escape(it.run.name)} '
        f"{_status(it)}</li>"
        for it in shown
    )
    return f"""<header>
<h1>{len(shown)} runs side by side</h1>
<ul class="legend">{items}</ul>
<p>{escape(tables.status_of(shown[0].run))}</p>
</header>
{_errors(shown)}
<p>&nbsp;</p>"""


def _errors(shown: Sequence[Shown]) -> str:
    found = []
    for it in shown:
        text = ""
        if it.run.status == "failed":
            text = str(it.run.result.get("error") or "it failed, and did not say why")
        elif it.run.status == "stopped":
            text = str(it.run.result.get("stopped") or "")
        if text:
            name = f"{it.run.name}: " if len(shown) > 1 else ""
            found.append(f'<div class="error">{escape(name + text)}</div>')
    return "".join(found)


def _figure(chart: Chart) -> str:
    wide = HALF if chart.is_half else WIDE
    variants = "".join(
        f'<div class="{paper.name}">'
        f"{svg_of(chart, paper, f'{chart.name}-{paper.name}')}</div>"
        for paper in (wide, NARROW)
    )
    items = "".join(
        f'<li><i class="{"edged" if colour == "waiting" else ""}" '
        f'style="background: var(--{colour})"></i>{escape(label)}</li>'
        for colour, label in chart.legend
    )
    legend = f'<ul class="legend">{items}</ul>' if items else ""
    kind = ' class="half"' if chart.is_half else ""
    return f"""<figure id="{chart.name}"{kind}>
<figcaption><h2>{escape(chart.title)}</h2>{escape(chart.words)}</figcaption>
<div role="img" aria-label="{escape(chart.title + ". " + chart.words)}">
{variants}</div>
{legend}
</figure>"""


def _details(table: Table) -> str:
    head = "".join(f'<th scope="col">{escape(it)}</th>' for it in table.head)
    rows = "".join(
        f"<tr{' class=changed' if row[0] in table.changed else ''}>"
        f'<th scope="row">{escape(row[0])}</th>'
        + "".join(f"<td>{escape(it)}</td>" for it in row[1:])
        + "</tr>"
        for row in table.rows
    )
    top = f"<thead><tr>{head}</tr></thead>" if head else ""
    note = f" <span>{escape(table.note)}</span>" if table.note else ""
    return (
        f"<details{' open' if table.is_open else ''}><summary>{escape(table.name)}"
        f'{note}</summary><div class="scroll"><table>{top}<tbody>{rows}</tbody>'
        "</table></div></details>"
    )
