"""What a start may be asked for; the flags that every command with ranks shares."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

from mpitrain.errors import UsageError

START_TIMEOUT_SECONDS = 600.0
"""How long a stage of the start may take where nobody says otherwise."""

MIN_START_TIMEOUT_SECONDS = 120.0
"""What a shorter hang timeout leaves of it: torch may come from a slow file system."""

TIMEOUT_SECONDS = 1800.0
"""How long one collective, or one answer of the store, may take where nobody says
otherwise; as torch has it for gloo."""

Device = Literal["auto", "cpu", "cuda"]

Backend = Literal["auto", "mpi4py", "gloo", "nccl"]


@dataclass(frozen=True, kw_only=True)
class LaunchConfig:
    """Launch."""

    device: Device = "auto"
    """Device of the ranks. auto: GPUs if there are any. cuda: fail without."""
    backend: Backend = "auto"
    """torch.distributed backend. auto: mpi4py on CPUs, nccl on GPUs."""
    interface: str | None = None
    """Network interface between nodes, such as ib0. Default: the best that works."""
    start_timeout: float | None = None
    """Seconds for each stage of the start and the first step. Default: 120 to 600,
    as --hang-timeout."""
    hang_timeout: float | None = None
    """End the job with status 76 after this many seconds without progress; None:
    never."""

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


def default_start_timeout(
    hang_timeout: float | None, start_timeout: float | None = None
) -> float:
    """Return how long a stage of the start may take.

    Args:
        hang_timeout: What a training may take without a step, in seconds.
        start_timeout: What was asked for the start, in seconds; it is obeyed.

    Returns:
        Seconds.

    >>> [default_start_timeout(hang) for hang in (None, 8, 300, 3600)]
    [600.0, 120.0, 300, 600.0]
    >>> default_start_timeout(8, 1800)
    1800
    """
    hang_timeout = hang_timeout or START_TIMEOUT_SECONDS
    least = max(hang_timeout, MIN_START_TIMEOUT_SECONDS)
    return start_timeout or min(least, START_TIMEOUT_SECONDS)


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
