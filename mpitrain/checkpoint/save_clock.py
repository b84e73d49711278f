"""When the next checkpoint is due."""

from __future__ import annotations

import time


class SaveClock:
    """When a checkpoint is due: by counts of steps and epochs, or by time.

    Equal on all ranks, except for the time, which rank zero alone reads: the ranks
    exchange `own_number`, and all are due when they know it. Each checkpoint starts the
    clock again, under another number: a time of before that is known late does not
    count.
    """

    def __init__(self, seconds: float) -> None:
        self.is_due = False
        self.seconds = seconds
        self._number = 0
        self.restart()

    def restart(
        self, *, back_off_seconds: float | None = None, since: float | None = None
    ) -> None:
        """Start again; with ``back_off_seconds``, until then none is due by counts.

        ``since``: the time, monotonic, from which it counts; ``None``: now.
        """
        self._is_backing_off = back_off_seconds is not None
        seconds = self.seconds if back_off_seconds is None else back_off_seconds
        self._number += 1
        self._time = (since or time.monotonic()) + seconds

    @property
    def may_save(self) -> bool:
        """Whether a checkpoint is due, and may be tried."""
        return self.is_due and not self._is_backing_off

    def own_number(self) -> int:
        """Return the clock's number if its time has come, else 0; local."""
        return self._number if time.monotonic() >= self._time else 0

    def apply(self, number: int) -> None:
        """Be due if this is the number of the clock, which all ranks know."""
        if number == self._number:
            self.is_due, self._is_backing_off = True, False
