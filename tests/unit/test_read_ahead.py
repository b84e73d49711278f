"""What is read before `import torch`, and where."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from mpitrain.launch.read_ahead import file_system, libraries_of, parts_of

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


def test_what_the_loader_maps_is_among_the_libraries() -> None:
    found = libraries_of(TORCH / "lib/libtorch_python.so")
    assert str(TORCH / "lib/libtorch_cpu.so") in found
    assert not any("cudnn_engines" in path for path in found)


def test_the_parts_of_a_library_are_all_but_the_code_for_gpus() -> None:
    for path in (TORCH / "lib").glob("libtorch_c*.so"):
        parts = list(parts_of(str(path)))
        assert all(name == str(path) for name, _, _ in parts)
        ends = [offset + size for _, offset, size in parts]
        starts = [offset for _, offset, _ in parts]
        assert all(end <= start for end, start in zip(ends, starts[1:], strict=False))
        size = path.stat().st_size
        assert ends[-1] == size
        has_gpu_code = b".nv_fatbin\0" in path.read_bytes()
        assert (sum(size for _, _, size in parts) < size) == has_gpu_code


def test_what_is_no_library_is_read_whole(tmp_path: Path) -> None:
    path = tmp_path / "lib.so"
    path.write_bytes(b"no ELF" * 300_000)
    assert [part[1:] for part in parts_of(str(path))] == [(0, 1_800_000)]
    path.write_bytes(b"\x7fELF\x02\x01" + b"\xff" * 2_000_000)
    assert list(parts_of(str(path))) == []
    assert list(parts_of(str(tmp_path / "gone"))) == []
