"""Files of JSON lines, read while they are being written. Imports no torch."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

BLOCK_BYTES = 1 << 20
"""Read and parsed at once."""

MARK_BYTES = 64
"""Of what was read last, to see whether it still stands there."""


class GrowingFile:
    """A file of JSON lines: gives what is new in it since it was last asked.

    A last line without its end waits until it has one. A line that is no JSON is left
    out: a disk that was full may have cut it. A file that is not there has no lines.

    Args:
        path: The file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._offset = 0
        self._mark = b""

    def was_cut(self) -> bool:
        """Tell whether what was read no longer stands there; then all of it is new.

        A training that goes on drops what its checkpoint does not know of.
        """
        if not self._offset:
            return False
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset - len(self._mark))
                if file.read(len(self._mark)) == self._mark:
                    return False
        except OSError:
            pass  # it is not there now
        self._offset, self._mark = 0, b""
        return True

    def blocks(self) -> Iterator[list[Any]]:
        """Yield the values of new lines, many at once."""
        try:
            file = self.path.open("rb", buffering=0)
        except OSError:
            return
        with file:
            file.seek(self._offset)
            rest = b""
            while True:
                try:
                    new = file.read(BLOCK_BYTES)
                except OSError:  # a file server that is ill
                    return
                if not new:
                    return
                lines, end, rest = (rest + new).rpartition(b"\n")
                if end:
                    lines += end
                    self._offset += len(lines)
                    self._mark = lines[-MARK_BYTES:]
                    yield parsed(lines)

    def changed_at(self) -> float | None:
        """Return when the file was written last, seconds since 1970, if it is there."""
        try:
            return self.path.stat().st_mtime
        except OSError:
            return None


def parsed(lines: bytes) -> list[Any]:
    r"""Parse lines, without those that cannot be.

    >>> parsed(b'{"a": 1}\n[2\n[3]\n')
    [{'a': 1}, [3]]
    """
    texts = [text for text in lines.decode(errors="replace").split("\n") if text]
    try:  # all at once, which takes half as long
        found: list[Any] = json.loads(f"[{','.join(texts)}]")
        if len(found) == len(texts):
            return found
    except (ValueError, RecursionError):
        pass
    values: list[Any] = []
    for text in texts:
        try:
            values.append(json.loads(text))
        except (ValueError, RecursionError):
            continue
    return values
