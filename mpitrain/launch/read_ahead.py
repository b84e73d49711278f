"""Torch's files, read before the import where they are on a network file system.

An import reads some 1,500 modules and, by 2,000 page faults, the shared libraries; each
waits for the server, one after another. Read ahead, they wait side by side.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
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
PART_BYTES = 4 << 20


def read_ahead(on_progress: Callable[[], object]) -> int:
    """Read most of what ``import torch`` needs into the page cache.

    Returns the number of bytes: 0 where torch is imported, or on no network file
    system.
    """
    spec = None if "torch" in sys.modules else importlib.util.find_spec("torch")
    origin = "" if spec is None else spec.origin or ""
    if not file_system(origin).startswith(NETWORK_FILE_SYSTEMS):
        return 0
    num_bytes = 0
    with ThreadPoolExecutor(16) as readers:
        reads = [readers.submit(_read, *part) for part in parts_of(Path(origin).parent)]
        for done in reads:
            num_bytes += done.result()
            on_progress()
    return num_bytes


def file_system(path: str) -> str:
    """Return the type of a path's file system; ``""`` if it is not known."""
    with suppress(OSError, ValueError):
        device = os.stat(path).st_dev  # noqa: PTH116
        number = f"{os.major(device)}:{os.minor(device)}"
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            fields = line.split()
            if fields[2] == number:
                return fields[fields.index("-") + 1]
    return ""


def parts_of(folder: Path) -> Iterator[tuple[str, int]]:
    """Return what to read of torch's folder: paths and offsets."""
    for path in (it for name in LIBRARIES for it in folder.glob(f"lib/{name}")):
        for offset in range(0, path.stat().st_size, PART_BYTES):
            yield str(path), offset
    yield from ((str(path), 0) for path in folder.rglob("*.py"))


def _read(path: str, offset: int) -> int:
    with suppress(OSError):
        if path.endswith(".py"):
            os.stat(path)  # noqa: PTH116 - the import compares its time
            path = importlib.util.cache_from_source(path)
        with open(path, "rb", buffering=0) as file:  # noqa: PTH123
            size = min(os.fstat(file.fileno()).st_size - offset, PART_BYTES)
            return os.preadv(file.fileno(), [bytearray(size)], offset)
    return 0
