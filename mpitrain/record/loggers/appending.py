"""A file that grows by whole pieces, or not at all."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path


class Appending:
    """Appends to a file.

    No file of Python's: at the end of a rank all of those are flushed, however long a
    disk takes.

    Args:
        path: Of the file; made where it is not there.
    """

    def __init__(self, path: Path) -> None:
        flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC
        self._descriptor = os.open(path, flags, 0o666)
        self._size = os.fstat(self._descriptor).st_size

    def write(self, data: bytes) -> None:
        """Append a piece.

        Raises:
            OSError: The disk does not take it; what was before it can be read.
        """
        left = data
        try:
            while left:
                left = left[os.write(self._descriptor, left) :]
        except OSError:
            with suppress(OSError):
                os.ftruncate(self._descriptor, self._size)
            raise
        self._size += len(data)

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)
