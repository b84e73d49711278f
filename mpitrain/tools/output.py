"""The output of tools: text to the screen or into a file."""

from __future__ import annotations

import sys
from pathlib import Path

from mpitrain.errors import UsageError
from mpitrain.record.run_dir import write_atomic


def deliver(text: str, file: Path | None) -> None:
    """Write text to a file as a whole, or to standard output if `file` is ``None``."""
    if file is None:
        sys.stdout.write(text)
        sys.stdout.flush()
        return
    # The file is replaced, which must never happen to /dev/null.
    if file.exists() and not file.is_file():
        raise UsageError(f"--output {file} is no file; expected the name of one")
    try:
        write_atomic(file, text)
    except OSError as error:
        raise UsageError(
            f"--output {file} cannot be written: {error.strerror}"
        ) from None
