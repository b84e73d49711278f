"""Why a training shall stop though it is not finished, and when that is known.

It is asked to by USR2 (Open MPI's mpirun forwards it; MPICH's mpiexec dies of it), by
TERM where that reaches a rank and not its launcher, by a file ``stop`` in the run
folder; or the time that the scheduler gives, or ``--time-limit``, comes to its end.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

from mpitrain.errors import MpitrainError
from mpitrain.schedulers.deadline import seconds_left

logger = logging.getLogger("mpitrain")

CAN_GO_ON = 75
"""The exit status that says: nothing is wrong, start it once more (EX_TEMPFAIL)."""

STOP_FILE = "stop"

REASONS = (
    "",
    "the time limit comes",
    "a file named stop is in the run folder",
    "SIGUSR2 arrived",
    "SIGTERM arrived",
)
"""In words, by the number that the ranks tell each other; 0: it goes on."""

TIME, FILE, USR2, TERM = range(1, 5)

FIRST_MARGIN_SECONDS = 20.0
"""What is left for the end, beside checkpoints: other ranks, their launcher."""

MARGIN_SHARE = 0.2
"""No more than this share of what was left at the start is kept for the end."""

FILE_SECONDS = 1.0
"""How often the file is looked for."""


Handler = Callable[[int, FrameType | None], object]


class Stopped(MpitrainError):
    """The training has stopped on purpose, and can go on."""

    exit_status = CAN_GO_ON


class Stopper:
    """Knows on this rank whether to stop.

    From here on USR2 and TERM do not end this process.

    Args:
        run_dir: Where the file is looked for; ``None`` where another rank does, which
            also knows the time.
        time_limit_seconds: What was asked for, counted from the start of the process.
        used_seconds: What of it is used up.
        hear_term: Lets a handler hear of TERM, where `signal.signal` would keep others
            from it.

    Attributes:
        margin: Returns the seconds that an end takes, as far as is known.
    """

    margin: Callable[[], float]

    def __init__(
        self,
        run_dir: Path | None,
        time_limit_seconds: float | None,
        used_seconds: float,
        hear_term: Callable[[Handler], object] | None = None,
    ) -> None:
        self._signal = 0
        self._has_file = False
        self._stands_down = False
        self.margin = lambda: FIRST_MARGIN_SECONDS
        self._deadline: float | None = None
        self._first_left = 0.0
        signal.signal(signal.SIGUSR2, self._hear)
        if hear_term is not None:
            hear_term(self._hear)
        else:
            signal.signal(signal.SIGTERM, self._hear)
        if run_dir is None:
            return
        if time_limit_seconds is not None:
            self._set_deadline(time_limit_seconds - used_seconds, "--time-limit")
        # In a thread: a scheduler may be slow, a disk may not answer at all.
        file = run_dir / STOP_FILE
        threading.Thread(
            target=self._look, args=(file,), name="stopper", daemon=True
        ).start()

    def wanted(self) -> int:
        """Return the number of the reason to stop; 0 for none."""
        if self._signal or self._has_file:
            return self._signal or FILE
        if self._deadline is None:
            return 0
        return TIME if time.monotonic() > self._deadline - self._margin() else 0

    def seconds_left(self) -> float | None:
        """Return how long until the time limit stops it; ``None``: there is none."""
        if self._deadline is None:
            return None
        return max(0.0, self._deadline - self._margin() - time.monotonic())

    def _margin(self) -> float:
        return min(self.margin(), MARGIN_SHARE * self._first_left)

    def stand_down(self) -> None:
        """Stop nothing: from here on USR2 and TERM end this process, as any other."""
        self._stands_down = True
        if self._signal:
            self._end(signal.SIGUSR2 if self._signal == USR2 else signal.SIGTERM)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        del frame
        if self._stands_down:
            self._end(number)
        self._signal = USR2 if number == signal.SIGUSR2 else TERM

    @staticmethod
    def _end(number: int) -> None:
        """End this process by a signal, as if nobody had listened."""
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def _look(self, file: Path) -> None:
        left = seconds_left(os.environ)
        if left is not None:
            self._set_deadline(left, "the scheduler")
        while not self._has_file:
            time.sleep(FILE_SECONDS)
            with contextlib.suppress(OSError):
                self._has_file = file.exists()

    def _set_deadline(self, seconds: float, who: str) -> None:
        """Note when time is up; by a clock that nobody sets."""
        end = time.monotonic() + seconds
        if self._deadline is None or end < self._deadline:
            self._first_left = max(seconds, 0.0)
            self._deadline = end
            logger.info("%s leaves %.0f s from now", who, seconds)
