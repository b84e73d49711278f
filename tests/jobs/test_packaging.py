"""The package installs where people put it, trains there, and holds what it should."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from environments import new_environment, pip, variables
from launcher import ROOT, Mpi, environment, mpirun

BUILD = """
import os, sys, tarfile
from pathlib import Path
from setuptools import build_meta
built = Path("built").absolute()
sdist = build_meta.build_sdist(built)
tarfile.open(built / sdist).extractall(sys.argv[1], filter="data")
os.chdir(Path(sys.argv[1], sdist.removesuffix(".tar.gz")))
build_meta.build_wheel(built)
"""


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the sources in ``home/mpitrain``, as `git clone` leaves it."""
    copy = tmp_path_factory.mktemp("clone") / "home" / "mpitrain"
    ignored = shutil.ignore_patterns(".*", "__pycache__", "build", "runs", "*.egg-info")
    shutil.copytree(ROOT, copy, ignore=ignored)
    return copy


@pytest.fixture(scope="module")
def built(clone: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that is built of it as pip does."""
    words = [sys.executable, "-c", BUILD, str(tmp_path_factory.mktemp("sdist"))]
    done = subprocess.run(words, cwd=clone, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return clone / "built"


def test_an_editable_install_works_in_the_folder_that_contains_the_clone(
    clone: Path, tmp_path: Path
) -> None:
    """There ``mpitrain`` is also a folder without ``__init__.py``."""
    python = new_environment(tmp_path / "env")
    pip(python, "install", "--ignore-installed", "--editable", str(clone))
    script = clone.parent / "script.py"
    script.write_text("import mpitrain\nprint('version', mpitrain.__version__)\n")
    for words in (["-m", "mpitrain", "--version"], ["script.py"]):
        done = subprocess.run(
            [str(python), *words],
            cwd=clone.parent,
            env={**environment(), "PYTHONPATH": ""},
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, done.stderr
        assert "0.1.0" in done.stdout


def test_it_installs_into_an_empty_environment_and_trains(
    openmpi: Mpi, built: Path, tmp_path: Path
) -> None:
    python = new_environment(tmp_path / "env")
    where = variables(openmpi, tmp_path / "env")
    find = [str(python), "-c", "import mpitrain"]
    assert subprocess.run(find, env=where, cwd=tmp_path, check=False).returncode == 1
    (file,) = built.glob("*.whl")
    pip(python, "install", "--ignore-installed", str(file))
    words = (str(python.parent / "mpitrain"), "--device", "cpu", "--epochs", "1")
    done = mpirun(openmpi, 2, *words, cwd=tmp_path, python=python, **where)
    assert done.status == 0, done.err
    assert "64 per step = 2 ranks x 32 x 1" in done.out
    assert len(list(tmp_path.glob("runs/*/model.pt"))) == 1


def test_the_wheel_is_the_package_and_the_sdist_has_docs_and_tests(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        (metadata,) = (name for name in names if name.endswith("/METADATA"))
        text = archive.read(metadata).decode()
    assert {name.partition("/")[0] for name in names} == {
        "mpitrain",
        metadata.partition("/")[0],
    }
    for minor in (11, 12, 13):
        assert f"Classifier: Programming Language :: Python :: 3.{minor}\n" in text
    assert "\nAuthor: The mpitrain developers\n" in text
    assert "\nKeywords: pytorch,mpi," in text
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    for folder in (
        *("docs", "tests", "examples", "benchmarks", "slurm", "pbs", "packaging"),
    ):
        files = (path for path in (ROOT / folder).rglob("*") if path.is_file())
        wanted = {str(it.relative_to(ROOT)) for it in files if it.suffix != ".pyc"}
        assert wanted <= held
    files = ("Makefile", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE", "CITATION.cff")
    assert {*files} <= held
    assert not [name for name in held if name.endswith(".pyc")]
