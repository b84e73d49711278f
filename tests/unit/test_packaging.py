"""The package installs where people put it, and holds what it should."""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCES = ("mpitrain", "setup.cfg", "pyproject.toml", "README.md", "LICENSE")


@pytest.fixture
def clone(tmp_path: Path) -> Path:
    """A copy of the sources in ``home/mpitrain``, as `git clone` leaves it."""
    copy = tmp_path / "home" / "mpitrain"
    copy.mkdir(parents=True)
    for name in SOURCES:
        source = ROOT / name
        if source.is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, copy / name, ignore=ignored)
        else:
            shutil.copy(source, copy)
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
