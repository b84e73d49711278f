"""Folders of this user alone, for what is run later: kernels, copies of Python."""

from __future__ import annotations

import os
import stat
from pathlib import Path


def make_private_folder(folder: Path) -> None:
    """Make a folder in which nobody else can put code, or check one that is there.

    Raises an OSError if others may read or write in it, or replace it.
    """
    folder.mkdir(mode=0o700, exist_ok=True)
    status, above = folder.lstat(), folder.parent.stat()
    may_be_replaced = above.st_mode & 0o022 and not above.st_mode & stat.S_ISVTX
    is_own = status.st_uid == os.getuid() and not stat.S_IMODE(status.st_mode) & 0o077
    if may_be_replaced or not is_own:
        raise OSError(0, f"{folder} is not a folder of this user alone")
