"""Torch's libraries, read before the import where they are on a network file system.

An import reads them by 2,000 page faults; each waits for the server, one after another.
Read ahead, they wait side by side.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

# How the types of a node's own file systems begin in proc(5)'s mountinfo. Network file
# systems are too many to list; an image of squashfs may lie on one.
LOCAL = (
    *("ext", "xfs", "btrfs", "bcachefs", "zfs", "f2fs", "jfs", "overlay"),
    *("tmpfs", "ramfs", "rootfs"),
)
# The others are mostly code for GPUs, of which an import reads little. Measured in
# benchmarks/results/2026-11-26-start.md: these alone take the import to 0.45 of its
# time, and with all modules, too, to 0.43.
LIBRARIES = ("libc10.so", "libtorch_cpu.so", "libtorch_python.so")
PART_BYTES = 4 << 20  # so that threads share a library


def read_ahead(on_progress: Callable[[], object]) -> int:
    """Read torch's libraries into the page cache; return their bytes.

    0 where torch is imported, or on a file system of the node or of unknown type.
    """
    spec = None if "torch" in sys.modules else importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        return 0
    folder, num_bytes = Path(spec.origin).parent, 0
    parts: list[tuple[Path, int]] = []
    kind = file_system(folder)
    if kind and not kind.startswith(LOCAL):
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
    with contextlib.suppress(OSError), path.open("rb", buffering=0) as file:
        file.seek(offset)
        return len(file.read(PART_BYTES))
    return 0  # such as ESTALE: the import says what is wrong, if it needs these bytes
