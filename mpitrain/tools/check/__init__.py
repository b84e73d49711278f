"""`python -m mpitrain check`: checks to run before a job waits in a queue.

Under mpirun `job` checks the ranks and nodes (`environment`) and torch's all-reduce
(`communication`). Without mpirun `login` checks what can be known where MPI does not
start. Both fill a `report.Report`: one dictionary, printed as JSON or as text.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from mpitrain.config import START_TIMEOUT_SECONDS, LaunchConfig

HANG_TIMEOUT_SECONDS = 60.0  # the first call of a collective may import more of torch


@dataclass(frozen=True, kw_only=True)
class CheckConfig:
    """Check all ranks and nodes under mpirun, or the login node without mpirun."""

    json: bool = False
    """Print one JSON object instead of text."""
    quick: bool = False
    """Skip the bandwidth measurement."""
    compute: bool = False
    """Compute one micro-batch on all devices for 20 s, to find one that is wrong or
    slow."""
    runs_dir: Path = Path("runs")
    """Folder of the runs. It is checked, and not created."""
    launch: LaunchConfig = field(
        default_factory=lambda: LaunchConfig(
            start_timeout=START_TIMEOUT_SECONDS, hang_timeout=HANG_TIMEOUT_SECONDS
        )
    )
    """How the ranks are started."""
