"""The page: one HTML file without scripts that loads nothing."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from importlib import resources

from mpitrain._version import __version__
from mpitrain.tools.report.analysis import ReportedRun
from mpitrain.tools.report.figures import THEME, Chart
from mpitrain.tools.report.summary import (
    Section,
    comparison,
    status_line,
    summary,
    tables,
)

PAGE = """<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta http-equiv="Content-Security-Policy"
  content="default-src 'none'; style-src 'unsafe-inline'; img-src data:">
<title>{title}</title>
<link rel="icon" href="data:,">
<style>
{style}
</style>
</head>
<body>
<main>
<header>
{head}
<p>{status}</p>
</header>
{errors}
{tiles}
<div class="charts">
{charts}
</div>
<section aria-label="Tables">
{tables}
</section>
<footer>Written by <code>python -m mpitrain report</code>, mpitrain {version}.
Times are those of the machine that wrote this page.</footer>
</main>
</body>
</html>
"""


def page(runs: Sequence[ReportedRun], charts: Sequence[Chart]) -> str:
    """Return the page of one run, or of several side by side."""
    first, is_alone = runs[0], len(runs) == 1
    items = [f"{escape(shown.run.name)} {_status(shown)}" for shown in runs]
    if is_alone:
        head = f"<h1>{items[0]}</h1>"
        sections = tables(first)
    else:
        marks = "".join(
            f'<li><i style="background: {it.colour}"></i>{item}</li>'
            for it, item in zip(runs, items, strict=True)
        )
        head = f'<h1>{len(runs)} runs</h1><ul class="legend">{marks}</ul>'
        sections = comparison(runs)
    values = "".join(
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>'
        for name, value in (summary(first) if is_alone else {}).items()
        if value
    )
    return PAGE.format(
        title=" and ".join(escape(shown.run.name) for shown in runs),
        style=style_sheet(),
        head=head,
        status=escape(status_line(first.run)),
        errors="".join(_error(shown, is_alone) for shown in runs),
        tiles=f'<div class="tiles">{values}</div>',
        charts="\n".join(map(_figure, charts)),
        tables="\n".join(details(it) for it in sections if it.rows),
        version=__version__,
    )


def style_sheet() -> str:
    """Return the CSS of a page."""
    light, dark = (
        " ".join(f"--{name}: {both[i]};" for name, both in THEME.items())
        for i in (0, 1)
    )
    return (
        f":root {{ color-scheme: light dark; {light} }}\n"
        f"@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}\n"
        + resources.files(__package__).joinpath("page.css").read_text()
    )


def _status(shown: ReportedRun) -> str:
    status = shown.run.status
    kind = status if status in ("finished", "failed") else "running"
    return f'<span class="status {kind}">{escape(status)}</span>'


def _error(shown: ReportedRun, is_alone: bool) -> str:
    result, status = shown.run.result, shown.run.status
    text = ""
    if status == "failed":
        text = str(result.get("error") or "failed, without a reason")
    elif status == "stopped":
        text = str(result.get("stopped") or "")
    name = "" if is_alone else f"{shown.run.name}: "
    return f'<div class="error">{escape(name + text)}</div>' if text else ""


def _figure(chart: Chart) -> str:
    words = "".join(f"<p>{escape(text)}</p>" for text in chart.findings)
    label = escape(" ".join([f"{chart.title}.", *chart.findings]))
    kind = ' class="wide"' if chart.is_wide else ""
    return f"""<figure id="{chart.name}"{kind}>
<figcaption><h2>{escape(chart.title)}</h2>{words}</figcaption>
<div class="scroll" role="img" aria-label="{label}">
{chart.svg()}</div>
</figure>"""


def details(section: Section) -> str:
    """Return a table that can be folded up."""
    head = "".join(f'<th scope="col">{escape(it)}</th>' for it in section.head)
    rows = "".join(
        f"<tr{' class=changed' if i < section.num_bold else ''}>"
        f'<th scope="row">{escape(row[0])}</th>'
        + "".join(f"<td>{escape(it)}</td>" for it in row[1:])
        + "</tr>"
        for i, row in enumerate(section.rows)
    )
    top = f"<thead><tr>{head}</tr></thead>" if head else ""
    note = f" <span>{escape(section.note)}</span>" if section.note else ""
    return (
        f"<details{' open' if section.is_open else ''}><summary>{escape(section.title)}"
        f'{note}</summary><div class="scroll"><table>{top}<tbody>{rows}</tbody>'
        "</table></div></details>"
    )
