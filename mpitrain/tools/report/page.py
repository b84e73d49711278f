"""The page: one HTML file without scripts that loads nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from importlib import resources

from mpitrain._version import __version__
from mpitrain.record.reading import Run
from mpitrain.tools.report.analysis import JobTimes
from mpitrain.tools.report.figures import THEME, Chart
from mpitrain.tools.report.summary import Section, status_line, summary, tables


def page(
    run: Run, jobs: Sequence[JobTimes], charts: Sequence[Chart], cost: Mapping[str, str]
) -> str:
    """Return the page of a run."""
    status, name = run.status, escape(run.name)
    kind = status if status in ("finished", "failed") else "running"
    values = "".join(
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(of)}</span></div>'
        for of, value in {**summary(run, jobs), **cost}.items()
        if value
    )
    return read_file("page.html").format(
        title=name,
        style=style_sheet(),
        head=f'<h1>{name} <span class="status {kind}">{escape(status)}</span></h1>',
        status=escape(status_line(run)),
        errors=_error(run),
        tiles=f'<div class="tiles">{values}</div>',
        charts="\n".join(map(_figure, charts)),
        tables="\n".join(details(it) for it in tables(run, jobs) if it.rows),
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
        + read_file("page.css")
    )


def read_file(name: str) -> str:
    """Return a file beside this module."""
    return resources.files(__package__).joinpath(name).read_text()


def _error(run: Run) -> str:
    text = ""
    if run.status == "failed":
        text = str(run.result.get("error") or "failed, without a reason")
    elif run.status == "stopped":
        text = str(run.result.get("stopped") or "")
    found = f'<div class="error">{escape(text)}</div>' if text else ""
    if stopping := run.result.get("early_stopping"):
        found += f"<p>Early stopping: {escape(str(stopping))}.</p>"
    return found


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
