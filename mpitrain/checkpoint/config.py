"""How a training is kept from being lost: the flags."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from mpitrain.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """When checkpoints are written, what is gone on from, when to stop."""

    checkpoint_every_epochs: int | None = 1
    """Write a checkpoint after so many epochs; None: only by the other two,
    and at the end."""
    checkpoint_every_steps: int | None = None
    """Write one after so many steps, too."""
    checkpoint_every_minutes: float | None = 10.0
    """Write one when the last was begun so long ago; whichever comes first."""
    keep_checkpoints: int | None = 3
    """How many of the newest stay, beside the best one. None: all."""
    best_by: str | None = None
    """Metric of the validation that the best checkpoint is chosen by, such as
    val_loss. Lower is better for names with loss or error, else higher; or
    min:NAME, max:NAME. Default: accuracy, else loss."""
    resume: str = "auto"
    """auto: the same --name goes on from its newest checkpoint. never: it is
    an error that it exists. Or a run folder or checkpoint to begin from."""
    new_run: bool = False
    """Where a run of that name exists, make NAME-2, NAME-3, ..."""
    time_limit: str | None = None
    """Stop in time before so much has passed since the start
    ([[hours:]minutes:]seconds). The scheduler's own limit is known."""

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
