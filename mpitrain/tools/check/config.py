"""The flags of `check`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from mpitrain.launch.config import LaunchConfig


@dataclass(frozen=True, kw_only=True)
class CheckConfig:
    """Look before you queue: at all ranks under mpirun, at this machine without."""

    json: bool = False
    """Print one JSON object instead of the table."""
    quick: bool = False
    """Leave the bandwidth out."""
    runs_dir: Path = Path("runs")
    """Where trainings would write; looked at, not made."""
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    """How the ranks are started."""
