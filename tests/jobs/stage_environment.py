"""A small environment to stage, and the start of `stage` from it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from launcher import ROOT, Mpi

SYSTEM_PYTHON = f"/usr/bin/python{sys.version_info.major}.{sys.version_info.minor}"

SHOW = """
import json, os, subprocess, sys
from mpi4py import MPI
import small_module

child = subprocess.run(
    [sys.executable, "-c", "import sys; print(sys.prefix)"],
    capture_output=True, text=True, check=True,
)
said = json.dumps({
    "rank": MPI.COMM_WORLD.rank, "prefix": sys.prefix, "module": small_module.__file__,
    "child": child.stdout.strip(), "path": os.environ["PATH"].split(":"),
    "argv": sys.argv, "name": __name__,
})
sys.stdout.write(said + "\\n")  # as a whole: ranks share the pipe
"""


def make_environment(folder: Path, *, size: int = 3 << 20, num_files: int = 40) -> Path:
    """Make a virtual environment of the system's Python, or of this one.

    It has mpi4py itself; what is large comes from the environment of the tests.
    """
    python = SYSTEM_PYTHON if Path(SYSTEM_PYTHON).exists() else sys.executable
    words = [python, "-m", "venv", "--without-pip", str(folder)]
    subprocess.run(words, check=True, env={**os.environ, "PYTHONPATH": ""})
    (packages,) = folder.glob("lib/python*/site-packages")
    theirs = Path(sysconfig.get_path("purelib"))
    shutil.copytree(theirs / "mpi4py", packages / "mpi4py")
    (packages / "tests.pth").write_text(f"{ROOT}\n{theirs}\n")
    (packages / "own.pth").write_text(f"{packages}/inner\n")
    (packages / "inner").mkdir()
    (packages / "small_module.py").write_text("NUMBER = 1\n")
    for number in range(num_files):
        name = packages / "data" / f"{number % 7}" / f"file{number}"
        name.parent.mkdir(parents=True, exist_ok=True)
        name.write_bytes(os.urandom(size // num_files))
    script = folder / "bin" / "tool"
    script.write_text(f"#!{folder}/bin/python\nimport sys; print(sys.prefix)\n")
    script.chmod(0o755)
    return folder


def command(mpi: Mpi, num_ranks: int, env: Path, *words: str) -> list[str]:
    """Return the words of ``mpirun -np N python -m mpitrain stage WORDS``."""
    start = [str(mpi.mpirun), "-np", str(num_ranks), *mpi.flags]
    return [*start, f"{env}/bin/python", "-m", "mpitrain", "stage", *words]
