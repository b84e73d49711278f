"""New virtual environments, in which tests build and install packages."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

from launcher import Mpi, environment


def new_environment(folder: Path) -> Path:
    """Make an environment with the dependencies of the tests; return its Python.

    It has neither mpitrain nor an MPI library.
    """
    venv.create(folder, symlinks=True)
    (packages,) = folder.glob("lib/python*/site-packages")
    # Only what lies there: no `.pth` file there counts, such as of an editable install.
    (packages / "tests.pth").write_text(f"{sysconfig.get_path('purelib')}\n")
    return folder / "bin" / "python"


def pip(python: Path, *words: str, **variables: str) -> None:
    """Run pip for the environment of a Python, with the build tools of the tests."""
    command = [sys.executable, "-m", "pip", "--python", str(python), "--quiet", *words]
    done = subprocess.run(
        [*command, "--no-deps", "--no-build-isolation"],
        env={**environment(), "PYTHONPATH": "", **variables},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


def variables(mpi: Mpi, env: Path, **more: str) -> dict[str, str]:
    """Return the environment of a user who has activated `env`."""
    base = environment(mpi)
    libmpi = mpi.libmpi or Path(sys.prefix, "lib/libmpi.so.40")
    if libmpi.exists():
        base["MPI4PY_LIBMPI"] = str(libmpi)
    base["PYTHONPATH"] = ""
    base["PATH"] = f"{env}/bin:{base['PATH']}"
    return {**base, "VIRTUAL_ENV": str(env), **more}
