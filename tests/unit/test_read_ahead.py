"""What is read before `import torch`, and where."""

from __future__ import annotations

import importlib.util
import math
import subprocess
import sys
from pathlib import Path

import pytest

from mpitrain.launch.read_ahead import LIBRARIES, PART_BYTES, _read, file_system

SPEC = importlib.util.find_spec("torch")
assert SPEC is not None
assert SPEC.origin is not None
TORCH = Path(SPEC.origin).parent

PROGRAM = """
import sys
from mpitrain.launch import read_ahead
read_ahead.file_system = lambda _: sys.argv[1]
progress = []
num_bytes = read_ahead.read_ahead(lambda: progress.append(None))
assert "torch" not in sys.modules
print(num_bytes, len(progress))
"""


def read(kind: str) -> tuple[int, int]:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, kind],
        capture_output=True,
        text=True,
        check=True,
    )
    num_bytes, num_parts = map(int, done.stdout.split())
    return num_bytes, num_parts


@pytest.mark.parametrize("kind", ["ext4", "tmpfs", "overlay", "bcachefs", ""])
def test_nothing_is_read_from_a_disk_of_the_node(kind: str) -> None:
    assert read(kind) == (0, 0)


@pytest.mark.parametrize("kind", ["lustre", "dvs", "virtiofs", "fuse.dfuse"])
def test_libraries_are_read_from_a_network(kind: str) -> None:
    sizes = [(TORCH / "lib" / name).stat().st_size for name in LIBRARIES]
    num_parts = sum(math.ceil(size / PART_BYTES) for size in sizes)
    assert read(kind) == (sum(sizes), num_parts)


def test_a_server_that_fails_is_no_error(tmp_path: Path) -> None:
    assert _read(tmp_path / "gone", 0) == 0
    # The kernel answers EIO: nothing is mapped at the address 0.
    assert _read(Path("/proc/self/mem"), 0) == 0


def test_the_kind_of_a_file_system_is_found() -> None:
    assert file_system(Path("/proc/self/stat")) == "proc"
