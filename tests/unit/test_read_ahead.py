"""What is read before `import torch`, and where."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from mpitrain.launch.read_ahead import PART_BYTES, _read, file_system, parts_of

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


@pytest.mark.parametrize("kind", ["ext4", "tmpfs", "overlay", ""])
def test_nothing_is_read_from_a_disk_of_the_node(kind: str) -> None:
    assert read(kind) == (0, 0)


def test_libraries_and_modules_are_read_from_a_network() -> None:
    num_bytes, num_parts = read("lustre")
    assert num_bytes > (TORCH / "lib/libtorch_cpu.so").stat().st_size
    assert num_parts > 1000


def test_the_kind_of_a_file_system_is_found() -> None:
    assert file_system("/proc/self/stat") == "proc"
    assert file_system("/nowhere") == ""


def test_the_parts_are_whole_libraries_and_every_module() -> None:
    parts = list(parts_of(TORCH))
    assert len(set(parts)) == len(parts)
    for name in ("libtorch_cpu.so", "libtorch_python.so"):
        path = TORCH / "lib" / name
        offsets = sorted(offset for file, offset in parts if file == str(path))
        assert offsets == list(range(0, path.stat().st_size, PART_BYTES))
    assert (str(TORCH / "nn/modules/linear.py"), 0) in parts


def test_what_is_gone_meanwhile_is_left_out(tmp_path: Path) -> None:
    assert _read(str(tmp_path / "gone.py"), 0) == 0
