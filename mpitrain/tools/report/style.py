"""What charts are drawn with: colours by name, and papers of three sizes."""

from __future__ import annotations

import contextlib
import io
import re
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import matplotlib as mpl
from matplotlib.figure import Figure

from mpitrain.tools.report.facts import SHARES

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_COLOURS = {
    "paper": ("#ffffff", "#14171b"),
    "card": ("#f5f7f9", "#1c2025"),
    "ink": ("#1a1d21", "#e9ebee"),
    "muted": ("#59626d", "#a3adb8"),
    "line": ("#d5dbe1", "#3a414a"),
    "good": ("#00664a", "#4fd1a5"),
    "bad": ("#b3003f", "#ff7fa3"),
    "start": ("#aab3bd", "#5d6670"),
    "data": ("#e69f00", "#f0ae1f"),
    "forward": ("#56b4e9", "#6cc0ef"),
    "backward": ("#0072b2", "#2f8ecb"),
    "communication": ("#009e73", "#1fb58a"),
    "waiting": ("#dfe4e9", "#2b3138"),
    "update": ("#7b5cc4", "#9d83dc"),
    "evaluation": ("#cc79a7", "#d990b8"),
    "checkpoint": ("#8a5a2b", "#c08a52"),
    "other": ("#f0e442", "#f0e442"),
    "hang": ("#d6004c", "#ff2e73"),
    "run-0": ("#0072b2", "#4fa9e0"),
    "run-1": ("#d55e00", "#f08a3c"),
    "run-2": ("#009e73", "#35c49a"),
    "run-3": ("#a2498a", "#dd8fc6"),
    "run-4": ("#8a6a00", "#e3bf4a"),
    "run-5": ("#5b4fc4", "#a39bf2"),
    "run-6": ("#3c7a8c", "#7cc3d6"),
    "run-7": ("#6b6f76", "#b3b8bf"),
}


def luminance(colour: str) -> float:
    """Return how bright a colour such as ``#0072b2`` is, 0 to 1, as WCAG has it."""
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (
        it / 12.92 if it <= 0.04045 else ((it + 0.055) / 1.055) ** 2.4 for it in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def _text_on(colour: str) -> str:
    return "#101316" if luminance(colour) > 0.183 else "#ffffff"


COLOURS: Mapping[str, tuple[str, str]] = _COLOURS | {
    f"on-{name}": (_text_on(both[0]), _text_on(both[1]))
    for name, both in _COLOURS.items()
    if name in SHARES
}
"""On light and on dark paper; Okabe's and Ito's, which the colour-blind tell apart.
``on-...``: what is read on a colour."""

_STANDS_FOR = {f"#fe{i:02x}{i * 7 % 256:02x}": it for i, it in enumerate(COLOURS)}
"""Colours that nobody uses: in an SVG they are replaced by the page's own."""

_OF_NAME = {name: colour for colour, name in _STANDS_FOR.items()}


@dataclass(frozen=True, kw_only=True)
class Paper:
    """What a chart is drawn on."""

    name: str
    width: float
    """Points; on a page one is a pixel."""
    font: float
    """Size of text, in points."""
    is_picture: bool = False
    """A PNG, with title and legend; not a part of the page."""

    def colour(self, name: str) -> str:
        """Return a colour as this paper wants it."""
        return COLOURS[name][0] if self.is_picture else _OF_NAME[name]

    @property
    def is_narrow(self) -> bool:
        """Whether there is room for few words."""
        return self.width < 400


WIDE = Paper(name="wide", width=1040, font=13)
HALF = Paper(name="wide", width=508, font=13)
NARROW = Paper(name="narrow", width=340, font=12)
PICTURE = Paper(name="picture", width=920, font=19, is_picture=True)

PICTURE_HEIGHT = 517
PICTURE_DOTS = 120
"""Per inch of 72 points: a picture is 1533 x 862."""


@dataclass(frozen=True, kw_only=True)
class Chart:
    """One chart, to be drawn on any paper."""

    name: str
    """Of its file, and its place on the page."""
    title: str
    words: str
    """What it shows, for this run."""
    draw: Callable[[Figure, Paper], object]
    height: float
    """On the page, in points."""
    is_half: bool = False
    """Two of them stand beside each other where there is room."""
    legend: tuple[tuple[str, str], ...] = ()
    """Names of colours, and what they mean."""


def settings(paper: Paper) -> Any:
    """Return matplotlib's settings for a paper."""
    ink, muted, line = map(paper.colour, ("ink", "muted", "line"))
    return {
        "svg.fonttype": "none",  # text stays text
        "text.parse_math": False,  # a host may have a $ in its name
        "svg.hashsalt": "mpitrain",
        "font.family": "DejaVu Sans",  # comes with matplotlib; on the page, its own
        "font.size": paper.font,
        "axes.titlesize": paper.font,
        "axes.labelsize": paper.font,
        "xtick.labelsize": paper.font,
        "ytick.labelsize": paper.font,
        "legend.fontsize": paper.font * 0.85,
        "text.color": ink,
        "axes.labelcolor": muted,
        "xtick.color": line,
        "ytick.color": line,
        "xtick.labelcolor": muted,
        "ytick.labelcolor": muted,
        "axes.edgecolor": line,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "grid.color": line,
        "grid.linewidth": 0.8,
        "axes.grid.axis": "y",
        "axes.axisbelow": True,
        "hatch.linewidth": 1.2,
        "hatch.color": muted,
        "legend.frameon": False,
        "lines.solid_capstyle": "round",
    }


@contextlib.contextmanager
def _drawing(wanted: Any) -> Iterator[None]:
    with mpl.rc_context(wanted), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # letters that a font lacks; too little room
        yield


def svg_of(chart: Chart, paper: Paper, prefix: str) -> str:
    """Draw a chart as a part of a page.

    Args:
        chart: Which.
        paper: What for.
        prefix: Of its ids, which the page has once.

    Returns:
        An ``<svg>`` without a size, whose colours are the page's variables.
    """
    with _drawing(settings(paper)):
        figure = Figure((paper.width / 72, chart.height / 72), layout="constrained")
        figure.patch.set_alpha(0)
        chart.draw(figure, paper)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
    text = out.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r"<style[^>]*>.*?</style>", "", text, flags=re.DOTALL)  # for all
    text = re.sub(r'\bid="', f'id="{prefix}-', text)
    text = text.replace("url(#", f"url(#{prefix}-").replace(
        'xlink:href="#', f'xlink:href="#{prefix}-'
    )
    text = re.sub(
        r"#fe[0-9a-f]{4}\b",
        lambda it: f"var(--{_STANDS_FOR[it[0]]})" if it[0] in _STANDS_FOR else it[0],
        text,
    )
    # The page's own font, whichever: sizes alone are kept.
    text = re.sub(r"font: (\S+) [^;\"]*", r"font-size: \1", text)
    head, rest = text.split(">", 1)
    box = re.search(r'viewBox="[^"]*"', head)
    assert box is not None
    return (
        f'<svg {box[0]} role="presentation" aria-hidden="true" '
        'xmlns:xlink="http://www.w3.org/1999/xlink">' + rest
    )


