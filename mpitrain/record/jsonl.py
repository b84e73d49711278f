"""Files of JSON lines: a writer that no disk holds up, and a reader of growing files.

Imports no torch.
"""

from __future__ import annotations

import contextlib
import errno
import json
import logging
import os
from abc import ABC, abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mpitrain.record.background import BackgroundWriter

logger = logging.getLogger("mpitrain")

MAX_WAITING = 500_000  # lines that may wait for the disk: about 100 MB
CLOSE_SECONDS = 1.0  # how long the end of a failing job waits for a disk


class JsonlWriter:
    """Writes lines in a thread; while the disk takes none, they wait.

    ``line_of`` makes a line of a value. ``keep_bytes`` of an existing file are kept;
    ``None``: all.
    """

    def __init__(
        self,
        path: Path,
        line_of: Callable[[Any], str] = json.dumps,
        keep_bytes: int | None = None,
    ) -> None:
        self._path, self._line_of = path, line_of
        flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC
        self._descriptor = os.open(path, flags, 0o666)
        size = os.fstat(self._descriptor).st_size
        self._end = size if keep_bytes is None else min(size, keep_bytes)
        if self._end < (keep_bytes or 0):  # resumed from memory, after a full disk
            logger.warning(
                "%s lacks lines: found %d bytes, expected %d", path, size, keep_bytes
            )
        os.ftruncate(self._descriptor, self._end)
        self.num_bytes = self._end  # the file's length when no line waits
        # The thread closes the file: a write that hangs may use it until then.
        self._writer = BackgroundWriter(
            str(path),
            self._write_bytes,
            MAX_WAITING,
            lambda: os.close(self._descriptor),
        )
        last = os.pread(self._descriptor, 1, max(0, self._end - 1))
        if last not in (b"", b"\n"):  # it was cut
            self._put([""])
        self._writer.start()

    def write(self, *values: Any) -> None:
        """Add a line for each value; does not wait."""
        self._put([line for it in values if (line := self._line(it)) is not None])

    def sync(self) -> None:
        """Sync all lines to the disk; an OSError says that it takes none."""
        if (refused := self._writer.flush()) is not None:
            raise refused
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            if error.errno != errno.EINVAL:  # it knows no fsync
                raise

    def close(self, max_seconds: float | None = None) -> None:
        """Close the file when the disk has all lines, or after ``max_seconds``."""
        try:
            if max_seconds is None:
                self.sync()
            else:
                self._writer.flush(max_seconds)
        finally:
            self._writer.close()

    def _line(self, value: Any) -> str | None:
        try:
            return self._line_of(value)
        except Exception as error:  # a record does not end a training
            logger.warning("%s: left out %r: %s", self._path, value, error)
            return None

    def _put(self, lines: list[str]) -> None:
        data = "".join(f"{line}\n" for line in lines).encode()
        if lines and self._writer.put(data, len(lines)):
            self.num_bytes += len(data)

    def _write_bytes(self, data: bytes) -> int:
        # Where the last write ended: one that a full disk has cut is continued.
        num = os.pwrite(self._descriptor, data, self._end)
        self._end += num
        return num


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
            # The length does not tell: a resumed job may have cut the file, and have
            # written as much as was read before, or more.
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
