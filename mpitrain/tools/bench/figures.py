"""From what was timed to figures: rows for the table, the JSON and the plot."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from operator import attrgetter
from typing import Any

from mpitrain.launch.parts import in_node_order, part_of
from mpitrain.tools.bench.cells import Cell
from mpitrain.tools.bench.columns import markdown
from mpitrain.tools.bench.prediction import (
    Weights,
    line_through,
    predicted_seconds,
)
from mpitrain.tools.bench.trial import Trial
from mpitrain.tools.check.bandwidth import bus_factor
from mpitrain.world import World

HEAD = (
    *("strategy", "nodes", "ranks", "batch", "ms/step", "min to max", "samples/s"),
    *("speed-up", "efficiency", "all-reduce", "waiting", "predicted"),
)

Row = dict[str, Any]
"""What JSON can hold; the fields are those of `rows_of`."""


@dataclass(kw_only=True)
class Measured:
    """What was timed, round by round."""

    trials: dict[Cell, list[Trial]] = field(default_factory=dict)
    """Of each row."""
    all_reduces: dict[int, list[float]] = field(default_factory=dict)
    """Seconds of an all-reduce of the gradients' size, by number of ranks."""


def rows_of(
    measured: Measured, world: World, weights: Weights, strategies: Sequence[str]
) -> list[Row]:
    """Sum up every row, and say what was to be expected.

    Rounds go in pairs: each speed-up is of one round and the one of `single` beside it,
    so that what disturbs a machine for a while disturbs both.

    Args:
        measured: What was timed.
        world: Where rank zero stands, among all ranks.
        weights: What travels.
        strategies: In their order.
    """
    order = ["single", *(name for name in strategies if name != "single")]
    singles = {
        cell.fixed: cell for cell in measured.trials if cell.strategy == "single"
    }
    compute = line_through(
        [
            (cell.global_batch_size, statistics.median(_seconds(measured, cell)))
            for cell in singles.values()
        ]
    )
    rows: list[Row] = []
    for cell in sorted(
        measured.trials,
        key=lambda it: (it.fixed, it.num_devices, order.index(it.strategy)),
    ):
        seconds = _seconds(measured, cell)
        rates = _rates(measured, cell)
        firsts = _rates(measured, singles[cell.fixed])
        speed_ups = [a / b for a, b in zip(rates, firsts, strict=True)]
        row: Row = asdict(cell) | {
            "seconds": seconds,
            "step_seconds": statistics.median(seconds),
            "samples_per_second": statistics.median(rates),
            "speed_up": statistics.median(speed_ups),
            "speed_up_range": [min(speed_ups), max(speed_ups)],
            "efficiency": statistics.median(speed_ups) / cell.num_devices,
            "all_reduce_share": None,
            "wait_share": None,
            "predicted_seconds": None,
            "predicted_speed_up": None,
            "losses": measured.trials[cell][0].losses,
        }
        if cell.strategy == "ddp":
            row |= _shares(measured.trials[cell])
        if cell.num_ranks > 1:
            expected = predicted_seconds(
                compute,
                cell.samples_per_device,
                part_of(world, in_node_order(world)[: cell.num_ranks]),
                weights.traffic(cell.strategy, cell.num_ranks),
                _bandwidth(measured, weights, cell.num_ranks),
            )
            rate = cell.global_batch_size / expected
            row["predicted_seconds"] = expected
            row["predicted_speed_up"] = rate / statistics.median(firsts)
        rows.append(row)
    return rows


def bandwidths_of(measured: Measured, weights: Weights) -> list[Row]:
    """Sum up the all-reduces alone, in what JSON can hold."""
    return [
        {
            "num_ranks": num_ranks,
            "num_bytes": weights.num_bytes,
            "seconds": seconds,
            "bus_bytes_per_second": _bandwidth(measured, weights, num_ranks),
        }
        for num_ranks, seconds in sorted(measured.all_reduces.items())
    ]


def tables(rows: Sequence[Row], left_out: Sequence[str]) -> str:
    """Write the rows down in Markdown.

    Args:
        rows: Of `rows_of`.
        left_out: Why there are no more.

    Returns:
        A table for each of both kinds.
    """
    lines: list[str] = []
    for fixed in ("problem", "work"):
        of_kind = [row for row in rows if row["fixed"] == fixed]
        if of_kind:
            lines += [f"{title_of(of_kind)}:", ""]
            lines += [markdown([HEAD, *map(_cells, of_kind)]), ""]
    lines += [f"Left out: {why}." for why in left_out]
    return "\n".join(lines).rstrip() + "\n"


def title_of(rows: Sequence[Row]) -> str:
    """Say what is fixed in some rows."""
    size = rows[0]["global_batch_size"]  # that of one rank
    if rows[0]["fixed"] == "problem":
        return f"Fixed problem, {size} samples per step"
    return f"Fixed work, {size} samples per step on each rank"


def _cells(row: Mapping[str, Any]) -> tuple[str, ...]:
    milliseconds = [1e3 * it for it in row["seconds"]]
    strategy, devices = row["strategy"], row["num_devices"]
    expected = row["predicted_seconds"]
    shares = row["all_reduce_share"], row["wait_share"]
    return (
        f"dp ({devices} GPUs)" if strategy == "dp" else strategy,
        str(row["num_nodes"]),
        str(row["num_ranks"]),
        str(row["global_batch_size"]),
        f"{1e3 * row['step_seconds']:.1f}",
        f"{min(milliseconds):.1f} to {max(milliseconds):.1f}",
        f"{row['samples_per_second']:,.0f}",
        f"{row['speed_up']:.2f}",
        f"{row['efficiency']:.0%}",
        *("-" if it is None else f"{it:.0%}" for it in shares),
        "-" if expected is None else f"{1e3 * expected:.1f}",
    )


def _seconds(measured: Measured, cell: Cell) -> list[float]:
    return [trial.step_seconds for trial in measured.trials[cell]]


def _rates(measured: Measured, cell: Cell) -> list[float]:
    return [cell.global_batch_size / it for it in _seconds(measured, cell)]


def _shares(trials: Sequence[Trial]) -> Row:
    """Return what of a step goes where; with fsdp ranks meet elsewhere, too."""
    return {
        name: statistics.median(seconds(trial) / trial.step_seconds for trial in trials)
        for name, seconds in (
            ("all_reduce_share", attrgetter("all_reduce_seconds")),
            ("wait_share", attrgetter("wait_seconds")),
        )
    }


def _bandwidth(measured: Measured, weights: Weights, num_ranks: int) -> float:
    seconds = statistics.median(measured.all_reduces[num_ranks])
    return weights.num_bytes * bus_factor(num_ranks) / seconds
