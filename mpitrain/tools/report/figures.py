"""One style for all charts, and charts as SVG for the page and as PNG for talks."""

from __future__ import annotations

import contextlib
import io
import re
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import matplotlib as mpl
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from matplotlib.axes import Axes

THEME = {
    "paper": ("#ffffff", "#14171b"),
    "card": ("#f5f7f9", "#1c2025"),
    "ink": ("#1a1d21", "#e9ebee"),
    "muted": ("#59626d", "#a3adb8"),
    "line": ("#d5dbe1", "#3a414a"),
    "waiting": ("#e4e8ec", "#2b3138"),
    "good": ("#00664a", "#4fd1a5"),
    "bad": ("#b3003f", "#ff7fa3"),
}
"""Colours on light and on dark pages. Charts are drawn in the light ones; on the page
these are CSS variables."""

PHASE_COLOURS = {
    "start": "#98a2ad",
    "data": "#e69f00",
    "forward": "#56b4e9",
    "backward": "#0072b2",
    "communication": "#009e73",
    "update": "#7b5cc4",
    "evaluation": "#cc79a7",
    "checkpoint": "#9c6b3c",
    "other": "#f0e442",
}
"""The palette of Okabe and Ito, for the colour-blind too."""

PAPER, INK, MUTED, WAITING = (
    THEME[name][0] for name in ("paper", "ink", "muted", "waiting")
)
HANG = "#e0245e"
CHECKPOINT = PHASE_COLOURS["checkpoint"]
CURVE = "#2a80c4"

SETTINGS: Mapping[str, object] = {
    "svg.fonttype": "none",  # text stays text
    "svg.hashsalt": "mpitrain",
    "text.parse_math": False,  # a host name may have a $
    "font.family": "DejaVu Sans",
    "font.size": 12,
    "text.color": INK,
    "axes.edgecolor": THEME["line"][0],
    "grid.color": THEME["line"][0],
    **dict.fromkeys(("axes.labelcolor", "legend.labelcolor"), MUTED),
    **dict.fromkeys(("xtick.labelcolor", "ytick.labelcolor"), MUTED),
    **dict.fromkeys((f"axes.spines.{it}" for it in ("top", "right", "left")), False),
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.handlelength": 1.0,
    "legend.handleheight": 1.0,
    "lines.linewidth": 2,
    "lines.markeredgecolor": PAPER,
    "legend.columnspacing": 1.4,
    "axes.facecolor": "none",
}


@dataclass(kw_only=True)
class Chart:
    """One chart of the page; made, drawn and written within `style`."""

    name: str  # name of its file, and its id on the page
    title: str
    height: float = 250  # in points
    is_wide: bool = False
    findings: list[str] = field(default_factory=list)
    """What it shows in this run, a sentence each."""

    def __post_init__(self) -> None:
        size = (1000 if self.is_wide else 440) / 72, self.height / 72
        self.figure = Figure(size, layout="constrained")
        self.axes: Axes = self.figure.add_subplot()
        self.axes.tick_params(length=0, pad=5)

    def svg(self) -> str:
        """Return an ``<svg>`` element with the page's colours."""
        out = io.StringIO()
        nothing = dict.fromkeys(("Date", "Creator", "Format", "Type"))
        self.figure.patch.set_alpha(0)
        self.figure.savefig(out, format="svg", metadata=nothing)
        text = out.getvalue()
        text = text[text.index("<svg") :]
        text = re.sub(r"<style.*?</style>", "", text, flags=re.DOTALL)
        # Ids are matplotlib's own, and must differ between the charts of a page.
        text = re.sub(r'(\bid="|url\(#|href="#)', rf"\1{self.name}-", text)
        for name, (light, _) in THEME.items():
            text = text.replace(light, f"var(--{name})")
        text = re.sub(r"font: (\S+) [^;\"]*", r"font-size: \1", text)  # the page's font
        # On a phone wide charts scroll, else their text would be too small.
        width = 850 if self.is_wide else 0
        size = f'style="min-width: {width}px" aria-hidden="true"'
        return text.replace("<svg ", f"<svg {size} ", 1)

    def png(self) -> bytes:
        """Return the chart as a picture with its title."""
        out = io.BytesIO()
        self.figure.suptitle(self.title, x=0.01, ha="left", weight="bold")
        self.figure.savefig(out, format="png", dpi=200, facecolor="white")
        return out.getvalue()


@contextlib.contextmanager
def style() -> Iterator[None]:
    """Draw in the style of the report."""
    with mpl.rc_context(dict(SETTINGS)), warnings.catch_warnings():  # type: ignore[arg-type]
        warnings.simplefilter("ignore")  # letters that the font lacks
        yield
