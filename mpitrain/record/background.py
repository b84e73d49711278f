"""A writer in a thread: whoever records something waits for no disk and no process.

    put  ->  what waits  ->  the writer's thread  ->  write

Imports no torch.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections import deque
from collections.abc import Callable

logger = logging.getLogger("mpitrain")

RETRY_SECONDS = 1.0  # after an error, such as that of a full disk


class BackgroundWriter:
    """Passes bytes on in a thread, in their order.

    While ``write`` blocks (a disk that hangs) or raises an OSError (a full one), what
    was put waits, and is tried again. What comes then above ``max_items`` is dropped,
    with one warning.

    Args:
        name: Of what is written to, for the warning.
        write: Writes some of the bytes and returns how many; called in the thread.
        max_items: How many may wait.
        release: Called in the thread at its end: `write` is called no more.
    """

    def __init__(
        self,
        name: str,
        write: Callable[[bytes], int],
        max_items: int,
        release: Callable[[], object] = lambda: None,
    ) -> None:
        self.num_waiting = self.num_dropped = 0  # items
        self._name, self._max_items = name, max_items
        self._write, self._release = write, release
        self._waiting: deque[tuple[bytes, int]] = deque()
        self._error: OSError | None = None
        self._is_closed = False
        self._changed = threading.Condition()
        # A daemon: a write that hangs for ever must not keep the process from its end.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.start = self._thread.start

    def put(self, data: bytes, num_items: int = 1) -> bool:
        """Add the bytes of some items; return false if they are dropped.

        Takes microseconds. Bytes of no item are never dropped.
        """
        with self._changed:
            if not num_items or self.num_waiting + num_items <= self._max_items:
                self._waiting.append((data, num_items))
                self.num_waiting += num_items
                self._changed.notify_all()
                return True
            is_first = not self.num_dropped
            self.num_dropped += num_items
        if is_first:  # without the lock: the log, too, has such a writer
            logger.warning(
                "%s takes no data, and %d entries wait for it: more are dropped. "
                "Training continues",
                *(self._name, self.num_waiting),
            )
        return False

    def flush(self, max_seconds: float | None = None) -> OSError | None:
        """Wait until all is written, or cannot be; return why it cannot."""
        with self._changed:
            self._error = None  # tried again at once
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: self._error or self._is_closed or not self._waiting, max_seconds
            )
            return self._error

    def close(self) -> None:
        """End the thread, whatever waits."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _is_due(self) -> bool:
        return self._is_closed or bool(self._waiting and self._error is None)

    def _run(self) -> None:
        while True:
            with self._changed:
                # After an error nothing is due: this wait ends by its time, or by a
                # `flush`, which forgets the error.
                seconds = None if self._error is None else RETRY_SECONDS
                self._changed.wait_for(self._is_due, seconds)
                if self._is_closed:
                    break
                # It stays in line until it is written, since `flush` waits for an empty
                # line. The write is without the lock, which `put` needs.
                data, num_items = self._waiting[0]
            error, num_bytes = None, 0
            try:
                num_bytes = self._write(data)
            except OSError as failed:
                error = failed
            except Exception as failed:  # such as a file that somebody has closed
                print(f"{self._name}: {failed!r}", file=sys.stderr)
                num_bytes = len(data)  # gone: it would fail again
            with self._changed:
                self._error = error
                if num_bytes < len(data):
                    self._waiting[0] = data[num_bytes:], num_items
                else:
                    self._waiting.popleft()
                    self.num_waiting -= num_items
                self._changed.notify_all()
        self._release()
