"""The flags of `check`."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from mpitrain.launch.config import START_TIMEOUT_SECONDS, LaunchConfig

HANG_TIMEOUT_SECONDS = 60.0
"""How long a trial may stand still where nobody says otherwise. Generous: on the first
use torch imports more."""


@dataclass(frozen=True, kw_only=True)
class CheckConfig:
    """Look before you queue: at all ranks under mpirun, at this machine without."""

    json: bool = False
    """Print one JSON object instead of the table."""
    quick: bool = False
    """Leave the bandwidth out."""
    runs_dir: Path = Path("runs")
    """Where trainings would write; looked at, not made."""
    launch: LaunchConfig = field(
        default_factory=lambda: LaunchConfig(
            start_timeout=START_TIMEOUT_SECONDS, hang_timeout=HANG_TIMEOUT_SECONDS
        )
    )
    """How the ranks are started."""