def png_of(chart: Chart) -> bytes:
    """Draw a chart as a picture, for a talk."""
    with _drawing(settings(PICTURE)):
        size = PICTURE.width / 72, PICTURE_HEIGHT / 72
        figure = Figure(size, layout="constrained", facecolor="white")
        figure.suptitle(
            chart.title, x=0.01, ha="left", fontsize=PICTURE.font * 1.2, weight="bold"
        )
        chart.draw(figure, PICTURE)
        if chart.legend:
            _put_legend(figure, chart)
        out = io.BytesIO()
        figure.savefig(out, format="png", dpi=PICTURE_DOTS)
    return out.getvalue()


def _put_legend(figure: Figure, chart: Chart) -> None:
    from matplotlib.patches import Patch

    handles = [
        Patch(facecolor=PICTURE.colour(colour), label=_shortened(label))
        for colour, label in chart.legend
    ]
    figure.legend(
        handles=handles,
        loc="outside lower left",
        ncols=3,
        handlelength=1.0,
        handleheight=1.0,
        columnspacing=1.2,
    )


def _shortened(label: str, most: int = 40) -> str:
    return label if len(label) <= most else label[: most - 3] + "..."


def rgb(name: str) -> tuple[float, float, float]:
    """Return a colour of the map, the same on light and on dark paper, 0 to 1 each."""
    text = "#858f9b" if name == "start" else COLOURS[name][0]
    red, green, blue = (int(text[i : i + 2], 16) / 255 for i in (1, 3, 5))
    return red, green, blue


def plain_axes(figure: Figure, paper: Paper) -> Axes:
    """Return axes with a grid that steps back."""
    axes = figure.add_subplot()
    axes.set_facecolor("none")
    axes.grid(visible=True, axis="y")
    axes.tick_params(length=0, pad=5)
    axes.spines["left"].set_visible(False)
    axes.locator_params(axis="x", nbins=4 if paper.is_narrow else 7)
    return axes
