"""Requests to stop a training before it is finished.

It is stopped by SIGUSR2 (Open MPI's mpirun forwards it; MPICH's mpiexec dies of it), by
SIGTERM that reaches a rank and not its launcher, by a file ``stop`` in the run folder,
or shortly before the time limit of the scheduler, or ``--time-limit``, is reached.
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
from typing import Any

from mpitrain.checkpoint.layout import list_checkpoints
from mpitrain.launch.job import Job
from mpitrain.record.run_dir import read_result
from mpitrain.schedulers import seconds_left

logger = logging.getLogger("mpitrain")

STOP_FILE = "stop"

REASONS = (
    "",
    "the time limit comes",
    "a file named stop is in the run folder",
    "SIGUSR2 arrived",
    "SIGTERM arrived",
)
"""By the number that the ranks exchange; 0: no request."""

TIME, FILE, USR2, TERM = range(1, 5)

FIRST_MARGIN_SECONDS = 20.0  # to end the job, beside checkpoints: ranks, launcher
MAX_MARGIN_FRACTION = 0.2  # of the time left at the start, at most kept for the end
FILE_SECONDS = 1.0  # how often the stop file is looked for


def forget_stop(run_dir: Path) -> bool:
    """Remove a stop file that an earlier job obeyed; return whether none is left.

    It has been obeyed if the run was stopped, or without `result.json` if a checkpoint
    was written, after it.
    """
    stop, result = run_dir / STOP_FILE, run_dir / "result.json"
    if not stop.exists():
        return True
    if result.exists():
        was_stopped = read_result(run_dir).get("status") == "stopped"
        later = [result] if was_stopped else []
    else:
        later = [checkpoint.path for checkpoint in list_checkpoints(run_dir)]
    stopped_at = stop.stat().st_mtime
    if all(path.stat().st_mtime < stopped_at for path in later):
        return False
    stop.unlink()
    return True


class PreemptionHandler:
    """Knows on this rank whether the training should stop.

    From here to `close`, USR2 and TERM do not end this process. The rank that is given
    ``run_dir`` also looks for the stop file and watches the time, counted from the
    process's start.

    Attributes:
        margin: Returns the seconds that stopping takes.
        extra_stop_reason: Returns the number of another reason to stop; 0 for none.
        keep_installed: Whether `close` does nothing, since another training follows.
    """

    margin: Callable[[], float]
    extra_stop_reason: Callable[[], int]
    keep_installed = False

    def __init__(
        self,
        run_dir: Path | None,
        time_limit_seconds: float | None,
        used_seconds: float,
    ) -> None:
        self._signal = 0
        self._has_file = False
        self._is_closed = False
        self.margin = lambda: FIRST_MARGIN_SECONDS
        self.extra_stop_reason = lambda: 0
        self._deadline: float | None = None
        self._first_left = 0.0
        self._previous: Any = None
        # Python lets no other thread set handlers.
        if threading.current_thread() is threading.main_thread():
            self._previous = signal.signal(signal.SIGUSR2, self._note)
            if Job.current is not None:  # beside the watchdog's handler
                Job.current.watchdog.on_sigterm(self._note)
        if run_dir is None:
            return
        if time_limit_seconds is not None:
            self._set_deadline(time_limit_seconds - used_seconds, "the given limit")
        # In a thread: a scheduler may be slow, a disk may not answer at all.
        file = run_dir / STOP_FILE
        threading.Thread(
            target=self._watch, args=(file,), name="preemption", daemon=True
        ).start()

    def requested(self) -> int:
        """Return the number of the reason to stop; 0 for none."""
        if self._is_closed:
            return 0
        if self._signal or self._has_file:
            return self._signal or FILE
        end = self._deadline
        if end is not None and time.monotonic() > end - self._margin():
            return TIME
        return self.extra_stop_reason()

    def seconds_left(self) -> float | None:
        """Return the seconds until the time limit stops it; ``None`` without one."""
        if self._deadline is None:
            return None
        return max(0.0, self._deadline - self._margin() - time.monotonic())

    def close(self, *, has_stopped: bool = False) -> None:
        """Restore the handlers: from here on USR2 and TERM do what they did before.

        But for USR2 after a signal, or if the training was stopped for one of another
        rank: a cancelled job may be sent TERM by the scheduler and USR2 by its script,
        and not at once. It would end this process before the stop is recorded.
        """
        if self.keep_installed:
            return
        self._is_closed = True
        if self._previous is not None:
            is_obeyed = has_stopped or self._signal
            now = signal.SIG_IGN if is_obeyed else self._previous
            signal.signal(signal.SIGUSR2, now)
            self._previous = None

    def uninstall(self) -> None:
        """Close; a signal that came already ends this process."""
        self.close()
        if self._signal and not self.keep_installed:
            self._end(signal.SIGUSR2 if self._signal == USR2 else signal.SIGTERM)

    def _margin(self) -> float:
        # A short job shall train, too, although its checkpoints may be slow.
        return min(self.margin(), MAX_MARGIN_FRACTION * self._first_left)

    def _note(self, number: int, frame: FrameType | None) -> None:
        # Only noted: it runs between any two lines, and other ranks know nothing of it.
        del frame
        if self._is_closed:
            self._end(number)
        self._signal = USR2 if number == signal.SIGUSR2 else TERM

    @staticmethod
    def _end(number: int) -> None:
        # By the signal itself, which the launcher sees as the reason.
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)

    def _watch(self, file: Path) -> None:
        left = seconds_left(os.environ)
        if left is not None:
            self._set_deadline(left, "the scheduler")
        while not self._has_file and not self._is_closed:
            time.sleep(FILE_SECONDS)
            with contextlib.suppress(OSError):
                self._has_file = file.exists()

    def _set_deadline(self, seconds: float, who: str) -> None:
        end = time.monotonic() + seconds
        if self._deadline is None or end < self._deadline:
            self._first_left = max(seconds, 0.0)
            self._deadline = end
            logger.info("%s leaves %.0f s from now", who, seconds)
