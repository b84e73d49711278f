"""What is read before `import torch`, and where."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from mpitrain.launch.read_ahead import _read, file_system

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
    names = ("libc10.so", "libtorch_cpu.so", "libtorch_python.so")
    modules = sum(path.stat().st_size for path in TORCH.rglob("*.pyc"))
    libraries = sum((TORCH / "lib" / name).stat().st_size for name in names)
    assert libraries < num_bytes <= libraries + modules
    assert num_parts > 1000


def test_the_kind_of_a_file_system_is_found() -> None:
    assert file_system(Path("/proc/self/stat")) == "proc"


def test_what_is_gone_meanwhile_is_left_out(tmp_path: Path) -> None:
    assert _read(tmp_path / "gone.py", 0) == 0
