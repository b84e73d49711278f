"""A user-defined logger: the last values, where Prometheus' node exporter reads them.

mpirun -np 4 --oversubscribe python -m mpitrain --log examples.custom_logger:Textfile
"""

import os
from collections.abc import Mapping
from pathlib import Path

from mpitrain.record.loggers import Logger


class Textfile(Logger):
    def __init__(self, run_dir: Path, run_name: str) -> None:
        self.path = run_dir / "metrics.prom"
        self.run_name = run_name
        self.values: dict[str, float] = {}

    def log_metrics(self, metrics: Mapping[str, float], step: int) -> None:
        self.values.update(metrics, step=step)

    def save(self) -> None:
        lines = [
            f'{name.replace("/", "_")}{{run="{self.run_name}"}} {value}\n'
            for name, value in self.values.items()
        ]
        beside = self.path.with_suffix(".new")
        beside.write_text("".join(lines))
        os.replace(beside, self.path)
