"""The package installs where people put it, and holds what it should."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
BUILD = """
from setuptools import build_meta
build_meta.build_sdist("built")
build_meta.build_wheel("built")
"""


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A copy of the sources in ``home/mpitrain``, as `git clone` leaves it."""
    copy = tmp_path / "home" / "mpitrain"
    ignored = shutil.ignore_patterns(".*", "__pycache__", "build", "runs", "*.egg-info")
    shutil.copytree(ROOT, copy, ignore=ignored)
    return copy


def pip(*words: str) -> None:
    offline = ("--no-deps", "--no-build-isolation", "--quiet")
    command = [sys.executable, "-m", "pip", *words, *offline]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_an_editable_install_works_in_the_folder_that_contains_the_clone(
    clone: Path, tmp_path: Path
) -> None:
    """There ``mpitrain`` is also a folder without ``__init__.py``."""
    made = tmp_path / "venv"
    venv.create(made)
    python = made / "bin" / "python"
    (site_packages,) = made.glob("lib/python*/site-packages")
    dependencies = sysconfig.get_path("purelib")
    (site_packages / "dependencies.pth").write_text(f"{dependencies}\n")
    install = ("install", "--ignore-installed", "--editable", str(clone))
    pip("--python", str(python), *install)
    script = clone.parent / "script.py"
    script.write_text("import mpitrain\nprint('version', mpitrain.__version__)\n")
    for words in (["-m", "mpitrain", "--version"], ["script.py"]):
        done = subprocess.run(
            [str(python), *words], cwd=clone.parent, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert "0.1.0" in done.stdout


def test_the_wheel_is_the_package_and_the_sdist_has_docs_and_tests(clone: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BUILD], cwd=clone, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    (wheel,) = clone.glob("built/*.whl")
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
    (sdist,) = clone.glob("built/*.tar.gz")
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
    for folder in ("docs", "tests", "examples", "benchmarks", "slurm", "pbs"):
        files = (path for path in (ROOT / folder).rglob("*") if path.is_file())
        wanted = {str(it.relative_to(ROOT)) for it in files if it.suffix != ".pyc"}
        assert wanted <= held
    assert {"Makefile", "CHANGELOG.md", "CONTRIBUTING.md", "LICENSE"} <= held
    assert not [name for name in held if name.endswith(".pyc")]
