"""Where a tool's text goes: to the screen, or into a file as a whole."""

from __future__ import annotations

import sys
from pathlib import Path

from mpitrain.errors import UsageError
from mpitrain.record.run_dir import write_atomic


def deliver(text: str, file: Path | None) -> None:
    """Write a tool's text.

    Args:
        text: The whole of it.
        file: Where to; ``None``: standard output.

    Raises:
        UsageError: The file cannot be written; what stood there still stands.
    """
    if file is None:
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    # Written beside and moved over it: that must never happen to /dev/null.
    if file.exists() and not file.is_file():
        raise UsageError(f"--output {file} is no file; expected the name of one")
    try:
        write_atomic(file, text)
    except OSError as error:
        raise UsageError(
            f"--output {file} cannot be written: {error.strerror}"
        ) from None
