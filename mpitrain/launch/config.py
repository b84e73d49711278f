"""What a start may be asked for; the flags that every command with ranks shares."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from mpitrain.errors import UsageError

START_TIMEOUT_SECONDS = 600.0
"""How long a stage of the start may take where nobody says otherwise."""

TIMEOUT_SECONDS = 1800.0
"""How long one collective, or one answer of the store, may take where nobody says
otherwise; as torch has it for gloo."""

Device = Literal["auto", "cpu", "cuda"]

Backend = Literal["auto", "mpi4py", "gloo", "nccl"]


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """How the ranks are started."""

    device: Device = "auto"
    """auto: GPUs where there are any; cuda: refuse to run without."""
    backend: Backend = "auto"
    """Carries tensors. auto: mpi4py (gloo for old torch), NCCL on GPUs where it can."""
    interface: str | None = None
    """Network interface by which nodes meet. Default: the best that works."""
    start_timeout: float = START_TIMEOUT_SECONDS
    """Seconds that a stage of the start, or the first step, may take."""
    hang_timeout: float | None = None
    """Seconds without a finished step or batch, after which the job is ended with
    status 76. None: for ever."""

    def __post_init__(self) -> None:
        if self.interface is not None and not self.interface.strip():
            raise UsageError("--interface is empty; expected a name such as ib0")
        check_seconds("--start-timeout", self.start_timeout)
        check_seconds("--hang-timeout", self.hang_timeout)

    def as_arguments(self) -> dict[str, Any]:
        """Return what `mpitrain.init` is called with."""
        return {
            "device": self.device,
            "backend": self.backend,
            "interface": self.interface,
            "start_timeout_seconds": self.start_timeout,
            "hang_timeout_seconds": self.hang_timeout,
        }


def check_seconds(flag: str, value: float | None) -> None:
    """Refuse a time that is no time.

    Args:
        flag: Its flag, for the message.
        value: Seconds; ``None`` passes.

    Raises:
        UsageError: It is not finite, or not above 0.
    """
    if value is not None and not (math.isfinite(value) and value > 0):
        raise UsageError(f"{flag} must be a number of seconds above 0, found {value!r}")
