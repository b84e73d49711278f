"""Files of JSON lines: a writer that no disk holds up, and a reader of growing files.

Imports no torch.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, TypeVar

logger = logging.getLogger("mpitrain")

MAX_WAITING = 500_000  # lines that may wait for the disk: about 100 MB
# Lines that the thread makes while `write` waits for it: some milliseconds.
MAX_AT_ONCE = 5000
LINE_BYTES = 200  # about the length of a line
WRITE_SECONDS = 1.0  # how often lines are written, and a full disk is tried again
CLOSE_SECONDS = 1.0  # how long the end of a failing job waits for a disk

Value = TypeVar("Value")


class JsonlWriter(Generic[Value]):
    """Writes lines in a thread; while the disk takes none, they wait.

    ``line_of`` makes a line of a value, in the thread. ``keep_bytes`` of an existing
    file are kept; ``None``: all.
    """

    def __init__(
        self, path: Path, line_of: Callable[[Value], str], keep_bytes: int | None = None
    ) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._path = path
        self._descriptor = os.open(path, flags, 0o666)
        size = os.fstat(self._descriptor).st_size
        self._end = size if keep_bytes is None else min(size, keep_bytes)
        os.ftruncate(self._descriptor, self._end)
        last = os.pread(self._descriptor, 1, max(0, self._end - 1))
        self._waiting = b"" if last in (b"", b"\n") else b"\n"  # it was cut
        self._values: list[Value] = []
        self._line_of = line_of
        self._error: OSError | None = None
        self._has_dropped = False
        self._is_wanted = False
        self._is_closed = False
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name=path.stem, daemon=True).start()

    def write(self, *values: Value) -> None:
        """Add a line for each value; takes a microsecond."""
        with self._changed:
            if len(self._values) + len(self._waiting) / LINE_BYTES < MAX_WAITING:
                self._values.extend(values)
                return
            is_first, self._has_dropped = not self._has_dropped, True
        if is_first:
            logger.warning(
                "%s: the disk takes no data, and %d lines wait: more are dropped. "
                "Training continues",
                *(self._path, MAX_WAITING),
            )

    def num_bytes(self) -> int:
        """Return how long the file will be when no line waits."""
        with self._changed:
            self._encode()
            return self._end + len(self._waiting)

    def sync(self) -> None:
        """Sync all lines to the disk; an OSError says that it takes none."""
        with self._changed:
            self._write_now(None)
            if self._error is not None:
                raise self._error
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            if error.errno != errno.EINVAL:  # it knows no fsync
                raise

    def flush(self, max_seconds: float) -> None:
        """Write all lines now, unless the disk refuses them or takes too long."""
        with self._changed:
            self._write_now(max_seconds)

    def close(self, max_seconds: float | None = None) -> None:
        """Close the file when the disk has all lines, or after ``max_seconds``."""
        try:
            if max_seconds is None:
                self.sync()
            else:
                self.flush(max_seconds)
        finally:
            with self._changed:
                self._is_closed = True
                self._changed.notify_all()

    def _write_now(self, max_seconds: float | None) -> None:
        self._encode()
        self._error = None
        self._is_wanted = True
        self._changed.notify_all()
        self._changed.wait_for(
            lambda: self._error or not self._waiting or self._is_closed, max_seconds
        )

    def _encode(self, max_values: int | None = None) -> None:
        values = self._values[:max_values]
        del self._values[:max_values]
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
                # Not at every line: the thread that trains would have to give way.
                self._changed.wait_for(
                    lambda: self._is_wanted or self._is_closed, WRITE_SECONDS
                )
                if self._is_closed:
                    os.close(self._descriptor)
                    return
                self._encode(MAX_AT_ONCE)
                self._is_wanted = False
                data, end = self._waiting, self._end
            if not data:
                continue
            error, num = None, 0
            try:
                num = os.pwrite(self._descriptor, data, end)
            except OSError as failed:
                error = failed
            with self._changed:
                self._waiting, self._end = self._waiting[num:], end + num
                self._error = error
                has_more = self._waiting or len(self._values) >= MAX_AT_ONCE
                self._is_wanted = bool(has_more) and error is None
                self._has_dropped &= bool(self._waiting)
                self._changed.notify_all()


BLOCK_BYTES = 1 << 20  # read and parsed at once
MARK_BYTES = 64  # end of what was read, to see whether it is still there

# Errors of a line that is not what was expected: a full disk may have cut it.
BAD_LINE = (KeyError, TypeError, ValueError, IndexError, ArithmeticError)


class JsonlReader(ABC):
    """A file of JSON lines that may still be written; a subclass keeps the values.

    An incomplete last line waits until it is complete; bad lines are left out. A
    missing file has no lines.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self._mark = b""
        self._clear()

    def update(self) -> bool:
        """Read what is new; return whether what was read before no longer holds.

        A resumed training drops what its checkpoint does not hold.
        """
        was_cut = False
        with contextlib.suppress(OSError), self.path.open("rb", buffering=0) as file:
            file.seek(self._offset - len(self._mark))
            if was_cut := file.read(len(self._mark)) != self._mark:
                self._offset, self._mark = 0, b""
                self._clear()
                file.seek(0)
            rest = b""
            while new := file.read(BLOCK_BYTES):
                lines, end, rest = (rest + new).rpartition(b"\n")
                if end:
                    lines += end
                    self._offset += len(lines)
                    self._mark = lines[-MARK_BYTES:]
                    for text in lines.decode(errors="replace").split("\n"):
                        with contextlib.suppress(RecursionError, *BAD_LINE):
                            self._add(json.loads(text))
        return was_cut

    @abstractmethod
    def _clear(self) -> None:
        """Forget what was read."""

    @abstractmethod
    def _add(self, row: Any) -> None:
        """Take the value of a line."""


def changed_at(path: Path) -> float | None:
    """Return when a file was written last, in seconds since 1970."""
    try:
        return path.stat().st_mtime
    except OSError:
        return None
