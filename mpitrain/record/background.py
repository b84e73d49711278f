"""A writer in a thread: whoever records something waits for no disk and no process.

    put  ->  what waits  ->  the writer's thread  ->  write

Imports no torch.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable

logger = logging.getLogger("mpitrain")

WAKE_SECONDS = 1.0  # how often a full disk is tried again, and lines are written
BATCH_BYTES = 1 << 16  # written at once, about


class BackgroundWriter:
    """Passes bytes on in a thread, in their order.

    While ``write`` blocks (a disk that hangs) or raises an OSError (a full one), what
    was put waits, and is tried again. What comes then above ``max_items`` is dropped,
    with one warning.

    Args:
        name: Of what is written to, for the warning.
        write: Writes some of the bytes and returns how many; called in the thread.
        release: Called in the thread at its end, when `write` is called no more.
        is_prompt: Whether the thread wakes at every `put`, or every `WAKE_SECONDS`:
            then the thread that trains has to give way to it less often.
    """

    def __init__(
        self,
        name: str,
        write: Callable[[bytes], int],
        max_items: int,
        *,
        release: Callable[[], object] = lambda: None,
        is_prompt: bool = True,
    ) -> None:
        self.num_waiting = self.num_dropped = 0  # items
        self._name, self._max_items = name, max_items
        self._write, self._release, self._is_prompt = write, release, is_prompt
        self._items: deque[tuple[bytes, int]] = deque()
        self._batch = b""  # what is being written
        self._error: OSError | None = None
        self._is_urgent = self._is_closed = False
        self._changed = threading.Condition()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self.start = self._thread.start

    def put(self, data: bytes, num_items: int = 1) -> bool:
        """Add some items' bytes; return false if they are dropped. Takes microseconds.

        Without items, bytes are never dropped.
        """
        with self._changed:
            has_room = self.num_waiting + num_items <= self._max_items
            if has_room or not num_items:
                self._items.append((data, num_items))
                self.num_waiting += num_items
                if self._is_prompt:
                    self._is_urgent = True
                    self._changed.notify_all()
                return True
            is_first = not self.num_dropped
            self.num_dropped += num_items
        if is_first:  # without the lock: the log is written by such a thread, too
            logger.warning(
                "%s takes no data, and %d entries wait for it: more are dropped. "
                "Training continues",
                *(self._name, self.num_waiting),
            )
        return False

    def flush(self, max_seconds: float | None = None) -> OSError | None:
        """Wait until all is written, or cannot be; return why it cannot."""
        with self._changed:
            self._error, self._is_urgent = None, True
            self._changed.notify_all()
            self._changed.wait_for(
                lambda: self._error or self._is_closed or not self._has_more(),
                max_seconds,
            )
            return self._error

    def close(self) -> None:
        """End the thread, whatever waits."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    def _has_more(self) -> bool:
        return bool(self._batch or self._items)

    def _run(self) -> None:
        num_items = 0  # in the batch
        while True:
            with self._changed:
                self._changed.wait_for(
                    lambda: self._is_urgent or self._is_closed, WAKE_SECONDS
                )
                if self._is_closed:
                    break
                parts = [self._batch]
                while self._items and sum(map(len, parts)) < BATCH_BYTES:
                    data, num = self._items.popleft()
                    parts.append(data)
                    num_items += num
                self._batch = batch = b"".join(parts)
            error, num_bytes = None, 0
            try:
                num_bytes = self._write(batch) if batch else 0
            except OSError as failed:
                error = failed
            with self._changed:
                self._batch, self._error = batch[num_bytes:], error
                if not self._batch:
                    self.num_waiting -= num_items
                    num_items = 0
                self._is_urgent = error is None and self._has_more()
                self._changed.notify_all()
        self._release()
