"""Files: written whole, read where they can be, and folders of this user alone."""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

# Errors of a file system that knows no fsync, or none of folders.
NO_SYNC = (errno.EINVAL, errno.EBADF, errno.EOPNOTSUPP, errno.ENOSYS)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """Give a file to write beside ``path``, which it replaces unless that fails.

    Readers see the old file or the new one, never a part.
    """
    # Beside it: within one file system alone a file replaces another at once.
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield beside
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)


@contextlib.contextmanager
def filling(path: Path) -> Iterator[Path]:
    """Give an empty folder that becomes ``path``, a new one, unless that fails."""
    import shutil  # not for the proxies of warm ranks: it loads three compressors

    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.mkdir()
        yield beside
        beside.rename(path)
    finally:
        shutil.rmtree(beside, ignore_errors=True)


def write_atomic(path: Path, data: str | bytes) -> None:
    """Write a file whole, as `replacing`."""
    with replacing(path) as beside:
        beside.write_bytes(data.encode() if isinstance(data, str) else data)


def sync(path: Path) -> None:
    """Let a file, or the names in a folder, outlive a node that fails."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in NO_SYNC:
            raise
    finally:
        os.close(descriptor)


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    """Write a JSON file whole."""
    # What is nested and not finite is an error here, not a file that others cannot
    # read.
    write_atomic(path, json.dumps(finite(values), indent=2, allow_nan=False) + "\n")


def finite(values: Mapping[str, Any]) -> dict[str, Any]:
    """Put ``None`` for numbers that are not finite: JSON has no word for them.

    >>> finite({"loss": float("nan"), "step": 3})
    {'loss': None, 'step': 3}
    """
    return {
        name: None if isinstance(value, float) and not math.isfinite(value) else value
        for name, value in values.items()
    }


def read_json(path: Path) -> dict[str, Any]:
    """Read a JSON file of one object; nothing where it cannot be read."""
    try:
        found = json.loads(path.read_text(errors="replace"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def read_yaml(path: Path) -> dict[str, Any]:
    """Read a YAML file of one mapping; nothing where it cannot be read."""
    import yaml

    try:
        found = yaml.safe_load(path.read_text(errors="replace"))
    except (OSError, yaml.YAMLError):
        return {}
    return found if isinstance(found, dict) else {}


def make_private_folder(folder: Path) -> None:
    """Make a folder in which nobody else can put code, or check one that is there.

    Raises an OSError if others may read or write in it, or replace it.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    # Not of what a link leads to: another user may have put one there.
    status, above = folder.lstat(), folder.parent.stat()
    # Who may write in the folder above could rename this one; where it is sticky, as
    # /tmp, only its owner can.
    may_be_replaced = above.st_mode & 0o022 and not above.st_mode & stat.S_ISVTX
    is_own = status.st_uid == os.getuid() and not stat.S_IMODE(status.st_mode) & 0o077
    if may_be_replaced or not is_own:
        raise OSError(0, f"{folder} is not a folder of this user alone")
