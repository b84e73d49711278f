"""``metrics.jsonl``: one JSON object a line, whatever the disk does meanwhile."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path

from mpitrain.record.folder import finite

RETRY_SECONDS = 1.0
"""How soon a disk that took nothing is tried again."""


class Metrics:
    """Writes the lines, in a thread: where the disk takes none, they wait.

    Args:
        run_dir: The run folder.
        keep_bytes: What of the file stays; the rest is of steps that are not gone on
            from.
    """

    def __init__(self, run_dir: Path, keep_bytes: int = 0) -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC
        self._descriptor = os.open(run_dir / "metrics.jsonl", flags, 0o666)
        self._end = min(os.fstat(self._descriptor).st_size, keep_bytes)
        os.ftruncate(self._descriptor, self._end)
        self._waiting = b""
        self._error: OSError | None = None
        self._is_closed = False
        self._changed = threading.Condition()
        threading.Thread(target=self._run, name="metrics", daemon=True).start()

    def write(self, event: str, **values: object) -> None:
        """Add a line; floats are written whole, so that they read back as they were."""
        row = finite({"event": event, **values})
        line = json.dumps(row, allow_nan=False).encode() + b"\n"
        with self._changed:
            self._waiting += line
            self._changed.notify_all()

    def num_bytes(self) -> int:
        """Return how long the file will be when no line waits any more."""
        with self._changed:
            return self._end + len(self._waiting)

    def sync(self) -> None:
        """Let all lines reach the disk.

        Raises:
            OSError: They do not.
        """
        with self._changed:
            self._error = None
            self._changed.wait_for(lambda: self._error or not self._waiting)
            if self._error is not None:
                raise self._error
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the file.

        Raises:
            OSError: Lines still waited, and could not be written.
        """
        try:
            self.sync()
        finally:
            with self._changed:
                self._is_closed = True
                self._changed.notify_all()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._is_closed)
                if self._is_closed:
                    os.close(self._descriptor)
                    return
                data, place = self._waiting, self._end
            error, num = None, 0
            try:
                num = os.pwrite(self._descriptor, data, place)
            except OSError as failed:
                error = failed
            with self._changed:
                self._waiting, self._end = self._waiting[num:], place + num
                self._error = error
                self._changed.notify_all()
                if error is not None:
                    self._changed.wait_for(lambda: self._is_closed, RETRY_SECONDS)
