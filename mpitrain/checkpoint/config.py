"""How a training is kept from being lost: the flags."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from mpitrain.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints, resuming and time limit."""

    checkpoint_every_epochs: int | None = 1
    """Save a checkpoint every N epochs; None: not per epoch."""
    checkpoint_every_steps: int | None = None
    """Save a checkpoint every N steps."""
    checkpoint_every_minutes: float | None = 10.0
    """Save a checkpoint every N minutes; None: off."""
    keep_checkpoints: int | None = 3
    """Keep the N newest checkpoints and the best one; None: all."""
    best_by: str | None = None
    """Validation metric of the best checkpoint: NAME, min:NAME or max:NAME. Default:
    accuracy, else loss."""
    resume: str = "auto"
    """auto: resume the run of this --name. never: fail if it exists. Or a run folder
    or checkpoint to start from."""
    new_run: bool = False
    """If the run exists, start NAME-2, NAME-3, ..."""
    time_limit: str | None = None
    """Save a checkpoint and stop before this much time ([[hours:]minutes:]seconds)
    has passed."""

    def __post_init__(self) -> None:
        for flag, value in (
            ("--checkpoint-every-epochs", self.checkpoint_every_epochs),
            ("--checkpoint-every-steps", self.checkpoint_every_steps),
            ("--keep-checkpoints", self.keep_checkpoints),
        ):
            if value is not None and value < 1:
                raise UsageError(f"{flag} must be at least 1 or None, found {value}")
        minutes = self.checkpoint_every_minutes
        if minutes is not None and not 0 < minutes < math.inf:
            raise UsageError(
                f"--checkpoint-every-minutes must be above 0 or None, found {minutes}"
            )
        if not re.fullmatch(r"((min|max):)?[^:]+", self.best_by or "accuracy"):
            raise UsageError(
                f"--best-by {self.best_by!r}: expected the name of a metric, min:NAME "
                "or max:NAME"
            )
        if self.new_run and self.resume == "never":
            raise UsageError("--new-run never goes on; leave --resume never out")
        _ = self.time_limit_seconds

    @property
    def time_limit_seconds(self) -> float | None:
        """`time_limit` in seconds."""
        return None if self.time_limit is None else seconds_of(self.time_limit)


def seconds_of(time: str) -> float:
    """Read a time.

    Raises:
        UsageError: It is none.

    >>> seconds_of("90"), seconds_of("1:30"), seconds_of("2:00:00")
    (90.0, 90.0, 7200.0)
    """
    if not re.fullmatch(r"(\d+:){0,2}\d+(\.\d+)?", time) or not float(
        re.sub(r"[:.]", "", time)
    ):
        raise UsageError(
            f"--time-limit {time!r}: expected hours:minutes:seconds, minutes:seconds "
            "or seconds, more than 0"
        )
    total = 0.0
    for part in time.split(":"):
        total = 60 * total + float(part)
    return total
