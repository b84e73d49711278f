"""Files of JSON lines: a writer that no disk holds up, and a reader of growing files.

Imports no torch.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Generic, TypeVar

logger = logging.getLogger("mpitrain")

MAX_WAITING = 500_000
"""Lines that may wait for the disk: about 100 MB."""

MAX_AT_ONCE = 5000
"""Lines that the thread makes while `write` waits for it: some milliseconds."""

LINE_BYTES = 200
"""About the length of a line."""

WRITE_SECONDS = 1.0
"""How often lines are written, and a disk that took nothing is tried again."""

CLOSE_SECONDS = 1.0
"""How long the end of a failing job waits for a disk."""

Value = TypeVar("Value")


class JsonlWriter(Generic[Value]):
    """Writes lines in a thread; while the disk takes none, they wait.

    Args:
        path: The file.
        line_of: Makes a line of a value, in the thread.
        keep_bytes: How much of an existing file is kept; ``None``: all.
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
        """Add a line for each value; takes a microsecond."""
        with self._changed:
            if len(self._values) + len(self._waiting) / LINE_BYTES < MAX_WAITING:
                self._values.extend(values)
                return
            is_first, self._has_dropped = not self._has_dropped, True
        if not is_first:
            return
        logger.warning(
            "%s: the disk takes nothing, and %d lines wait; what comes now is dropped "
            "until it does. Training goes on",
            *(self._path, MAX_WAITING),
        )

    def _ends_a_line(self) -> bool:
        """Return whether the last line is complete; a full disk may have cut it."""
        with self._path.open("rb") as file:
            file.seek(max(0, self._end - 1))
            return file.read(1) in (b"", b"\n")

    def num_bytes(self) -> int:
        """Return how long the file will be when no line waits."""
        with self._changed:
            self._encode()
            return self._end + len(self._waiting)

    def sync(self) -> None:
        """Sync all lines to the disk.

        Raises:
            OSError: It takes none.
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
        """Let the thread write all lines now; `wait` waits until it has."""
        with self._changed:
            self._hasten()

    def wait(self, seconds: float) -> None:
        """Wait until all lines are written, or the disk has refused them."""
        with self._changed:
            self._changed.wait_for(lambda: self._error or not self._waiting, seconds)

    def close(self, patience_seconds: float | None = None) -> None:
        """Close the file.

        Args:
            patience_seconds: How long to wait for the disk; what it has not taken by
                then is lost. ``None``: until all is on it.

        Raises:
            OSError: Lines could not be written.
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
        """Let the thread write now; the lock is held."""
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
                # Not at every line: the thread that trains would have to give way.
                self._changed.wait_for(
                    lambda: self._is_wanted or self._is_closed, WRITE_SECONDS
                )
                if self._is_closed:
                    os.close(self._descriptor)
                    return
                self._encode(MAX_AT_ONCE)
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
                is_left = self._waiting or len(self._values) >= MAX_AT_ONCE
                self._is_wanted = bool(is_left) and error is None
                self._has_dropped &= bool(self._waiting)
                self._changed.notify_all()


BLOCK_BYTES = 1 << 20
"""Read and parsed at once."""

MARK_BYTES = 64
"""End of what was read, to see whether it is still there."""


class JsonlReader:
    """Reads what is new in a file of JSON lines that may still be written.

    An incomplete last line waits until it is complete; lines that are no JSON are left
    out, since a full disk may have cut them. A missing file has no lines.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self._mark = b""

    def was_cut(self) -> bool:
        """Return whether what was read is no longer there; then all of it is new.

        A resumed training drops what its checkpoint does not hold.
        """
        if not self._offset:
            return False
        with contextlib.suppress(OSError), self.path.open("rb") as file:
            file.seek(self._offset - len(self._mark))
            if file.read(len(self._mark)) == self._mark:
                return False
        self._offset, self._mark = 0, b""
        return True

    def blocks(self) -> Iterator[list[Any]]:
        """Yield the values of new lines, many at once."""
        with contextlib.suppress(OSError), self.path.open("rb", buffering=0) as file:
            file.seek(self._offset)
            rest = b""
            while new := file.read(BLOCK_BYTES):
                lines, end, rest = (rest + new).rpartition(b"\n")
                if end:
                    lines += end
                    self._offset += len(lines)
                    self._mark = lines[-MARK_BYTES:]
                    yield parse_lines(lines)

    def changed_at(self) -> float | None:
        """Return when the file was written last, in seconds since 1970."""
        try:
            return self.path.stat().st_mtime
        except OSError:
            return None


def parse_lines(lines: bytes) -> list[Any]:
    r"""Parse lines of JSON, without those that are none.

    >>> parse_lines(b'{"a": 1}\n[2\n[3]\n')
    [{'a': 1}, [3]]
    """
    values = []
    for text in lines.decode(errors="replace").split("\n"):
        with contextlib.suppress(ValueError, RecursionError):
            values.append(json.loads(text))
    return values
