"""Torch's files, read before the import where they are on a network file system.

An import reads some 1,500 modules and, by 2,000 page faults, the shared libraries; each
waits for the server, one after another. Read ahead, they wait side by side.
"""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import os
import struct
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

NETWORK_FILE_SYSTEMS = (
    *("nfs", "lustre", "gpfs", "beegfs", "ceph", "fuse", "wekafs", "panfs", "9p"),
    *("orangefs", "pvfs2", "cifs", "smb", "afs", "squashfs"),
)
"""How their types begin in proc(5)'s mountinfo; an image of squashfs may lie on one."""

PART_BYTES = 4 << 20
NUM_READERS = 16
MIN_BYTES = 1 << 20  # of a library that is worth it

logger = logging.getLogger("mpitrain")


def read_ahead(on_progress: Callable[[], object]) -> int:
    """Read what ``import torch`` needs into the page cache.

    Returns the number of bytes; 0 where torch is imported, or on no network file
    system. Left out is code for GPUs, of which an import needs nothing.
    """
    spec = None if "torch" in sys.modules else importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return 0
    if not file_system(spec.origin).startswith(NETWORK_FILE_SYSTEMS):
        return 0
    began = time.perf_counter()
    folder, num_bytes = Path(spec.origin).parent, 0
    with ThreadPoolExecutor(NUM_READERS) as readers:
        modules = [readers.submit(_read_module, path) for path in modules_of(folder)]
        parts = [
            readers.submit(_read, *part)
            for path in libraries_of(folder / "lib" / "libtorch_python.so")
            for part in parts_of(path)
        ]
        for done in (*modules, *parts):
            num_bytes += done.result()
            on_progress()
    seconds = time.perf_counter() - began
    logger.info("read %d MB of torch ahead in %.1f s", num_bytes / 1e6, seconds)
    return num_bytes


def file_system(path: str) -> str:
    """Return the type of a path's file system; ``""`` if it is not known."""
    with contextlib.suppress(OSError, ValueError):
        device = os.stat(path).st_dev  # noqa: PTH116
        number = f"{os.major(device)}:{os.minor(device)}"
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            fields = line.split()
            if fields[2] == number:
                return fields[fields.index("-") + 1]
    return ""


def modules_of(folder: Path) -> Iterator[str]:
    """Return the modules of a package."""
    for path, folders, files in os.walk(folder):
        folders[:] = {*folders} - {"__pycache__", "include", "lib", "share"}
        yield from (f"{path}/{file}" for file in files if file.endswith(".py"))


def libraries_of(library: Path) -> list[str]:
    """Return a library and those that it needs, as the loader finds them."""
    found = []
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        said = subprocess.run(
            ["ldd", str(library)], capture_output=True, text=True, timeout=120
        ).stdout
        found = [line.split()[2] for line in said.splitlines() if " => /" in line]
    return [str(library), *found]


def parts_of(path: str) -> Iterator[tuple[str, int, int]]:
    """Return the parts of a library, without code for GPUs: path, offset, size."""
    with contextlib.suppress(OSError, struct.error, ValueError, IndexError):
        size = os.stat(path).st_size  # noqa: PTH116
        if size < MIN_BYTES:
            return
        left_out = [*sorted(_gpu_code(path)), (size, size)]
        at = 0
        for begin, end in left_out:
            for offset in range(at, begin, PART_BYTES):
                yield path, offset, min(PART_BYTES, begin - offset)
            at = max(at, end)


def _gpu_code(path: str) -> list[tuple[int, int]]:
    """Return where the sections of CUDA's binaries begin and end (ELF, 64 bits)."""
    with open(path, "rb") as file:  # noqa: PTH123
        head = file.read(64)
        if head[:6] != b"\x7fELF\x02\x01":
            return []
        (table,) = struct.unpack_from("<Q", head, 40)
        size, num, names = struct.unpack_from("<HHH", head, 58)
        file.seek(table)
        rows = list(struct.iter_unpack("<IIQQQQ24x", file.read(size * num)))
        file.seek(rows[names][4])
        texts = file.read(rows[names][5])
    return [
        (row[4], row[4] + row[5])
        for row in rows
        if texts[row[0] :].partition(b"\0")[0] == b".nv_fatbin"
    ]


def _read_module(path: str) -> int:
    with contextlib.suppress(OSError):
        os.stat(path)  # noqa: PTH116 - the import compares its time
        return len(Path(importlib.util.cache_from_source(path)).read_bytes())
    return 0


def _read(path: str, offset: int, size: int) -> int:
    with contextlib.suppress(OSError), open(path, "rb", buffering=0) as file:  # noqa: PTH123
        return os.preadv(file.fileno(), [bytearray(size)], offset)
    return 0
