"""``--log openmetrics``: a file that Prometheus' node exporter reads."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from mpitrain.files import write_atomic
from mpitrain.record.cost import cost_of
from mpitrain.record.loggers.base import Logger, Status

FILE = "openmetrics.prom"
UNITS = ("bytes", "joules", "percent", "seconds")
NO_METRICS = ("num_jobs", "energy_parts")


class OpenMetricsLogger(Logger):
    """Writes ``openmetrics.prom``: the last values, and what the run costs until now.

    In OpenMetrics' text format 1.0, which is one of Prometheus', too.
    """

    def __init__(self, run_dir: Path, run_name: str) -> None:
        run = run_name.replace("\\", r"\\").replace('"', r"\"")
        self._run_dir, self._labels = run_dir, f'{{run="{run}"}}'
        self._values = dict[str, float]()

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        """Keep the values."""
        self._values |= {**metrics, "step": step}

    def save(self) -> None:
        """Write the file whole."""
        values = {re.sub(r"\W", "_", name): it for name, it in self._values.items()}
        for name, value in cost_of(self._run_dir).items():
            if name.endswith("_hours"):  # seconds are the base unit
                values[name.replace("hours", "seconds_total")] = value * 3600
            elif name not in NO_METRICS:
                is_sum = name in ("energy_joules", "queue_seconds")
                values[name + "_total" * is_sum] = value
        lines = []
        for name, value in sorted(values.items()):
            metric = f"mpitrain_{name.removesuffix('_total')}"
            kind = "counter" if name.endswith("_total") else "gauge"
            lines.append(f"# TYPE {metric} {kind}")
            if (unit := metric.rpartition("_")[2]) in UNITS:
                lines.append(f"# UNIT {metric} {unit}")
            lines.append(f"# HELP {metric} {name} of the run until now")
            lines.append(f"mpitrain_{name}{self._labels} {value}")
        write_atomic(self._run_dir / FILE, "\n".join([*lines, "# EOF", ""]))

    def finalize(self, status: Status) -> None:
        """Write the file a last time."""
        self.save()
