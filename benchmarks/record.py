"""What every benchmark writes down beside its figures."""

from __future__ import annotations

import json
import os
import platform
from datetime import date
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np


def about(command: str, *packages: str) -> dict[str, Any]:
    """Say when, where and with what something is measured; called before it is."""
    named = ("torch", "numpy", "mpitrain", *packages)
    return {
        "date": date.today().isoformat(),
        "command": command,
        "cores": len(os.sched_getaffinity(0)),
        "platform": f"{platform.system()} {platform.machine()}",
        "versions": {name: metadata.version(name) for name in named},
        "load_before": [round(load, 1) for load in os.getloadavg()],
    }


def spread(values: list[float]) -> dict[str, float]:
    """Return the median, the middle half and the ends."""
    low, quarter, median, three_quarters, high = np.percentile(
        values, [0, 25, 50, 75, 100]
    ).tolist()
    return {
        "median": median,
        "quartiles": [quarter, three_quarters],
        "range": [low, high],
    }


def write(report: dict[str, Any], file: Path | None) -> None:
    """Write figures into a file, if one was asked for."""
    report["load_after"] = [round(load, 1) for load in os.getloadavg()]
    if file is not None:
        file.write_text(json.dumps(report, indent=2) + "\n")
