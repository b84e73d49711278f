"""Minimum versions are checked by metadata, before torch is imported."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def old_metadata(tmp_path: Path) -> Path:
    """A folder in which metadata says that torch and mpi4py are old ones."""
    for name, version in (("torch", "2.8.0+cu128"), ("mpi4py", "3.1.6")):
        folder = tmp_path / f"{name}-{version}.dist-info"
        folder.mkdir()
        text = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        (folder / "METADATA").write_text(text)
    return tmp_path


def run(old: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *words],
        env={**os.environ, "PYTHONPATH": f"{old}:{ROOT}", **variables},
        cwd=old,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )


@pytest.mark.parametrize(
    "words",
    [
        ("-m", "mpitrain"),
        ("-m", "mpitrain", "run", "-m", "this"),
        ("-c", "import mpitrain; mpitrain.init()"),
    ],
)
def test_old_packages_are_refused_before_torch_is_imported(
    old_metadata: Path, words: tuple[str, ...]
) -> None:
    done = run(old_metadata, "-X", "importtime", *words)
    assert done.returncode == 1
    said = [line for line in done.stderr.splitlines() if "import time" not in line]
    text = "\n".join(said)
    assert "torch: found 2.8.0+cu128, expected 2.9 or newer" in text
    assert "mpi4py: found 3.1.6, expected 4.1 or newer" in text
    assert "-m pip install --upgrade 'mpi4py>=4.1' 'torch>=2.9'" in text
    imported = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines()}
    assert "torch" not in imported


def test_check_says_so_on_a_login_node(old_metadata: Path) -> None:
    done = run(old_metadata, "-m", "mpitrain", "check")
    assert done.returncode == 1
    assert "too-old: torch 2.8.0+cu128 is older than 2.9, the minimum" in done.stdout
    assert "pip install --upgrade 'torch>=2.9'" in done.stdout.replace("\n", " ")


def test_where_it_is_not_installed_nothing_is_required(tmp_path: Path) -> None:
    code = "from mpitrain.launch import consistency as r; print(r.old_packages())"
    (tmp_path / "mpitrain").symlink_to(ROOT / "mpitrain")
    # -S: without site-packages, and so without the metadata of anything.
    done = subprocess.run(
        [sys.executable, "-S", "-c", code],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "[]\n"


@pytest.mark.skipif(shutil.which("cc") is None, reason="wants a C compiler")
def test_an_mpich_of_debians_is_refused_with_what_to_type(tmp_path: Path) -> None:
    """Its library has another name than the one that mpi4py's wheel asks for."""
    source = tmp_path / "mpi.c"
    source.write_text("int MPI_Get_version(int *v, int *s) { return *v = 4, *s = 0; }")
    library = tmp_path / "libmpich.so.12"
    soname = f"-Wl,-soname,{library.name}"
    compiler = ["cc", "-shared", "-fPIC", soname, "-o", str(library), str(source)]
    subprocess.run(compiler, check=True)
    code = "import mpitrain; mpitrain.init()"
    variables = {"MPI4PY_LIBMPI": str(library), "PMI_RANK": "0", "PMI_SIZE": "2"}
    done = run(tmp_path, "-c", code, **variables)
    assert done.returncode == 1
    assert "could not load an MPI library: libmpi.so.12: " in done.stderr
    assert "ln -sf /usr/lib/*/libmpich.so.12 ~/mpich/libmpi.so.12" in done.stderr
