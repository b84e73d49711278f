"""Torch's files, read before the import where they are on a network file system.

An import reads some 1,500 modules and, by 2,000 page faults, the shared libraries; each
waits for the server, one after another. Read ahead, they wait side by side.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

# How their types begin in proc(5)'s mountinfo; an image of squashfs may lie on one.
NETWORK_FILE_SYSTEMS = (
    *("nfs", "lustre", "gpfs", "beegfs", "ceph", "fuse", "wekafs", "panfs", "9p"),
    *("orangefs", "pvfs2", "cifs", "smb", "afs", "squashfs"),
)
# The others are mostly code for GPUs, of which an import reads little.
LIBRARIES = ("libc10.so", "libtorch_cpu.so", "libtorch_python.so")
PART_BYTES = 4 << 20  # so that threads share a library


def read_ahead(on_progress: Callable[[], object]) -> int:
    """Read most of what ``import torch`` needs into the page cache; return its bytes.

    0 where torch is imported, or on no network file system.
    """
    spec = None if "torch" in sys.modules else importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return 0
    folder, num_bytes = Path(spec.origin).parent, 0
    if file_system(folder).startswith(NETWORK_FILE_SYSTEMS):
        parts = [(path, 0) for path in folder.rglob("*.py")]
        for path in (folder / "lib" / name for name in LIBRARIES):
            parts += [(path, at) for at in range(0, path.stat().st_size, PART_BYTES)]
        # Many more than cores: they wait for the server.
        with ThreadPoolExecutor(16) as readers:
            for size in readers.map(_read, *zip(*parts, strict=True)):
                num_bytes += size
                on_progress()
    return num_bytes


def file_system(path: Path) -> str:
    """Return the type of a path's file system; ``""`` if it is not known."""
    device = path.stat().st_dev
    lines = Path("/proc/self/mountinfo").read_text().splitlines()
    types = {line.split()[2]: line.partition(" - ")[2].split()[0] for line in lines}
    return types.get(f"{os.major(device)}:{os.minor(device)}", "")


def _read(path: Path, offset: int) -> int:
    with suppress(OSError):
        if path.suffix == ".py":
            # The import compares its time and size with those in the .pyc, and reads
            # this alone.
            path.stat()
            path = Path(importlib.util.cache_from_source(path))
        with path.open("rb", buffering=0) as file:
            file.seek(offset)
            return len(file.read(PART_BYTES))
    return 0
