"""Files of JSON lines, whatever the disk does meanwhile. Imports no torch."""

from __future__ import annotations

import errno
import logging
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

logger = logging.getLogger("mpitrain")

MOST_WAITING = 500_000
"""Lines that may wait for the disk: some 100 MB."""

MOST_AT_ONCE = 5000
"""Lines that the thread makes while `write` waits for it: some milliseconds."""

LINE_BYTES = 200
"""Of a line, about."""

WRITE_SECONDS = 1.0
"""How often what has come is written, and a disk that took nothing is tried again."""

CLOSE_SECONDS = 1.0
"""How long the end of a job that fails waits for a disk: it has something to say."""

Value = TypeVar("Value")


class JsonLines(Generic[Value]):
    """Writes lines, in a thread: where the disk takes none, they wait.

    Args:
        path: The file.
        line_of: Makes a line of what is written. In the thread, or where somebody waits
            for it, of many at once: in the midst of a step each would take four times
            as long.
        keep_bytes: What of the file stays, if it is there; ``None``: all.
    """

    def __init__(
        self,
        path: Path,
        line_of: Callable[[Value], str],
        keep_bytes: int | None = None,
    ) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
        self._path = path
        self._descriptor = os.open(path, flags, 0o666)
        size = os.fstat(self._descriptor).st_size
        self._end = size if keep_bytes is None else min(size, keep_bytes)
        os.ftruncate(self._descriptor, self._end)
        self._waiting = b"" if self._ends_a_line() else b"\n"
        self._values: list[Value] = []
        self._line_of = line_of
        self._error: OSError | None = None
        self._has_dropped = False
        self._is_wanted = False
        self._is_closed = False
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name=path.stem, daemon=True).start()

    def write(self, *values: Value) -> None:
        """Add a line for each value, which is yours no more.

        Costs a microsecond; they are on the disk a second later, if that takes them.
        """
        with self._changed:
            if len(self._values) + len(self._waiting) / LINE_BYTES < MOST_WAITING:
                self._values.extend(values)
                return
            is_first, self._has_dropped = not self._has_dropped, True
        if not is_first:
            return
        logger.warning(
            "%s: the disk takes nothing, and %d lines wait; what comes now is dropped "
            "until it does. Training goes on",
            *(self._path, MOST_WAITING),
        )

    def _ends_a_line(self) -> bool:
        """Whether the file may be gone on with: a disk may have cut its last line."""
        with self._path.open("rb") as file:
            file.seek(max(0, self._end - 1))
            return file.read(1) in (b"", b"\n")

    def num_bytes(self) -> int:
        """Return how long the file will be when no line waits any more."""
        with self._changed:
            self._encode()
            return self._end + len(self._waiting)

    def sync(self) -> None:
        """Let all lines reach the disk.

        Raises:
            OSError: They do not.
        """
        with self._changed:
            self._hasten()
            self._changed.wait_for(lambda: self._error or not self._waiting)
            if self._error is not None:
                raise self._error
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            if error.errno != errno.EINVAL:  # it knows no fsync
                raise

    def hasten(self) -> None:
        """Let all lines be written now, in the thread; `wait` sees that they are."""
        with self._changed:
            self._hasten()

    def wait(self, seconds: float) -> None:
        """Wait until they are written, or the disk has said no; not for longer."""
        with self._changed:
            self._changed.wait_for(lambda: self._error or not self._waiting, seconds)

    def close(self, patience_seconds: float | None = None) -> None:
        """Close the file.

        Args:
            patience_seconds: How long the disk may take; what it has not taken by then
                is lost. ``None``: for ever, and until all is on it.

        Raises:
            OSError: Lines still waited, and could not be written.
        """
        try:
            if patience_seconds is None:
                self.sync()
            else:
                self.hasten()
                self.wait(patience_seconds)
        finally:
            with self._changed:
                self._is_closed = True
                self._changed.notify_all()

    def _hasten(self) -> None:
        """Let the thread write at once."""
        self._encode()
        self._error = None
        self._is_wanted = True
        self._changed.notify_all()

    def _encode(self, most: int = sys.maxsize) -> None:
        values, self._values = self._values[:most], self._values[most:]
        lines = [self._line(value) for value in values]
        self._waiting += "".join(lines).encode()

    def _line(self, value: Value) -> str:
        try:
            return self._line_of(value) + "\n"
        except Exception as error:  # the thread must live: others wait for it
            logger.warning("%s: left out %r: %s", self._path, value, error)
            return ""

    def _run(self) -> None:
        while True:
            with self._changed:
                # Not at every line: each time the thread that trains would have to
                # give way.
                self._changed.wait_for(
                    lambda: self._is_wanted or self._is_closed, WRITE_SECONDS
                )
                if self._is_closed:
                    os.close(self._descriptor)
                    return
                self._encode(MOST_AT_ONCE)
                self._is_wanted = False
                data, place = self._waiting, self._end
            if not data:
                continue
            error, num = None, 0
            try:
                num = os.pwrite(self._descriptor, data, place)
            except OSError as failed:
                error = failed
            with self._changed:
                self._waiting, self._end = self._waiting[num:], place + num
                self._error = error
                is_left = self._waiting or len(self._values) >= MOST_AT_ONCE
                self._is_wanted = bool(is_left) and error is None
                self._has_dropped &= bool(self._waiting)
                self._changed.notify_all()
