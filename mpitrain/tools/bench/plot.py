"""The plot of `bench scaling`: speed-up over ranks, measured and predicted."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mpitrain.record.folder import write_whole
from mpitrain.tools.bench.figures import Row, title_of

COLOURS = {"ddp": "#0072b2", "fsdp": "#d55e00", "dp": "#009e73"}
"""Okabe and Ito's, which colour-blind people tell apart
(https://jfly.uni-koeln.de/color/)."""

MARKERS = {"ddp": "o", "fsdp": "s", "dp": "^"}

OFFSETS = {"ddp": 0.985, "fsdp": 1.015, "dp": 1.0}
"""Bars that would hide each other stand side by side."""


def draw(rows: Sequence[Row], model: str, file: Path) -> None:
    """Draw a panel for the fixed problem, and one for the fixed work.

    Args:
        rows: Of `figures.rows_of`.
        model: Its name, for the title.
        file: Where to, as PNG.

    Raises:
        ImportError: There is no matplotlib.
    """
    from matplotlib.figure import Figure

    kinds = [
        [row for row in rows if row["fixed"] == fixed] for fixed in ("problem", "work")
    ]
    kinds = [of_kind for of_kind in kinds if of_kind]
    figure = Figure(figsize=(6.2 * len(kinds), 5.2), layout="constrained")
    panels = figure.subplots(1, len(kinds), squeeze=False)[0]
    ranks, nodes = (max(row[f"num_{of}"] for row in rows) for of in ("ranks", "nodes"))
    some, many = "s" * (ranks > 1), "s" * (nodes > 1)
    figure.suptitle(
        f"{model}, up to {ranks} rank{some} on {nodes} node{many}", fontsize=16
    )
    for panel, of_kind in zip(panels, kinds, strict=True):
        _draw_panel(panel, of_kind)
    image = io.BytesIO()
    figure.savefig(image, format="png", dpi=150)
    write_whole(file, image.getvalue())


def _draw_panel(panel: Any, rows: Sequence[Row]) -> None:
    counts = sorted({row["num_devices"] for row in rows})
    panel.plot(counts, counts, color="0.6", linewidth=1.2, label="ideal")
    lows, highs = [1.0], [1.0, float(max(counts))]
    for strategy, colour in COLOURS.items():
        of_strategy = [row for row in rows if row["strategy"] == strategy]
        if not of_strategy:
            continue
        at = [row["num_devices"] * OFFSETS[strategy] for row in of_strategy]
        measured = [row["speed_up"] for row in of_strategy]
        spread = [
            [row["speed_up"] - row["speed_up_range"][0] for row in of_strategy],
            [row["speed_up_range"][1] - row["speed_up"] for row in of_strategy],
        ]
        panel.errorbar(
            at,
            measured,
            yerr=spread,
            color=colour,
            marker=MARKERS[strategy],
            markersize=7,
            linewidth=2,
            elinewidth=1.2,
            capsize=4,
            label=f"{strategy}, measured",
        )
        lows += [row["speed_up_range"][0] for row in of_strategy]
        highs += [row["speed_up_range"][1] for row in of_strategy]
        expected = [row["predicted_speed_up"] for row in of_strategy]
        if None not in expected:
            panel.plot(
                at,
                expected,
                color=colour,
                linestyle="--",
                linewidth=1.5,
                label=f"{strategy}, predicted",
            )
            lows += expected
            highs += expected
    panel.plot([1], [1], color="black", marker="D", markersize=6, linestyle="none")
    panel.annotate(
        "single", (1, 1), xytext=(8, -4), textcoords="offset points", fontsize=11
    )
    for axis, low, high in (
        ("x", 1.0, max(counts)),
        ("y", min(lows), max(highs)),
    ):
        getattr(panel, f"set_{axis}scale")("log", base=2)
        getattr(panel, f"set_{axis}lim")(low / 1.15, high * 1.25)
    powers = [2.0**power for power in range(-12, 24)]
    inside = [it for it in powers if min(lows) / 1.15 <= it <= max(highs) * 1.25]
    panel.set_xticks(counts, [str(count) for count in counts])
    panel.set_yticks(inside, [f"{it:g}" for it in inside])
    panel.minorticks_off()
    panel.grid(color="0.9")
    panel.set_xlabel("ranks", fontsize=13)
    panel.set_ylabel("speed-up over one rank", fontsize=13)
    panel.set_title(title_of(rows), fontsize=13)
    panel.tick_params(labelsize=12)
    panel.legend(fontsize=11, loc="upper left", frameon=False)
