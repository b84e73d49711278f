"""`import torch` from a file system that answers late, with and without reading ahead.

    apt install fuse3; .venv/bin/pip install mfusepy
    .venv/bin/python benchmarks/read_ahead.py --latency-ms 5 --processes 4

As root. Serves this environment's packages through FUSE; each read and each lookup
waits for the latency. Each run mounts it anew, so that the kernel has no page of it.
The ways take turns; one process reads ahead, then all import.
"""

from __future__ import annotations

import argparse
import errno
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from record import about, spread, write

PACKAGES = next(path for path in sys.path if path.endswith("site-packages"))

IMPORT = "import torch; assert torch.__file__.startswith({!r}), torch.__file__"
AHEAD = """
import sys
sys.path.append({root!r})
from mpitrain.launch.read_ahead import read_ahead
assert read_ahead(lambda: None) > 0
"""


def serve(folder: str, latency: float) -> None:
    """Serve the packages at `folder`, until it is unmounted."""
    import mfusepy

    class Late(mfusepy.Operations):
        def _path(self, path: str) -> str:
            return PACKAGES + path

        def getattr(self, path: str, fh: Any = None) -> dict[str, Any]:
            time.sleep(latency)
            try:
                return self._attributes(self._path(path))
            except OSError as error:
                raise mfusepy.FuseOSError(error.errno or errno.EIO) from None

        def _attributes(self, path: str) -> dict[str, Any]:
            found = os.lstat(path)
            return {name: getattr(found, name) for name in NAMES}

        def readdir(self, path: str, fh: Any) -> list[tuple[str, dict[str, Any], int]]:
            time.sleep(latency)
            with os.scandir(self._path(path)) as entries:
                return [(it.name, self._attributes(it.path), 0) for it in entries]

        def readlink(self, path: str) -> str:
            return str(Path(self._path(path)).readlink())

        def open(self, path: str, flags: int) -> int:
            return os.open(self._path(path), flags)

        def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
            time.sleep(latency)
            return os.pread(fh, size, offset)

        def release(self, path: str, fh: int) -> int:
            os.close(fh)
            return 0

    seconds = {"attr_timeout": 600, "entry_timeout": 600, "negative_timeout": 600}
    options = {"ro": True, "kernel_cache": True, "max_read": 1 << 20, **seconds}
    mfusepy.FUSE(Late(), folder, foreground=True, **options)


NAMES = (
    *("st_mode", "st_size", "st_nlink", "st_uid", "st_gid"),
    *("st_atime", "st_mtime", "st_ctime"),
)


def run(folder: str, asked: argparse.Namespace, *, ahead: bool) -> float:
    """Import in all processes at once; return the seconds of the last."""
    words = [sys.executable, __file__, "--serve", folder]
    server = subprocess.Popen([*words, "--latency-ms", str(asked.latency_ms)])
    try:
        while not os.path.ismount(folder):
            time.sleep(0.05)
        environ = {**os.environ, "PYTHONPATH": folder}
        command = [sys.executable, "-c"]
        began = time.perf_counter()
        if ahead:
            program = AHEAD.format(root=str(Path(__file__).parents[1]))
            subprocess.run([*command, program], env=environ, check=True)
        program = IMPORT.format(folder)
        started = [
            subprocess.Popen([*command, program], env=environ)
            for _ in range(asked.processes)
        ]
        assert [one.wait() for one in started] == [0] * asked.processes
        return time.perf_counter() - began
    finally:
        subprocess.run(["umount", "-l", folder], check=True)
        server.wait(60)


def main() -> None:
    """Print both medians and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--latency-ms", type=float, default=5.0)
    parser.add_argument("--processes", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--serve", help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.serve:
        serve(asked.serve, asked.latency_ms / 1e3)
        return
    report = about("benchmarks/read_ahead.py " + " ".join(sys.argv[1:]))
    seconds: dict[bool, list[float]] = {False: [], True: []}
    with tempfile.TemporaryDirectory() as folder:
        for _ in range(asked.rounds):
            for ahead, found in seconds.items():
                found.append(run(folder, asked, ahead=ahead))
                print(f"ahead={ahead}: {found[-1]:.1f} s", flush=True)
    ratios = [a / b for a, b in zip(seconds[True], seconds[False], strict=True)]
    by_faults, in_order = map(statistics.median, seconds.values())
    print(f"by faults {by_faults:.1f} s, read ahead {in_order:.1f} s: {spread(ratios)}")
    report |= {"by_faults": seconds[False], "ahead": seconds[True]}
    write({**report, "ratios": spread(ratios)}, asked.json)


if __name__ == "__main__":
    main()
