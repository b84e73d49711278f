"""A thread for each logger: a slow disk or network holds up no step, and no other."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence

from mpitrain.record.loggers.protocol import Logger, Status

logger = logging.getLogger("mpitrain")

FINISH_SECONDS = 15.0
"""How long the end waits for all loggers together."""

MOST_WAITING = 100_000
"""Points (what one step or epoch came to) that may wait for a logger: some 50 MB."""

Action = Callable[[Logger], object]


class Fed:
    """One logger, and what waits for it.

    Args:
        name: What ``--log`` calls it.
        make: Makes it; called in its thread, since that, too, may last.
    """

    def __init__(self, name: str, make: Callable[[], Logger]) -> None:
        self.name = name
        self._make = make
        self._waiting: deque[tuple[Action, int]] = deque()
        self._num_waiting = 0
        self._num_dropped = 0
        self._has_failed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(
            target=self._run, name=f"log {name}", daemon=True
        )

    def start(self) -> None:
        """Let it begin."""
        self._thread.start()

    def tell(self, action: Action, num_points: int = 1) -> None:
        """Let it do something, when all before that is done; returns at once.

        Args:
            action: What; dropped where too much waits.
            num_points: How many points that are.
        """
        with self._changed:
            if self._has_failed:
                return
            is_full = self._num_waiting + num_points > MOST_WAITING
            is_first = is_full and not self._num_dropped
            if is_full:
                self._num_dropped += num_points
            else:
                self._num_waiting += num_points
                self._waiting.append((action, num_points))
                self._changed.notify()
        if is_first:
            logger.warning(
                "--log %s: %d points wait for it, and it takes none; what comes now is "
                "dropped until it does. Training goes on",
                *(self.name, self._num_waiting),
            )

    def finish(self, status: Status, summary: Mapping[str, float]) -> None:
        """Let it end, when all before that is done; returns at once."""
        with self._changed:
            self._waiting.append((lambda it: it.finish(status, summary), 0))
            self._waiting.append((_end, 0))
            self._changed.notify()

    @property
    def is_alive(self) -> bool:
        """Whether it has not ended yet."""
        return self._thread.is_alive()

    def join(self, seconds: float) -> None:
        """Wait for its end."""
        self._thread.join(max(0.0, seconds))

    def close(self) -> None:
        """Warn of what is missing in it; it is not heard any more."""
        with self._changed:
            num_left, num_dropped = self._num_waiting, self._num_dropped
            is_late = self.is_alive
            self._has_failed = True  # who is late need not speak any more
        if is_late:
            logger.warning(
                "--log %s did not finish within %.0f s, and is left behind; %d of its "
                "points may be missing",
                *(self.name, FINISH_SECONDS, num_left + num_dropped),
            )
        elif num_dropped:
            logger.warning(
                "--log %s: %d points are missing, since it was too slow",
                *(self.name, num_dropped),
            )

    def _run(self) -> None:
        try:
            made = self._make()
            while True:
                with self._changed:
                    has_more = bool(self._waiting)
                if not has_more:
                    made.flush()
                with self._changed:
                    self._changed.wait_for(lambda: self._waiting)
                    action, num_points = self._waiting.popleft()
                if action is _end:
                    return
                action(made)
                with self._changed:
                    self._num_waiting -= num_points
        except BaseException as error:  # its sys.exit, too, is its own
            with self._changed:
                is_heard, self._has_failed = not self._has_failed, True
                self._waiting.clear()
                self._num_waiting = self._num_dropped = 0
            if is_heard:
                logger.warning(
                    "--log %s failed, and is left out from here on: %s: %s. Training "
                    "goes on",
                    *(self.name, type(error).__name__, error),
                )
                logger.info("--log %s: its stack", self.name, exc_info=error)


def finish_all(
    loggers: Sequence[Fed],
    status: Status,
    summary: Mapping[str, float],
    progress: Callable[[], object],
) -> None:
    """Let all of them end, and wait for them, not for long.

    Args:
        loggers: All of a rank.
        status: Whether the training is finished, or stopped.
        summary: The last values by name.
        progress: Told now and then that this rank is alive.
    """
    end = time.monotonic() + FINISH_SECONDS
    for one in loggers:
        one.finish(status, summary)
    for one in loggers:
        while one.is_alive and time.monotonic() < end:
            progress()
            one.join(min(1.0, end - time.monotonic()))
        one.close()


def _end(_: Logger) -> None:
    """Mark the end of what waits."""
